"""Recorded steps, to be trained again without engines: a run's replay spool, or its trajectory records. Files, no torch.

The spool holds a run's last steps exactly (since its oldest kept checkpoint). The records hold the groups that
`metrics.trajectory_rate` keeps, log-probs to four digits; a step with groups missing has those that are whole.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.json_lines import iterate_lines
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


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step's batch.

    Attributes:
        step: its number.
        groups: in training order.
        oldest_trained: tokens of versions below this number were not trained; None: by the config's bound.
        missing_groups: groups of the step that were not recorded, or not with every member.
    """

    step: int
    groups: tuple[tuple[Trajectory, ...], ...]
    oldest_trained: int | None = None
    missing_groups: int = 0


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
        ConfigError: nothing is recorded there.
    """

    def __init__(self, folder: Path, config: LaminarConfig) -> None:
        self._config = config
        self.run = next(
            (place for place in (folder, *folder.resolve().parents[:2]) if (place / "config.toml").is_file()), None
        )
        replay = next((p for p in (folder / "checkpoints" / FOLDER, folder) if any(p.glob("step_[0-9]*[0-9]"))), None)
        self._spool = None if replay is None or replay.name != FOLDER else ReplaySpool(replay.parent)
        self._records = folder / "trajectories" if (folder / "trajectories").is_dir() else folder
        self.is_exact = self._spool is not None
        self._steps = self._spool.steps() if self._spool else sorted(_groups_by_step(self._records))
        if not self._steps:
            raise ConfigError(
                f"{folder} holds no recorded step: give a run folder, its checkpoints/{FOLDER}, or its trajectories/ "
                f"(with {STEPS}; the run keeps them all with metrics.trajectory_rate = 1)"
            )
        self.first = self._steps[0]

    def __len__(self) -> int:
        return len(self._steps)

    def steps(self) -> Iterator[RecordedStep]:
        """The steps, in order.

        Raises:
            SpoolError: a file of the spool is damaged.
        """
        if self._spool is None:
            yield from read_records(self._records, self._config)
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

    Raises:
        ConfigError: the steps do not say how many members their groups had.
    """
    members: dict[str, dict[int, Trajectory]] = {}
    for file in sorted(folder.glob("*.jsonl.gz")):
        for _, _, lines in read_members(file):
            for record in map(json.loads, lines):
                if record["failure"] is None:
                    trajectory = as_trajectory(record, config)
                    group = members.setdefault(trajectory.group_id, {})
                    known = group.get(trajectory.member)
                    if known is None or known.attempt <= trajectory.attempt:
                        group[trajectory.member] = trajectory
    for step, sizes in sorted(_groups_by_step(folder).items()):
        whole = [members[group_id] for group_id, size in sizes.items() if len(members.get(group_id, ())) == size]
        groups = tuple(tuple(group[member] for member in sorted(group)) for group in whole)
        yield RecordedStep(step, groups, missing_groups=len(sizes) - len(groups))


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


def _groups_by_step(folder: Path) -> dict[int, dict[str, int]]:
    """Groups and their sizes by the step that trained them; a step trained anew after a resume counts as it was last."""
    found = {line["step"]: line["groups"] for line in iterate_lines(folder / STEPS)}
    if any(not isinstance(groups, dict) for groups in found.values()):
        raise ConfigError(
            f"{folder / STEPS} does not say how many members a group had, so it was written by an older Laminar: replay it "
            "with that one, or from the run's checkpoints"
        )
    return found
