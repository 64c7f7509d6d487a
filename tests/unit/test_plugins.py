"""Plugins: found by name or by path, their options checked by their own model."""

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from laminar.config.section import Section
from laminar.errors import ConfigError
from laminar.plugins import import_path, load_attribute, options_model, resolve, validate_options
from laminar.policies import samplers
from laminar.policies.samplers import SAMPLERS


class Inner(Section):
    depth: int = 1


class WindowOptions(Section):
    num_steps: int = Field(3, ge=1)
    mean_only: bool = False
    path: str
    inner: Inner = Inner()


class WithOptions:
    Options = WindowOptions


class WithoutOptions:
    pass


class LenientOptions(BaseModel):
    num_steps: int = 3


class WithLenientOptions:
    Options = LenientOptions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, as the config's own is."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# ---- kinds


def test_a_name_of_the_table_is_imported() -> None:
    assert resolve("oldest_first", SAMPLERS) is samplers.oldest_first


def test_every_name_of_the_samplers_table_resolves() -> None:
    assert [resolve(name, SAMPLERS).__name__ for name in SAMPLERS] == list(SAMPLERS)


def test_a_users_own_attribute_is_found_beside_the_config(folder: Path) -> None:
    package = folder / "my_rewards_a"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "exact.py").write_text("class Exact:\n    class Loose:\n        pass\n")
    assert resolve("my_rewards_a.exact:Exact", {}).__name__ == "Exact"
    assert load_attribute("my_rewards_a.exact:Exact.Loose").__name__ == "Loose"


def test_an_unknown_kind_names_the_setting_and_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve("oldest", SAMPLERS, "experience.sampler")
    assert str(raised.value) == (
        "`experience.sampler` is 'oldest': did you mean oldest_first? the names are fifo, oldest_first, freshest_first; "
        'your own goes by "package.module:Attr"'
    )


def test_a_path_is_known_without_importing_it() -> None:
    assert import_path("a", {"a": "no.such.module:Thing"}) == "no.such.module:Thing"
    assert import_path("no.such.module:Thing", {}) == "no.such.module:Thing"


@pytest.mark.parametrize("path", [":Attr", "module:", "module", "a:b:c", "a..b:C", "a b:C", "./file.py:C", ".a:C"])
def test_a_malformed_path_is_refused_with_the_form(path: str) -> None:
    with pytest.raises(ConfigError, match=r'must have the form "package\.module:Attr"'):
        load_attribute(path)


@pytest.mark.parametrize(("path", "missing"), [("no_such_a:B", "no_such_a"), ("laminar.no_such.x:B", "laminar.no_such")])
def test_a_missing_module_is_named(path: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no module {missing}; put it beside the config file or install it"):
        load_attribute(path, "rewards[0].kind")


def test_a_package_that_the_plugin_needs_is_told_from_a_missing_plugin(folder: Path) -> None:
    (folder / "my_rewards_b.py").write_text("import no_such_library\n")
    with pytest.raises(ConfigError, match="it needs the package no_such_library, which is not installed"):
        load_attribute("my_rewards_b:Exact")


def test_a_plugin_that_is_no_python_is_one_sentence(folder: Path) -> None:
    (folder / "my_rewards_c.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match="my_rewards_c cannot be imported: invalid syntax"):
        load_attribute("my_rewards_c:score")


def test_a_missing_attribute_gets_the_nearest_name(folder: Path) -> None:
    (folder / "my_rewards_d.py").write_text("def exact_score(): pass\n")
    with pytest.raises(ConfigError) as raised:
        load_attribute("my_rewards_d:exakt_score", "rewards[1].kind")
    assert str(raised.value) == (
        "`rewards[1].kind` is 'my_rewards_d:exakt_score': did you mean exact_score? my_rewards_d has no exakt_score"
    )


def test_what_a_users_module_raises_passes_as_it_is(folder: Path) -> None:
    (folder / "my_rewards_e.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_attribute("my_rewards_e:Exact")


# ---- options


def test_options_are_read_by_the_implementations_model() -> None:
    options = validate_options(WithOptions, {"num_steps": 5, "path": "x"})
    assert options == WindowOptions(num_steps=5, path="x")


def test_options_can_be_checked_by_a_model_apart_from_the_implementation() -> None:
    assert validate_options(WindowOptions, {"path": "x"}) == WindowOptions(path="x")
    assert options_model(WindowOptions) is options_model(WithOptions) is WindowOptions


@pytest.mark.parametrize("attribute", [WithoutOptions, samplers.fifo, None])
def test_no_options_are_taken_where_none_are_declared(attribute: object) -> None:
    assert validate_options(attribute, {}) is None
    with pytest.raises(ConfigError, match=r"`environment\.options` has width, depth, but this kind takes no options"):
        validate_options(attribute, {"width": 1, "depth": 2}, "environment.options")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stepz": 5, "path": ""}, r"unknown key `o\.num_stepz`: did you mean num_steps\? the options are num_steps, "),
        ({"inner": {"x": 1}, "path": ""}, r"unknown key `o\.inner\.x`: the options are depth"),
        ({"num_steps": "5", "path": ""}, r"`o\.num_steps` is '5': Input should be a valid integer"),
        ({"num_steps": 0, "path": ""}, r"`o\.num_steps` is 0: Input should be greater than or equal to 1"),
        ({"num_steps": True, "path": ""}, r"`o\.num_steps` is True: "),
        ({}, r"`o\.path` is missing"),
        ({"num_steps": 0, "mean": 1}, r"`o\.num_steps` is 0: .*; `o\.path` is missing; unknown key `o\.mean`"),
    ],
)
def test_wrong_options_are_refused_by_path_and_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_options(WithOptions, options, "o")


def test_a_model_that_lets_misspelt_options_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`Options` of WithLenientOptions must be a subclass of laminar\.config\.section"):
        validate_options(WithLenientOptions, {"num_stepz": 5})
