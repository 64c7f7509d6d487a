"""What a real run says of lengths, environment and pace: settings that are simulated on machines like its (`--from RUN`).

Lengths, turns and environment times are those of its `trajectories/` records; the trainer's steps those of `metrics.jsonl`.
Its own config is played to learn what a trainer GPU does in a second, and by what factor real engines are slower than ours:
until simulated trajectories take as long a token as the recorded ones did. Both then hold for any setting.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError
from laminar.json_lines import iterate_lines, parse_line
from laminar.simulate.from_config import Setting
from laminar.simulate.mapping import play
from laminar.simulate.timings import Lengths, StepTimes
from laminar.simulate.workload import Quantiles, observed_lengths, observed_quantiles
from laminar.trajectories import read_members

ROUNDS = 3
"""Simulations that scale the decode times; each starts from the last one's ratio."""
MIN_RECORDS, MAX_RECORDS = 8, 4096
"""Records that are needed, and that are enough: the newest."""


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


@dataclass(frozen=True, slots=True)
class Calibration:
    """What holds on a run's machines and for its task, whatever else is set.

    Attributes:
        lengths, prompt_tokens, observation_tokens, num_turns, turn_seconds: as `Workload`.
        train_tokens_per_second: of one trainer GPU; None: no step was recorded.
        decode_factor: of real decode times over the assumed ones.
    """

    lengths: Lengths
    prompt_tokens: int
    observation_tokens: int
    num_turns: int
    turn_seconds: Quantiles | None
    train_tokens_per_second: float | None
    decode_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What is kept of one record."""

    time: float
    sampled: float
    prompt: int
    observations: int
    gaps: int
    generating: float
    environment: float


def observe(trajectories: Path, metrics: Path) -> Observed:
    """Read a run's newest records.

    Raises:
        ConfigError: if there are too few.
    """
    records = _newest(trajectories)
    if len(records) < MIN_RECORDS:
        raise ConfigError(
            f"{trajectories} holds {len(records)} records of trained trajectories, fewer than {MIN_RECORDS}; "
            "run longer, or raise metrics.trajectory_rate"
        )
    num_gaps = sum(record.gaps for record in records)
    lines = [line for line in iterate_lines(metrics) if line["kind"] == "step"]
    return Observed(
        sampled_tokens=tuple(record.sampled for record in records),
        prompt_tokens=statistics.fmean(record.prompt for record in records),
        observation_tokens=sum(record.observations for record in records) / max(1, num_gaps),
        num_turns=1 + round(num_gaps / len(records)),
        turn_seconds=tuple(record.environment / record.gaps for record in records if record.gaps),
        seconds_per_token=sum(r.generating for r in records) / max(1.0, sum(r.sampled for r in records)),
        step_seconds=tuple(_busy_seconds(line) for line in lines),
    )


def _newest(folder: Path) -> list[_Numbers]:
    """The newest records, newest file first, each file read once and as many as are enough."""
    found: list[_Numbers] = []
    for path in sorted(folder.glob("*.jsonl.gz"), key=lambda path: path.stat().st_mtime, reverse=True):
        found += _numbers_of(path)
        if len(found) >= MAX_RECORDS:
            break
    return sorted(found, key=lambda numbers: numbers.time, reverse=True)[:MAX_RECORDS]


def _numbers_of(path: Path) -> Iterator[_Numbers]:
    for _, _, lines in read_members(path):
        for line in lines:
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # a line of another shape
                record = parse_line(line) or {}
                if not record["failure"] and record["purpose"] == "train":
                    yield _numbers(record)


def _numbers(record: Mapping[str, Any]) -> _Numbers:
    prompt, observations = _given_tokens(record)
    return _Numbers(
        time=record["time"],
        sampled=float(record["num_sampled_tokens"]),
        prompt=prompt,
        observations=observations,
        gaps=max(0, len(record["turns"]) - 1),
        generating=record["timings"]["generate"],
        environment=record["timings"]["environment"],
    )


def calibrate(own: Setting, observed: Observed) -> Calibration:
    """What the run says, given the setting of its own config."""
    found = Calibration(
        lengths=observed_lengths(observed.sampled_tokens),
        prompt_tokens=round(observed.prompt_tokens),
        observation_tokens=round(observed.observation_tokens),
        num_turns=observed.num_turns,
        turn_seconds=observed_quantiles(observed.turn_seconds) if observed.turn_seconds else None,
        train_tokens_per_second=None,
    )
    if observed.step_seconds:
        workload = adapted(own, found).workload
        tokens = workload.prompts_per_step * workload.group_size * (workload.mean_sampled_tokens + workload.given_tokens)
        gpu_seconds = statistics.fmean(observed.step_seconds) * own.cluster.trainer.num_gpus
        found = replace(found, train_tokens_per_second=tokens / gpu_seconds)
    if observed.seconds_per_token <= 0:
        return found
    for _ in range(ROUNDS):
        ratio = observed.seconds_per_token / _simulated_seconds_per_token(adapted(own, found))
        found = replace(found, decode_factor=found.decode_factor * ratio)
    return found


def adapted(setting: Setting, found: Calibration) -> Setting:
    """Any setting with what was observed in place of what was assumed."""
    workload = replace(
        setting.workload,
        lengths=found.lengths,
        prompt_tokens=found.prompt_tokens,
        observation_tokens=found.observation_tokens,
        num_turns=found.num_turns,
        turn_seconds=found.turn_seconds,
    )
    trainer = setting.cluster.trainer
    if found.train_tokens_per_second is not None:
        trainer = replace(trainer, tokens_per_second=found.train_tokens_per_second, mini_batch_seconds=0.0, step_seconds=())
    setting = replace(setting, workload=workload, cluster=replace(setting.cluster, trainer=trainer))
    return _scaled(setting, found.decode_factor)


def _simulated_seconds_per_token(setting: Setting) -> float:
    """Whatever it takes: assumed times may be so slow that the run would give answers up, or stop."""
    setting = replace(setting, system=replace(setting.system, max_wait_seconds=math.inf, no_progress_seconds=math.inf))
    generating = play(setting).latency_mean_seconds - setting.workload.mean_away_seconds
    return max(generating, 1e-9) / setting.workload.mean_sampled_tokens


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
