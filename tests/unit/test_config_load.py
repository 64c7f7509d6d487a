"""Reading, overriding, refusing and writing configs (case D27)."""

import os
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.config.load import dump_toml, load_config, resolve_path
from laminar.config.schema import all_paths
from laminar.config.toml_text import format_document
from laminar.errors import ConfigError

REQUIRED = 'model.path = "a"\ndata.path = "b"\n'


def load(tmp_path: Path, text: str = "", *overrides: str):
    file = tmp_path / "run.toml"
    file.write_text(REQUIRED + text)
    return load_config(file, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[run]\nmax_steps = 3\nmax_steps = 4", "line 5: `max_steps` is given twice; keep one of them"),
        ('[run]\nname = "x"\n[data]\n[run]\nseed = 1', "line 5: `[data]` is given twice; keep one of them"),
        ("[run]\nname = demo", "line 4: not TOML (invalid value) in `name = demo`; text needs quotes"),
        ('[run]\nname = "demo', "not TOML"),
        ("# a\u2028b\n[run]\nname = demo", "line 5: not TOML (invalid value) in `name = demo`"),
        ("run.max_steps = " + "9" * 5000, "a number is too long"),
        ("x = " + "[" * 3000, "lie too deep within each other"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_the_line(tmp_path, text, sentence):
    assert sentence in refusal(tmp_path, text)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    file = tmp_path / "missing.toml"
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[trainer]\nprompts_per_step = "2"',
            '`trainer.prompts_per_step` is "2": it must be a whole number of at least 1; take it',
        ),
        ('[trainer]\nlearning_rate = "fast"', '`trainer.learning_rate` is "fast": it must be a finite number above 0'),
        ("[trainer]\nlearning_rate = nan", "`trainer.learning_rate` is nan: it must be a finite number above 0"),
        ("[trainer]\nmax_grad_norm = inf", "`trainer.max_grad_norm` is inf: it must be a finite number above 0"),
        ("[staleness]\nmax_wait_seconds = -1", "`staleness.max_wait_seconds` is -1: it must be a finite number above 0"),
        ("[staleness]\nmax_staleness = -1", 'is -1: it must be a whole number of at least 0 or "unbounded"'),
        ("[staleness]\nmax_staleness = 1.5", 'is 1.5: it must be a whole number of at least 0 or "unbounded"'),
        ('[staleness]\npolicy = "hope"', '`staleness.policy` is "hope": it must be "wait", "drop" or "mask"'),
        ("data.shuffle = 1", "`data.shuffle` is 1: it must be true or false"),
        ("[run]\nname = 2", "`run.name` is 2: it must be text"),
        ("[rollout.sampling]\ntop_k = 0", "`rollout.sampling.top_k` is 0: it must be -1 or a whole number of at least 1"),
        ("[rollout.sampling]\nstop_token_ids = [1, -2]", "`rollout.sampling.stop_token_ids[1]` is -2"),
        ('[rewards]\nkind = "regex"', "it must be a list of tables, each written as `[[rewards]]`"),
        ("[[rewards]]\nweight = 1.0", "`rewards[0].kind` is missing: Name of the implementation"),
        ("eval.path = 3", "`eval.path` is 3: it must be text"),
        (
            "[simulate]\ntrain_flops = 1e-300",
            "`simulate.train_flops` is 1e-300: it must be a finite number of at least 1e+06 and at most 1e+18",
        ),
        ("[simulate]\nmodel_parameters = 1e300", "`simulate.model_parameters` is 1e+300"),
        ("[simulate]\nlength_quantiles = {p50 = 1e300}", "`simulate.length_quantiles.p50` is 1e+300"),
        ("trainer = 3", "`trainer` is 3: it must be a table, written as `[trainer]`"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_what_may_stand_there(tmp_path, text, sentence):
    assert sentence in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("run.max_steps=9223372036854775808", "run.max_steps"),
        ("staleness.max_staleness=" + "9" * 400, "staleness.max_staleness"),
        ("rollout.sampling.stop_token_ids=[1, 0x" + "f" * 5000 + "]", "rollout.sampling.stop_token_ids[1]"),
        ("environment.options.seed=9223372036854775808", "environment.options.seed"),
        ("trainer.learning_rate=" + "9" * 400, "trainer.learning_rate"),
    ],
)
def test_a_whole_number_that_needs_more_than_64_bits_is_refused(tmp_path, override, path):
    told = refusal(tmp_path, "", override)
    assert f"`{path}` is " in told
    assert "a whole number must be below 2^63" in told


def test_what_cannot_be_written_as_utf_8_is_refused(tmp_path):
    odd = tmp_path / os.fsdecode(b"od\xffd")
    odd.mkdir()
    assert "`run.config_directory` is" in refusal(odd, "")
    assert "`run.directory` is 'r\\udcff'" in refusal(tmp_path, "", "run.directory=r\udcff")


def test_paths_begin_at_home_and_those_that_no_system_takes_lie_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(tmp_path, "", "run.directory=~/runs", "relay.root=~/memory", "model.path=~nosuchuser/x")
    assert (config.run.directory, config.relay.root) == (f"{tmp_path}/runs", f"{tmp_path}/memory")
    assert config.model.path == "~nosuchuser/x"
    assert load(tmp_path, "", "model.path=" + "a" * 300).model.path == "a" * 300


def test_missing_required_settings_are_named_one_by_one(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "empty.toml")
    assert "`model.path` is missing" in str(caught.value)
    assert "`data.path` is missing" in str(caught.value)


def test_staleness_zero_is_accepted(tmp_path):
    assert load(tmp_path, "[staleness]\nmax_staleness = 0").staleness.bound == 0


def test_switched_off_features_need_no_settings(tmp_path):
    config = load(tmp_path)
    assert config.eval.path == ""


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("trainer.learning_rate=1e-6", ("trainer", "learning_rate"), 1e-6),
        ("trainer.prompts_per_step = 3", ("trainer", "prompts_per_step"), 3),
        ("run.name=2", ("run", "name"), "2"),
        ("run.name=true", ("run", "name"), "true"),
        ('run.name="quoted"', ("run", "name"), "quoted"),
        ("run.name=demo", ("run", "name"), "demo"),
        ("staleness.max_staleness=unbounded", ("staleness", "max_staleness"), "unbounded"),
        ("staleness.max_staleness=3", ("staleness", "max_staleness"), 3),
        ("rollout.sampling.stop_token_ids=[1, 2]", ("rollout", "sampling", "stop_token_ids"), [1, 2]),
        ("rollout.weight_update=in_flight", ("rollout", "weight_update"), "in_flight"),
        ("trainer.algorithm.options.clip_low=0.1", ("trainer", "algorithm", "options", "clip_low"), 0.1),
        ("rollout.engine.options.flag=on", ("rollout", "engine", "options", "flag"), "on"),
        ("rewards[0].weight=2", ("rewards", 0, "weight"), 2.0),
        ('simulate.length_quantiles."p99.9"=3', ("simulate", "length_quantiles", "p99.9"), 3.0),
    ],
)
def test_an_override_sets_one_value(tmp_path, override, path, value):
    found = load(tmp_path, '[[rewards]]\nkind = "regex"', override).model_dump()
    for part in path:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("max_steps", "write it as section.key=value"),
        ("a..b=1", "write it as section.key=value"),
        ("rewards[1].weight=2", "`rewards` has 1 items"),
        ("run.seed.deep=2", "`run.seed` is not a table"),
        ("run.max_steps=many", '`run.max_steps` is "many": it must be a whole number of at least 1 (from the command line)'),
        ('run.max_steps="2"', "take it out of its quotes"),
        ('staleness.max_staleness="2"', 'at least 0 or "unbounded"; take it out of its quotes'),
    ],
)
def test_a_wrong_override_is_refused(tmp_path, override, sentence):
    assert sentence in refusal(tmp_path, '[run]\nseed = 1\n[[rewards]]\nkind = "regex"', override)


def test_a_written_config_loads_as_the_same_config_from_another_folder(tmp_path):
    (tmp_path / "a").mkdir()
    text = (
        '[rollout]\nweight_update = "trajectory"\n[rollout.sampling]\nstop = ["\\n\\u007f\\"", "ä"]\n'
        "[[rewards]]\nkind = \"regex\"\noptions = {pattern = '(\\d+)', deep = [1, {z = 1.5e-7}], none = {}}\n"
        '[[rewards]]\nkind = "x:Y"\nname = "second"\n[trainer.algorithm]\nkind = "grpo"\noptions = {"odd key" = true}\n'
    )
    config = load(tmp_path, text, "staleness.max_staleness=unbounded")
    elsewhere = tmp_path / "runs"
    elsewhere.mkdir()
    (elsewhere / "config.toml").write_text(dump_toml(config))
    assert load_config(elsewhere / "config.toml") == config
    assert config.model.path == str(tmp_path / "a")


def test_only_settings_that_default_to_none_can_be_none():
    optional = [place for _, place in all_paths() if type(None) in getattr(place.annotation, "__args__", ())]
    assert optional
    assert not any(place.is_required for place in optional)


plain = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), plain, max_size=4))
def test_any_plain_document_reads_back_as_written(document):
    assert tomllib.loads(format_document(document)) == document


def test_a_path_counts_from_the_config_file_first_then_from_the_working_folder(tmp_path):
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside / "both", working / "both", working / "one"):
        folder.mkdir(parents=True)
    assert resolve_path("both", beside, working) == beside / "both"
    assert resolve_path("one", beside, working) == working / "one"
    assert resolve_path(str(working / "one"), beside, beside) == working / "one"
    assert resolve_path("none", beside, working) is None
    assert resolve_path("", beside, working) is None


def test_the_folder_of_the_config_comes_last_in_the_module_search(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load(tmp_path)
    assert sys.path[-1] == str(tmp_path) == config.run.config_directory
