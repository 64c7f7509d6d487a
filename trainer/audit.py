"""What a run's folder proves about exactly-once: every prompt up to the data cursor, how often trained. Files, no torch.

Read by people, the fault campaign and the tests; a run never needs it.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from laminar.experience.answers import Counters, Frontier
from trainer.checkpoint_folder import find_latest, read_extra
from trainer.spool import HistoryEntry, ReplaySpool
from trainer.spool_file import read_header

Place = tuple[int, int]
"""A prompt's occurrence: epoch, place in its order."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The committed history.

    Attributes:
        num_steps: steps in it.
        missing_steps: numbers below the last that are not in it.
        twice: prompts that were trained more than once in one epoch.
        unaccounted: prompts before the data cursor that were neither trained nor are pending: those of groups that were
            filtered, or failed or dropped for good. In a run without any of these they are lost.
        counters: of trajectories, at the last step.
    """

    num_steps: int
    missing_steps: tuple[int, ...]
    twice: tuple[Place, ...]
    unaccounted: tuple[Place, ...]
    counters: Counters


def audit(history: list[HistoryEntry], frontier: Frontier, num_prompts: int) -> Audit:
    """Compare what was trained with what the data cursor says.

    Args:
        history: every committed step.
        frontier: at the last of them.
        num_prompts: in an epoch.
    """
    trained = Counter(place for entry in history for place in entry.trained)
    steps = {entry.step for entry in history}
    done = set(trained) | {occurrence[:2] for occurrence in frontier.pending}
    before = [(epoch, place) for epoch in range(frontier.epoch) for place in range(num_prompts)]
    before += [(frontier.epoch, place) for place in range(frontier.cursor)]
    return Audit(
        num_steps=len(steps),
        missing_steps=tuple(sorted(set(range(1, max(steps, default=0) + 1)) - steps)),
        twice=tuple(sorted(place for place, count in trained.items() if count > 1)),
        unaccounted=tuple(place for place in before if place not in done),
        counters=Counters.from_flat(frontier.counters),
    )


def audit_run(checkpoints: Path, num_prompts: int) -> Audit:
    """Audit a run that is not being written to.

    Raises:
        SpoolError: a spool file is damaged.
        ConfigError: every checkpoint is.
    """
    spool, latest = ReplaySpool(checkpoints), find_latest(checkpoints)
    frontier = Frontier() if latest is None else Frontier.from_json(read_extra(latest)["frontier"])
    for step in spool.steps():
        header = read_header(spool.path(step))
        if header.frontier.number > frontier.number:
            frontier = header.frontier
    return audit(spool.history(), frontier, num_prompts)
