"""What a real run says of lengths, environment and pace: makes a setting that is simulated like that run (`--from RUN`).

Lengths, turns and environment times are those of its `trajectories/` records; the trainer's steps those of `metrics.jsonl`;
the engine's decode times are scaled until simulated trajectories take as long a token as the recorded ones did.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError
from laminar.json_lines import iterate_lines
from laminar.simulate.from_config import Setting
from laminar.simulate.simulation import simulate
from laminar.simulate.timings import StepTimes
from laminar.simulate.workload import observed_lengths, observed_quantiles
from laminar.trajectories import TrajectoryFolder

ROUNDS = 3
"""Simulations that scale the decode times; each starts from the last one's ratio."""
MIN_RECORDS = 8


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run's files say.

    Attributes:
        sampled_tokens: of each recorded trajectory without failure.
        prompt_tokens: mean.
        observation_tokens: mean, between two turns.
        num_turns: mean, rounded.
        turn_seconds: of the environment, of each trajectory with more than one turn, by gap.
        seconds_per_token: mean generating time over mean sampled tokens.
        step_seconds: of the trainer, waits left out.
    """

    sampled_tokens: tuple[float, ...]
    prompt_tokens: float
    observation_tokens: float
    num_turns: int
    turn_seconds: tuple[float, ...]
    seconds_per_token: float
    step_seconds: tuple[float, ...]


def observe(trajectories: Path, metrics: Path) -> Observed:
    """Read a run's records.

    Raises:
        ConfigError: if there are too few.
    """
    folder = TrajectoryFolder(trajectories)
    found = [folder.read(summary) for summary in folder.summaries() if not summary.failure]
    records = [record for record in found if record is not None and record["purpose"] == "train"]
    if len(records) < MIN_RECORDS:
        raise ConfigError(
            f"{trajectories} holds {len(records)} records of trained trajectories, fewer than {MIN_RECORDS}; "
            "run longer, or raise metrics.trajectory_rate"
        )
    given = [_given_tokens(record) for record in records]
    gaps = [max(0, len(record["turns"]) - 1) for record in records]
    sampled = [float(record["num_sampled_tokens"]) for record in records]
    generating = [record["timings"]["generate"] for record in records]
    seconds = [r["timings"]["environment"] / gap for r, gap in zip(records, gaps, strict=True) if gap]
    lines = [line for line in iterate_lines(metrics) if line["kind"] == "step"]
    return Observed(
        sampled_tokens=tuple(sampled),
        prompt_tokens=statistics.fmean(prompt for prompt, _ in given),
        observation_tokens=sum(rest for _, rest in given) / max(1, sum(gaps)),
        num_turns=1 + round(statistics.fmean(gaps)),
        turn_seconds=tuple(seconds),
        seconds_per_token=sum(generating) / max(1.0, sum(sampled)),
        step_seconds=tuple(_busy_seconds(line) for line in lines),
    )


def calibrated(setting: Setting, observed: Observed) -> Setting:
    """The setting with what was observed in place of what was assumed."""
    workload = replace(
        setting.workload,
        lengths=observed_lengths(observed.sampled_tokens),
        prompt_tokens=round(observed.prompt_tokens),
        observation_tokens=round(observed.observation_tokens),
        num_turns=observed.num_turns,
        turn_seconds=observed_quantiles(observed.turn_seconds) if observed.turn_seconds else None,
    )
    trainer = setting.cluster.trainer
    if observed.step_seconds:
        answers = workload.prompts_per_step * workload.group_size
        tokens = answers * (workload.mean_sampled_tokens + workload.given_tokens)
        tokens_per_second = tokens / statistics.fmean(observed.step_seconds) / trainer.num_gpus
        trainer = replace(trainer, tokens_per_second=tokens_per_second, mini_batch_seconds=0.0, step_seconds=())
    setting = replace(setting, workload=workload, cluster=replace(setting.cluster, trainer=trainer))
    if observed.seconds_per_token <= 0:
        return setting
    for _ in range(ROUNDS):
        setting = _scaled(setting, observed.seconds_per_token / _simulated_seconds_per_token(setting))
    return setting


def _simulated_seconds_per_token(setting: Setting) -> float:
    outcome = simulate(setting.workload, setting.cluster, setting.system, seed=setting.seed, num_steps=4, warm_steps=1)
    workload = setting.workload
    mean_turn = float(workload.turn_seconds.values.mean()) if workload.turn_seconds else 0.0
    generating = outcome.latency_mean_seconds - (workload.num_turns - 1) * mean_turn
    return max(generating, 1e-9) / workload.mean_sampled_tokens


def _scaled(setting: Setting, factor: float) -> Setting:
    engine = setting.cluster.engine
    times = StepTimes(engine.times.batch, engine.times.seconds * factor, engine.times.context_tokens)
    engine = replace(
        engine,
        times=times,
        overhead_seconds=engine.overhead_seconds * factor,
        request_overhead_seconds=engine.request_overhead_seconds * factor,
    )
    return replace(setting, cluster=replace(setting.cluster, engine=engine))


def _given_tokens(record: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens, and other tokens that nobody sampled."""
    segments: Sequence[Mapping[str, Any]] = record["chains"][0]
    given = [len(segment["token_ids"]) for segment in segments if segment["version"] is None]
    prompt = given[0] if given and segments[0]["version"] is None else 0
    return prompt, sum(given) - prompt


def _busy_seconds(line: Mapping[str, Any]) -> float:
    waits = line.get("time/sample_wait_seconds", 0.0) + line.get("time/publish_stall_seconds", 0.0)
    return float(max(1e-6, line.get("time/step_seconds", 0.0) - waits))
