"""What the settings say of relays: transports by name, one more slot where weights travel."""

import pytest

from laminar.config.check_plugins import plugin_faults
from laminar.config.explain import explain
from laminar.config.root import LaminarConfig
from laminar.config.sizes import num_weight_slots


def config(**sections) -> LaminarConfig:
    tree = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"kind": "exact_match"}]}
    return LaminarConfig.model_validate(tree | sections)


def faults(transport: str) -> list[str]:
    return [fault for fault in plugin_faults(config(relay={"transport": transport})) if "relay" in fault]


def test_an_unknown_transport_is_refused_with_the_nearest_name():
    (fault,) = faults("zmk")
    assert fault.startswith("`relay.transport` is 'zmk': did you mean zmq?")


@pytest.mark.parametrize("transport", ["auto", "zmq", "collective", "my_transports:Pigeons"])
def test_known_transports_and_own_ones_are_no_fault(transport):
    assert faults(transport) == []


def test_a_cluster_has_one_more_slot_for_the_version_that_is_passed_on():
    alone, cluster = config(), config(cluster={"ray_address": "10.0.0.1:6379"})
    assert num_weight_slots(cluster) == num_weight_slots(alone) + 1
    assert "1 being passed on" in " ".join(explain(cluster).split())
    assert "passed on" not in explain(alone)
