"""The replay spool: every step since the oldest kept checkpoint, ready to be trained again. Files only, no torch.

A step is committed when its file appears, after training and before the data module hears the number. So at every moment a
group is either in a file here, or untrained in Redis. A resume trains the files after its checkpoint again, in order, on the
same groups, and so arrives at the same weights.

    step_000012     see `trainer.spool_file`
    history.jsonl   one line for each step whose file was pruned: which prompts it trained; for audits, never read in a run

Invariants: files above the last one of an unbroken row are removed before a step is trained anew; a file is pruned only once
no kept checkpoint needs it.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar.errors import EnvironmentSetupError
from laminar.types import Trajectory
from trainer.spool_file import SpooledStep, SpoolError, read_groups, read_header, verify_step, write_step

logger = logging.getLogger("laminar.trainer.spool")

FOLDER = "replay"
HISTORY = "history.jsonl"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """What one committed step trained: digest of its tokens, and its prompts as (epoch, place)."""

    step: int
    batch: str
    trained: tuple[tuple[int, int], ...]


class ReplaySpool:
    """The spool of one run.

    Args:
        checkpoints: the run's folder of checkpoints, on storage that all ranks share.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._folder = checkpoints / FOLDER

    def path(self, step: int) -> Path:
        """A step's file."""
        return self._folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a file, whole or not."""
        return sorted(int(path.name.partition("_")[2]) for path in self._folder.glob("step_*") if not path.suffix)

    def commit(self, header: SpooledStep, groups: Sequence[Sequence[Trajectory]]) -> int:
        """Write a step's file, as `write_step`; from then on the step is trained, whatever dies.

        Raises:
            EnvironmentSetupError: it cannot be written; the steps before it stand.
        """
        path = self.path(header.step)
        try:
            return write_step(path, header, groups)
        except OSError as error:
            raise EnvironmentSetupError(
                f"spool file {path} could not be written ({error}); make room, then resume"
            ) from error

    def read(self, step: int) -> tuple[tuple[Trajectory, ...], ...]:
        """A step's groups, in training order.

        Raises:
            SpoolError: the file is missing, torn or damaged.
        """
        return read_groups(self.path(step))

    def find_replayable(self, after: int) -> list[SpooledStep]:
        """The unbroken row of whole files from step `after + 1` on; a damaged one is announced and ends the row.

        Raises:
            ConfigError: a file is of another format version.
        """
        row: list[SpooledStep] = []
        present = set(self.steps())
        while (step := after + 1 + len(row)) in present:
            try:
                row.append(verify_step(self.path(step)))
            except SpoolError as error:
                logger.warning("%s; steps from %s on are generated and trained anew", error, step)
                break
        return row

    def remove_above(self, step: int) -> None:
        """Remove what does not follow `step`: that history is about to be written anew."""
        for later in [number for number in self.steps() if number > step]:
            logger.warning("removing spooled step %s, which does not follow step %s", later, step)
            self.path(later).unlink()

    def prune(self, up_to: int) -> None:
        """Let the files of steps up to `up_to` go; what they trained stays in the history.

        Raises:
            EnvironmentSetupError: the folder cannot be written; every step is still in its file or in the history.
        """
        try:
            for step in [number for number in self.steps() if number <= up_to]:
                try:
                    self._remember(_entry(read_header(self.path(step))))
                except SpoolError as error:
                    logger.warning("%s; its step is missing in %s", error, HISTORY)
                self.path(step).unlink()
        except OSError as error:
            raise EnvironmentSetupError(
                f"{self._folder / HISTORY} could not be written ({error}); make room, then resume"
            ) from error

    def history(self) -> list[HistoryEntry]:
        """Every committed step, in order."""
        entries = {entry.step: entry for entry in self._remembered()}
        entries |= {step: _entry(read_header(self.path(step))) for step in self.steps()}
        return [entries[step] for step in sorted(entries)]

    def _remember(self, entry: HistoryEntry) -> None:
        """Add a line; a torn last one, whose step still has its file, is cut off first."""
        path = self._folder / HISTORY
        with path.open("r+b" if path.exists() else "w+b") as file:
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _remembered(self) -> list[HistoryEntry]:
        path = self._folder / HISTORY
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=HistoryEntry) for line in lines]


def _entry(header: SpooledStep) -> HistoryEntry:
    return HistoryEntry(header.step, header.batch, tuple(group.occurrence[:2] for group in header.groups))
