"""One system of the comparison in `benchmarks.systems`: its settings, and what a window of its run says.

Sizes are the paper's 32B model: devices in groups of four an engine (TP4), answers of figure 17, decode steps of figure 4,
and a trainer that takes time by its tokens and its devices. Time runs `time_factor` times faster; one emulated token stands
for `TOKEN_SCALE` real ones, and streams hear of `STEP_TOKENS` of them at once. Values are in real tokens and engine seconds.
`systems_run` runs it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laminar.config.root import LaminarConfig
from laminar.telemetry.stream import Event

DEVICES, DEVICES_PER_ENGINE = 32, 4
GROUP_SIZE, PROMPTS_PER_STEP = 16, 48
TOKEN_SCALE, STEP_TOKENS = 32, 8
MAX_NEW_TOKENS = 16384
CACHED_TOKENS = 750_000
"""A 32B engine on four devices of 80 GB: some 200 GB beside the weights, 0.26 MB a token."""
TRAINED_TOKENS_PER_DEVICE_SECOND = 1300.0
"""Figure 11's 32B run on 32 GPUs is bound by its 16 training ones: 21,068 / 16."""


@dataclass(frozen=True, slots=True)
class System:
    """What is compared.

    Attributes:
        name: in the table.
        engines: replicas, of four devices each.
        training_devices: that the trainer's pace is counted for. In a colocated system all devices do both.
        max_staleness: K.
        weight_update: as in the config; the lock-step systems swap between batches anyway.
        in_step: a batch is claimed only while nothing is in flight.
        groups_each: most groups that an engine plays at once; None: an equal share of a batch.
    """

    name: str
    engines: int
    training_devices: int
    max_staleness: int | Literal["unbounded"]
    weight_update: Literal["trajectory", "in_flight"] = "trajectory"
    in_step: bool = False
    groups_each: int | None = None

    @property
    def most_groups_each(self) -> int:
        """`groups_each`, filled in."""
        return self.groups_each or -(-PROMPTS_PER_STEP // self.engines)


def settings(system: System, model: Path, time_factor: float) -> LaminarConfig:
    """The run; lengths in emulated tokens, times in seconds of this machine."""
    pace = TRAINED_TOKENS_PER_DEVICE_SECOND * system.training_devices / TOKEN_SCALE * time_factor
    moves = system.weight_update == "trajectory" and not system.in_step and system.max_staleness != 0
    return LaminarConfig.model_validate(
        {
            "run": {"max_steps": 10_000, "seed": 7},
            "model": {"path": str(model)},
            "data": {"path": "-", "max_prompt_tokens": 16},
            "rewards": [{"kind": "benchmarks.emulated_fleet:one"}],
            "rollout": {
                "num_workers": system.engines,
                "group_size": GROUP_SIZE,
                "max_new_tokens": MAX_NEW_TOKENS // TOKEN_SCALE,
                "max_in_flight_groups": system.most_groups_each,
                "weight_update": system.weight_update,
                "max_hold_seconds": 1000,
                "engine": {
                    "kind": "emulated",
                    "max_running": GROUP_SIZE * system.most_groups_each,
                    "max_cached_tokens": CACHED_TOKENS // TOKEN_SCALE,
                },
                "repack": {"enabled": moves, "interval_seconds": 0.5, "headroom_tokens": 512 // TOKEN_SCALE},
            },
            "trainer": {
                "kind": "emulated",
                "prompts_per_step": PROMPTS_PER_STEP,
                "emulated": {"step_seconds": [0.0], "tokens_per_second": pace},
            },
            "staleness": {"max_staleness": system.max_staleness},
            "checkpoint": {"every_steps": 10_000},
        }
    )


def trained(window: Sequence[Event], time_factor: float) -> dict[str, Any]:
    """What the trainer did between the ends of the window's first and last step.

    Args:
        window: `step` events in order.
        time_factor: real seconds in one of this machine.
    """
    measured = window[1:]
    seconds = measured[-1].fields["train_ended"] - window[0].fields["train_ended"]
    busy = sum(event.fields["train_ended"] - event.fields["train_started"] for event in measured)
    tokens = sum(event.metrics["train/tokens"] for event in measured)
    ages: Counter[int] = Counter()
    for event in measured:
        for name, count in event.metrics.items():
            if name.startswith("staleness/histogram_"):
                ages[int(name.rsplit("_", 1)[1])] += round(count)
    return {
        "trained_tokens_per_second": tokens * TOKEN_SCALE / seconds / time_factor,
        "step_seconds": seconds * time_factor / len(measured),
        "trainer_idle_share": max(0.0, 1 - busy / seconds),
        "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        "staleness_max": max(ages, default=0),
        "staleness_shares": {age: round(count / ages.total(), 3) for age, count in sorted(ages.items())},
    }


def generated(before: dict[str, Any], after: dict[str, Any], engines: int, time_factor: float) -> dict[str, Any]:
    """What the engines did between two looks, what they and the workers took of this machine's cores, and who was late.

    `workers_late_share` is the time by which the workers' event loop woke later than it had asked for, over all time.
    """
    wall = after["at"] - before["at"]
    states = {name: seconds - before["states"].get(name, 0.0) for name, seconds in after["states"].items()}
    decoding = states.get("time/state_decode_seconds", 0.0) + states.get("time/state_drain_seconds", 0.0)
    return {
        "generated_tokens_per_second": (after["generated_tokens"] - before["generated_tokens"])
        * TOKEN_SCALE / wall / time_factor,
        "engine_idle_share": max(0.0, 1 - decoding / wall / engines),
        "engines_cpu_share": (after["cpu_seconds"] - before["cpu_seconds"]) / wall,
        "workers_cpu_share": (after["workers_cpu_seconds"] - before["workers_cpu_seconds"]) / wall,
        "engines_lag_seconds": after["lag_seconds"] - before["lag_seconds"],
        "workers_late_share": (after["late_seconds"] - before["late_seconds"]) / wall,
        "wall_seconds": wall,
    }  # fmt: skip
