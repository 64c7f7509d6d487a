"""Weights are copied beside the next step's forward and backward passes, and never change under the copy."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import WEIGHTS_NAME, VersionStore
from rollout.engines.tiny_model import write_tiny_model
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.publishing import WeightPublisher
from trainer.step import train_step

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = pytest.mark.heavy


class Gated:
    """An engine's weights, which can be read once the gate is open."""

    is_partitioned = False

    def __init__(self, engine):
        self.engine, self.state_shapes, self.gate = engine, engine.state_shapes, threading.Event()

    def state_tensors(self):
        assert self.gate.wait(30), "nobody freed the weights"
        yield from self.engine.state_tensors()


def test_a_step_computes_beside_the_copy_and_waits_for_its_end_before_the_first_update(ranks, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    engine = TrainerEngine(oracle.make_config(model), ranks)
    weights, store = Gated(engine), VersionStore(tmp_path, "run", "node", keep_versions=2)
    publisher = WeightPublisher(Publisher(store, model), weights)
    before = {name: tensor.clone() for name, tensor in engine.state_tensors()}
    first = publisher.publish(WeightVersion(0, 0), beside=True)
    assert (first.skipped, first.copy_seconds) == (False, 0.0)

    def free_weights():  # forward and backward are done, and not a byte has been copied yet
        weights.gate.set()
        publisher.free_weights()

    engine.before_update = free_weights
    report = train_step(engine, PolicyGradient(GrpoOptions()), oracle.make_groups(1), 1)
    assert report.skipped_reason is None
    assert any(not torch.equal(before[name], tensor) for name, tensor in engine.state_tensors())
    second = publisher.publish(WeightVersion(0, 1), beside=True)
    assert second.copy_seconds > 0
    assert second.stall_seconds > 0
    publisher.settle()
    stored = [load_file(store.folder_of(WeightVersion(0, number)) / WEIGHTS_NAME) for number in (0, 1)]
    for name, tensor in engine.state_tensors():
        if name in stored[0]:
            assert torch.equal(stored[0][name], before[name])
            assert torch.equal(stored[1][name], tensor)
