"""Recorded steps, to be trained again without engines: a run's replay spool, or its trajectory records. Files, no torch.

The spool holds a run's last steps exactly (since its oldest kept checkpoint). The records hold the groups that
`metrics.trajectory_rate` keeps, log-probs to four digits; a step with groups missing has those that are whole. A line that
is torn, or of another shape, costs itself.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, InvariantError
from laminar.json_lines import iterate_lines, parse_line
from laminar.run_folder import RunFolder
from laminar.trajectories import STEPS, Record, read_members
from laminar.types import (
    Chain,
    FinishReason,
    Purpose,
    SamplingParameters,
    Segment,
    Trajectory,
    WeightVersion,
    given,
    sampled,
)
from trainer.spool import FOLDER, ReplaySpool
from trainer.spool_file import read_groups, verify_step

_UNRECORDED = "not recorded, or not with every member (metrics.trajectory_rate = 1 keeps all, until the oldest are deleted)"
_UNSIZED = (
    f"{STEPS} does not say how many members a group had, so an older Laminar wrote that line: replay the step with that "
    "one, or from the run's checkpoints"
)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step's batch.

    Attributes:
        step: its number.
        groups: in training order.
        oldest_trained: tokens of versions below this number were not trained; None: by the config's bound.
        missing_groups: groups of the step that cannot be trained again.
        missing_reason: why.
    """

    step: int
    groups: tuple[tuple[Trajectory, ...], ...]
    oldest_trained: int | None = None
    missing_groups: int = 0
    missing_reason: str = ""


class Recording:
    """The steps of one folder: a run's, its `checkpoints/replay`, or its `trajectories`.

    Args:
        folder: any of the three.
        config: fills in what the records do not say.

    Attributes:
        first: number of the first step.
        run: the run's folder, if it is one.
        is_exact: whether log-probs are those that were trained, to the last bit.

    Raises:
        ConfigError: nothing is recorded there, or no group of it whole.
    """

    def __init__(self, folder: Path, config: LaminarConfig) -> None:
        self._folder = folder
        self.run = next(
            (place for place in (folder, *folder.resolve().parents[:2]) if (place / "config.toml").is_file()), None
        )
        replay = next((p for p in (folder / "checkpoints" / FOLDER, folder) if any(p.glob("step_[0-9]*[0-9]"))), None)
        self._spool = None if replay is None or replay.name != FOLDER else ReplaySpool(replay.parent)
        records = folder / "trajectories" if (folder / "trajectories").is_dir() else folder
        self.is_exact = self._spool is not None
        self._recorded = [] if self._spool else list(read_records(records, config))
        self._steps = self._spool.steps() if self._spool else [step.step for step in self._recorded]
        if not self._steps:
            raise ConfigError(
                f"{folder} holds no recorded step: give a run folder, its checkpoints/{FOLDER}, or its trajectories/ "
                f"(with {STEPS}; the run keeps them all with metrics.trajectory_rate = 1); {FOLDER} has only the steps "
                "since the oldest kept checkpoint"
            )
        if not self.is_exact and not any(step.groups for step in self._recorded):
            reasons = "; ".join(dict.fromkeys(step.missing_reason for step in self._recorded))
            raise ConfigError(
                f"{folder} holds no group of its {len(self)} recorded steps that can be trained again: {reasons}"
            )
        self.first = self._steps[0]

    def __len__(self) -> int:
        return len(self._steps)

    def __str__(self) -> str:
        """What it is, and, if it is not exact, why."""
        if self.is_exact:
            return "the replay spool"
        spool = self._folder / "checkpoints" / FOLDER
        why = f" ({spool} holds no step: those that no kept checkpoint needs are gone)" if spool.is_dir() else ""
        return f"the trajectory records, log-probs to four digits, groups that metrics.trajectory_rate kept{why}"

    def steps(self) -> Iterator[RecordedStep]:
        """The steps, in order.

        Raises:
            SpoolError: a file of the spool is damaged.
        """
        if self._spool is None:
            yield from self._recorded
            return
        for step in self._steps:
            path = self._spool.path(step)
            yield RecordedStep(step, read_groups(path), verify_step(path).oldest_trained)

    def recorded_losses(self) -> dict[int, float]:
        """`train/loss` by step, as the run logged it; empty without its `metrics.jsonl`."""
        lines = iterate_lines(RunFolder(self.run).metrics) if self.run is not None else ()
        return {line["step"]: line["train/loss"] for line in lines if line["kind"] == "step" and "train/loss" in line}


def read_records(folder: Path, config: LaminarConfig) -> Iterator[RecordedStep]:
    """The steps of a folder of trajectory records; failed attempts are left out, as they were in training.

    Of several records of one trajectory the last attempt counts: a group is played anew by its next owner.
    """
    members: dict[str, dict[int, Trajectory]] = {}
    for file in sorted(folder.glob("*.jsonl.gz")):
        for _, _, lines in read_members(file):
            for trajectory in (_read_good(line, config) for line in lines):
                if trajectory is not None:
                    group = members.setdefault(trajectory.group_id, {})
                    known = group.get(trajectory.member)
                    if known is None or known.attempt <= trajectory.attempt:
                        group[trajectory.member] = trajectory
    for step, sizes in sorted(_groups_by_step(folder).items()):
        if isinstance(sizes, list):
            yield RecordedStep(step, (), missing_groups=len(sizes), missing_reason=_UNSIZED)
            continue
        whole = [members[group_id] for group_id, size in sizes.items() if len(members.get(group_id, ())) == size]
        groups = tuple(tuple(group[member] for member in sorted(group)) for group in whole)
        missing = len(sizes) - len(groups)
        yield RecordedStep(step, groups, missing_groups=missing, missing_reason=_UNRECORDED if missing else "")


def _read_good(line: bytes, config: LaminarConfig) -> Trajectory | None:
    """A line's trajectory; None if it failed, or the line is torn or of another shape."""
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError, InvariantError):
        record = parse_line(line) or {}
        return as_trajectory(record, config) if record["failure"] is None else None
    return None


def as_trajectory(record: Record, config: LaminarConfig) -> Trajectory:
    """A record as the trajectory that it was written from, as far as training asks."""
    return Trajectory(
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        prompt_id=record["prompt_id"],
        member=int(record["trajectory_id"].rpartition("-")[2]),
        attempt=record["attempt"],
        purpose=Purpose(record["purpose"]),
        sampling=SamplingParameters(
            temperature=record["sampling"]["temperature"],
            max_new_tokens=config.rollout.max_new_tokens,
            seed=record["sampling"]["seed"],
        ),
        chains=tuple(Chain(tuple(map(_segment, chain))) for chain in record["chains"]),
        finish_reason=None if record["finish_reason"] is None else FinishReason(record["finish_reason"]),
        reward=record["reward"],
        reward_terms=record["reward_terms"],
        worker=record["worker"],
    )


def _segment(segment: dict[str, Any]) -> Segment:
    if segment["version"] is None:
        return given(segment["token_ids"])
    logprobs = [math.nan if value is None else value for value in segment["logprobs"]]
    version = WeightVersion.parse(segment["version"])
    return sampled(segment["token_ids"], logprobs, version, segment["masked_head_tokens"])


def _groups_by_step(folder: Path) -> dict[int, dict[str, int] | list[str]]:
    """Groups and their sizes by the step that trained them, a list where no size is told.

    A step trained anew after a resume counts as it was last.
    """
    told = ((line.get("step"), line.get("groups")) for line in iterate_lines(folder / STEPS))
    return {step: groups for step, groups in told if isinstance(step, int) and isinstance(groups, dict | list)}
