"""What the settings say of relays: transports by name, one more slot where weights travel."""

import sys

import pytest

from laminar.config.check import check_config
from laminar.config.check_plugins import plugin_faults
from laminar.config.explain import explain
from laminar.config.root import LaminarConfig
from laminar.config.sizes import num_weight_slots
from laminar.errors import ConfigError, EnvironmentSetupError
from relay.transports.mooncake import MooncakeTransport


def config(**sections) -> LaminarConfig:
    tree = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"kind": "exact_match"}]}
    return LaminarConfig.model_validate(tree | sections)


def faults(transport: str) -> list[str]:
    return [fault for fault in plugin_faults(config(relay={"transport": transport})) if "relay" in fault]


def test_an_unknown_transport_is_refused_with_the_nearest_name():
    (fault,) = faults("zmk")
    assert fault.startswith("`relay.transport` is 'zmk': did you mean zmq?")


@pytest.mark.parametrize("transport", ["auto", "zmq", "mooncake", "collective", "my_transports:Pigeons"])
def test_known_transports_and_own_ones_are_no_fault(transport, tmp_path, monkeypatch):
    (tmp_path / "my_transports.py").write_text("class Pigeons:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert faults(transport) == []


def test_a_cluster_has_one_more_slot_for_the_version_that_is_passed_on():
    alone, cluster = config(), config(cluster={"ray_address": "10.0.0.1:6379"})
    assert num_weight_slots(cluster) == num_weight_slots(alone) + 1
    assert "1 being passed on" in " ".join(explain(cluster).split())
    assert "passed on" not in explain(alone)


def test_a_transport_that_cannot_be_loaded_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(
        EnvironmentSetupError, match=r"laminar-rl\[mooncake\].*libibverbs1, libnl-3-200 and libnl-route-3-200"
    ):
        MooncakeTransport("127.0.0.1")


def config_faults(tree) -> list[str]:
    try:
        check_config(tree)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def relay_faults(relay, **sections) -> list[str]:
    tree = config(relay=relay, **sections)
    return [fault for fault in config_faults(tree) if "relay." in fault]


@pytest.mark.parametrize(
    ("relay", "rollout", "words"),
    [
        ({"num_gpus": 1}, {}, "transport `auto` uses no GPU"),
        ({"transport": "collective", "num_gpus": 0.2}, {"engine": {"kind": "sglang", "num_gpus": 0.8}}, "without MPS"),
    ],
)
def test_a_gpu_that_serves_nothing_or_stands_beside_a_busy_engine_is_refused(relay, rollout, words):
    (fault,) = relay_faults(relay, rollout=rollout)
    assert words in fault


@pytest.mark.parametrize("relay", [{"num_gpus": 1}, {"num_gpus": 0.2, "shares_gpu_by_mps": True}, {}])
def test_a_gpu_of_its_own_and_one_under_mps_are_no_fault(relay):
    engine = {"kind": "sglang", "num_gpus": 0.8}
    assert relay_faults({"transport": "collective", **relay}, rollout={"engine": engine}) == []


def test_pinned_loading_is_for_engines_with_ranks_of_their_own():
    (fault,) = [fault for fault in config_faults(config(rollout={"engine": {"weight_load": "pinned"}})) if "pinned" in fault]
    assert "the torch engine maps or reads the file by itself" in fault
