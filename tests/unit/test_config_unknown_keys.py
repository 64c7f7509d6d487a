"""Case D27, unknown keys: each is refused with its full path and, if near, the right spelling."""

from pathlib import Path

import pytest

from laminar.config.hints import unknown_keys
from laminar.config.load import load_config
from laminar.config.schema import all_paths, format_path
from laminar.errors import ConfigError

REQUIRED = 'model.path = "a"\ndata.path = "b"\n'


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(REQUIRED + text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[staleness]\nmax_stalness = 2", "unknown key `staleness.max_stalness`: did you mean `staleness.max_staleness`?"),
        (
            "[rollout.sampling]\ngroup_size = 4",
            "unknown key `rollout.sampling.group_size`: it belongs at `rollout.group_size`",
        ),
        ("[rollout]\ntemperature = 1.0", "unknown key `rollout.temperature`: it belongs at `rollout.sampling.temperature`"),
        ("[trainer]\nmax_staleness = 1", "unknown key `trainer.max_staleness`: it belongs at `staleness.max_staleness`"),
        ("[stalenes]\nmax_staleness = 1", "unknown section `stalenes`: did you mean `staleness`?"),
        ("[sampling]\ntemperature = 1.0", "unknown section `sampling`: it belongs at `rollout.sampling`"),
        ('[[rewards]]\nkind = "regex"\nwieght = 2.0', "unknown key `rewards[0].wieght`: did you mean `rewards[0].weight`?"),
        (
            '[[rewards]]\nkind = "a"\n[[rewards]]\nkind = "b"\nwieght = 2.0',
            "unknown key `rewards[1].wieght`: did you mean `rewards[1].weight`?",
        ),
        (
            "[rollout]\nn_samples_per_prompt = 4",
            "unknown key `rollout.n_samples_per_prompt`: here it is `rollout.group_size`",
        ),
        (
            "[grpo.async_grpo]\nmax_trajectory_age_steps = 1",
            "unknown key `grpo.async_grpo.max_trajectory_age_steps`: here it is `staleness.max_staleness`",
        ),
        ('[[rewards]]\nkind = "a"\npattern = "b"', "goes into `rewards[0].options`"),
        ("[trainer]\nclip_low = 0.1", "it belongs at `trainer.algorithm.options.clip_low`"),
        ("[loss]\nkl_coef = 0.1", "it belongs at `trainer.algorithm.options.kl_coef`"),
        ("[trainer]\ndual_clip = 3.0", "it belongs at `trainer.algorithm.options.dual_clip`"),
        ("[trainer]\nkl_estimator = 'k3'", "it belongs at `trainer.algorithm.options.kl_estimator`"),
        ("[trainer]\nc_clip = 3.0", "here it is `trainer.algorithm.options.dual_clip`"),
        ("[trainer]\nmax_epochs = 2", "passes over a step's batch are `trainer.epochs`"),
        ("[zebra]\nplumage = 3", "unknown section `zebra`: the keys here are run, model, data,"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_a_hint(tmp_path, text, sentence):
    assert sentence in refusal(tmp_path, text)


def test_an_unknown_override_is_refused_with_its_source(tmp_path):
    assert "unknown key `trainer.lr`: here it is `trainer.learning_rate` (from the command line)" in refusal(
        tmp_path, "", "trainer.lr=1e-6"
    )


def test_a_right_key_at_the_top_is_sent_to_its_section():
    assert unknown_keys({"group_size": 4}) == [
        (("group_size",), "unknown key `group_size`: it belongs at `rollout.group_size`")
    ]


def test_all_faults_are_reported_at_once_and_no_library_speaks(tmp_path):
    text = refusal(tmp_path, '[rollout]\ngroup_sise = 3\nnum_workers = 0\n[trainer]\nmini_batches = "2"')
    assert "3 settings are wrong" in text
    assert "`rollout.group_sise`" in text
    assert "`rollout.num_workers` is 0: it must be a whole number of at least 1" in text
    assert '`trainer.mini_batches` is "2": it must be a whole number of at least 1, without the quotes' in text
    assert "pydantic" not in text


def test_every_setting_is_described_in_its_model():
    undescribed = [format_path(path) for path, place in all_paths() if place.section is None and not place.description]
    assert undescribed in ([], ["rewards"])
