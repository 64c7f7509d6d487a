"""The README's engine of one's own is started by its kind, answers, and has its options judged."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.config.check_plugins import plugin_faults
from laminar.config.load import load_config
from laminar.config.sizes import num_weight_slots
from laminar.errors import ConfigError
from laminar.types import FinishReason, SamplingParameters, WeightVersion
from rollout.engines.client import EngineClient
from rollout.engines.launch import EngineLaunch, engine_kind
from rollout.engines.process import EngineProcess
from rollout.engines.tiny_model import write_tiny_model
from rollout.start_engine import engine_options

README = (Path(__file__).parents[2] / "rollout" / "engines" / "README.md").read_text()
RECIPE = Path(__file__).parents[2] / "deploy" / "recipes" / "tiny.toml"
V0 = WeightVersion(0, 0)


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (source,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if "EngineKind(" in text]
    (tmp_path / "my_engine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_engine", None)


async def test_it_is_started_and_answers_as_any_other(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    launch = EngineLaunch(model, V0, "secret", "run-1", tmp_path / "log", kind="my_engine:MINE", options={"threads": 1})
    process = EngineProcess(launch)
    try:
        client = EngineClient(await process.start(60), token="secret", run_id="run-1", version=V0)
        assert await client.weight_version() == V0
        answer = await client.generate(np.array([5, 9], np.int32), SamplingParameters(1.0, 4, 0), request_id="a" * 32)
        assert answer.finish_reason == FinishReason.LENGTH
        await client.close()
    finally:
        await process.kill()


def test_its_options_are_judged_before_a_run_starts():
    overrides = ['rollout.engine.kind="my_engine:MINE"', "rollout.engine.options={threads = 1}"]
    config = load_config(RECIPE, overrides)
    assert list(plugin_faults(config)) == []
    assert num_weight_slots(config) == config.relay.keep_versions + 1 + config.rollout.num_workers
    assert engine_options(config, engine_kind("my_engine:MINE")) == {"threads": 1}
    assert engine_options(load_config(RECIPE, overrides[:1]), engine_kind("my_engine:MINE")) == {"threads": 2}
    (fault,) = plugin_faults(load_config(RECIPE, [overrides[0], "rollout.engine.options={thread = 1}"]))
    assert fault.startswith("unknown key `rollout.engine.options.thread`: did you mean threads?")


def test_what_is_no_engine_is_refused():
    with pytest.raises(ConfigError, match="that is no EngineKind"):
        engine_kind("my_engine:Options")
