"""Training the spooled steps again after a checkpoint: the same groups in the same order, so the same weights."""

import json
from collections.abc import Callable, Sequence
from functools import partial

from trainer.algorithms.base import Algorithm
from trainer.engine import TrainerEngine
from trainer.spool import ReplaySpool
from trainer.spool_file import SpooledStep
from trainer.step import Groups, StepReport, train_step


def replay(
    engine: TrainerEngine,
    algorithm: Algorithm,
    spool: ReplaySpool,
    after: int,
    said: Callable[[SpooledStep, StepReport], None],
) -> list[SpooledStep]:
    """Train every step of the unbroken row after `after`; all ranks call it together, each reads the files by itself.

    What lies above the row is removed: those steps are about to be trained anew.

    Args:
        engine: this rank's, as it was at step `after`.
        algorithm: the same as then.
        spool: on storage that all ranks share.
        after: the checkpoint's step.
        said: called on rank 0 after each step.

    Returns:
        Headers of the replayed steps, on rank 0; empty on the others.

    Raises:
        ConfigError: a file is of another format version.
    """
    ranks = engine.ranks
    row: list[SpooledStep] = []

    def find() -> bytes:
        row.extend(spool.find_replayable(after))
        return json.dumps(len(row)).encode()

    for place in range(json.loads(ranks.decide(find))):
        step = after + 1 + place
        groups = spool.read(step)
        oldest_trained = row[place].oldest_trained if ranks.is_first else None
        report = train_step(engine, algorithm, groups, step, fetch=partial(_select, groups), oldest_trained=oldest_trained)
        if ranks.is_first:
            said(row[place], report)
    if ranks.is_first:
        spool.remove_above(after + len(row))
    return row


def _select(groups: Groups, group_ids: Sequence[str]) -> Groups:
    """The named groups, in that order."""
    by_id = {group[0].group_id: group for group in groups}
    return [by_id[group_id] for group_id in group_ids]
