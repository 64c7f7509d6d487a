"""The fleet of the paper's 32B model, emulated: what the benchmarks of many replicas set alike.

Its TP4 decode latencies and answer lengths. Time runs faster than in the real engines and one emulated token stands for
`TOKEN_SCALE` real ones; what is given here is in real tokens and in the engines' own seconds.
"""

from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig

TOKEN_SCALE = 32
GROUP_SIZE = 4
MAX_NEW_TOKENS = 20_000 // TOKEN_SCALE


def engine_flags(*, time_factor: float, step_tokens: int, stream_tokens: int) -> dict[str, object]:
    """The emulated engine's own options; emulated tokens."""
    return {
        "latency": "32B_TP4", "lengths": "32B_math", "time-factor": time_factor,
        "token-scale": TOKEN_SCALE, "step-tokens": step_tokens, "stream-interval": stream_tokens,
    }  # fmt: skip


def fleet_settings(
    model: Path,
    *,
    time_factor: float,
    num_replicas: int,
    groups_each: int,
    prompts_per_step: int,
    step_seconds: float,
    max_running: int = 256,
    capacity_tokens: int = 110_000,
    repack: bool = True,
    crowded_tokens: int | None = None,
    engine_options: dict[str, object] | None = None,
    run: dict[str, Any] | None = None,
) -> LaminarConfig:
    """The run; update mode `trajectory`, an emulated trainer.

    Args:
        model: folder of the tiny model that is published.
        time_factor: how much faster time runs.
        num_replicas: workers, an engine each.
        groups_each: groups in flight at a worker.
        prompts_per_step: groups of a step.
        step_seconds: of the trainer.
        max_running: requests that run at once in an engine.
        capacity_tokens: of an engine's cache.
        repack: whether the manager consolidates.
        crowded_tokens: how many more a trajectory may sample in a full cache (`rollout.repack`).
        engine_options: where the worker starts the engine itself.
        run: more of the section `run`.
    """
    return LaminarConfig.model_validate(
        {
            "run": {"max_steps": 10_000, "seed": 7} | (run or {}),
            "model": {"path": str(model)},
            "data": {"path": "-", "max_prompt_tokens": 16},
            "rewards": [{"kind": "benchmarks.emulated_fleet:one"}],
            "rollout": {
                "num_workers": num_replicas,
                "group_size": GROUP_SIZE,
                "max_new_tokens": MAX_NEW_TOKENS,
                "max_in_flight_groups": groups_each,
                "weight_update": "trajectory",
                "max_hold_seconds": 1000,
                "engine": {
                    "kind": "emulated",
                    "max_running": max_running,
                    "max_cached_tokens": capacity_tokens // TOKEN_SCALE,
                    "options": engine_options or {},
                },
                "repack": {
                    "enabled": repack,
                    "interval_seconds": 5.0 / time_factor,
                    "headroom_tokens": 512 // TOKEN_SCALE,
                    "crowded_tokens": crowded_tokens and crowded_tokens // TOKEN_SCALE,
                },
            },
            "trainer": {
                "kind": "emulated",
                "prompts_per_step": prompts_per_step,
                "emulated": {"step_seconds": [step_seconds / time_factor]},
            },
            "staleness": {"max_staleness": "unbounded"},
            "checkpoint": {"every_steps": 10_000},
        }
    )
