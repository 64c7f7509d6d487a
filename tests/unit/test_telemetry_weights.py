"""What weights cost on their way appears with every step, as the worst of all machines."""

from laminar.telemetry.registry import check_declared
from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView
from relay.receiver import HopReport
from relay.role import broadcast_metrics


def event(role: str, kind: str, metrics: dict[str, float], **fields) -> Event:
    return Event(role, kind, 0.0, metrics, fields)


def test_a_received_version_tells_seconds_bytes_and_their_ratio():
    metrics = broadcast_metrics(HopReport("0.3", 0.5, 4_000_000, 2))
    check_declared(metrics)
    assert metrics == {
        "weights/broadcast_seconds": 0.5,
        "weights/broadcast_bytes": 4_000_000,
        "weights/broadcast_bytes_per_second": 8_000_000.0,
        "weights/broken_pieces": 2,
    }


def test_a_step_shows_the_slowest_broadcast_pull_and_swap():
    view = RunView(max_steps=3)
    view.apply(event("relay-1", "relay", broadcast_metrics(HopReport("0.1", 0.5, 100, 0))))
    view.apply(event("relay-2", "relay", broadcast_metrics(HopReport("0.1", 2.0, 100, 1))))
    view.apply(event("rollout-0", "worker", {"weights/swap_seconds": 0.3, "weights/pull_seconds": 0.1}))
    view.apply(event("rollout-1", "worker", {"weights/swap_seconds": 0.2, "weights/pull_seconds": 0.2}))
    shown = view.apply(event("trainer-0", "step", {"train/step": 1}, train_started=0.0, train_ended=1.0))
    weights = {name: value for name, value in shown.items() if name.startswith("weights/")}
    check_declared(weights)
    assert weights == {
        "weights/broadcast_seconds": 2.0,
        "weights/broadcast_bytes": 100,
        "weights/broken_pieces": 1,
        "weights/broadcast_bytes_per_second": 50.0,
        "weights/pull_seconds": 0.2,
        "weights/swap_seconds": 0.3,
    }


def test_on_one_machine_nothing_is_said_of_a_broadcast():
    view = RunView(max_steps=3)
    shown = view.apply(event("trainer-0", "step", {"train/step": 1}, train_started=0.0, train_ended=1.0))
    assert not any(name.startswith("weights/broadcast") for name in shown)
