"""A trainer that only pretends: steps take seconds of a table or of their tokens; their weights are the model's, scaled.

Everything around it is real: batches and their staleness, the spool, publishing, resuming, checkpoints (of the step and the
data cursor; weights follow from the step). It trains nothing, and has one rank.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from laminar.config.root import LaminarConfig
from laminar.config.trainer import EmulatedTrainerConfig
from laminar.errors import ConfigError, EnvironmentSetupError
from laminar.experience.answers import Frontier
from laminar.types import Trajectory
from relay.probe import Probe
from relay.publisher import Fill
from relay.store import WEIGHTS_NAME
from trainer.batch_metrics import batch_metrics
from trainer.checkpoint_folder import EXTRA, begin, complete, find_latest, oldest_step, read_extra
from trainer.progress import Progress
from trainer.session import nothing
from trainer.spool import ReplaySpool
from trainer.spool_file import SpooledStep
from trainer.step import Groups, StepReport

logger = logging.getLogger("laminar.trainer.emulated")

GROWTH_PER_STEP = 1e-3
"""Share by which a step scales the weights, so that versions differ."""


class EmulatedSession:
    """Takes the place of a `TrainingSession`.

    Args:
        config: the run's settings; `model.path` holds one `model.safetensors`.
        checkpoints: the run's folder for them.

    Raises:
        ConfigError: the model's weights are not in one file.
    """

    def __init__(self, config: LaminarConfig, checkpoints: Path) -> None:
        weights = Path(config.model.path) / WEIGHTS_NAME
        if not weights.is_file():
            raise ConfigError(
                f"trainer.kind is 'emulated', but {weights} is not there: it needs the weights in that one file"
            )
        self._config, self._checkpoints = config, checkpoints
        self._initial = load_file(weights)
        self.spool = ReplaySpool(checkpoints)
        self.progress, self.frontier = _resume(checkpoints)
        self.saved_step = self._step = self.progress.step
        self.replayed: list[SpooledStep] = []
        self.probe: Probe | None = None  # it has no forward pass
        self.fill: Fill | None = None  # one rank writes

    def state_tensors(self) -> Generator[tuple[str, Tensor]]:
        """The weights of the present step."""
        factor = 1 + GROWTH_PER_STEP * self._step
        return ((name, tensor * factor) for name, tensor in self._initial.items())

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The same without data."""
        return ((name, torch.empty_like(tensor, device="meta")) for name, tensor in self._initial.items())

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Every group."""
        return True

    def replay(self, said: Callable[[SpooledStep, StepReport], None]) -> None:
        """Take the spooled steps after the checkpoint as trained."""
        self.replayed = list(self.spool.find_replayable(self.progress.step))
        for header in self.replayed:
            said(header, self._report(self.spool.read(header.step), header.step))
        if self.replayed:
            self.progress, self.frontier = self.replayed[-1].progress, self.replayed[-1].frontier
        self._step = self.progress.step
        self.spool.remove_above(self._step)

    @property
    def is_partitioned(self) -> bool:
        """No."""
        return False

    def train(
        self, groups: Groups, step: int, oldest_trained: int | None = None, free_weights: Callable[[], None] = nothing
    ) -> StepReport:
        """Sleep as long as the step takes."""
        report = self._report(groups, step)
        time.sleep(step_seconds(self._config.trainer.emulated, step, report.trained_tokens))
        free_weights()
        self._step = step
        return report

    def save(self, progress: Progress, frontier: Frontier) -> None:
        """Save step and data cursor.

        Raises:
            EnvironmentSetupError: a file could not be written; older checkpoints stand.
        """
        try:
            folder = begin(self._checkpoints, progress.step)
            (folder / EXTRA).write_text(json.dumps({"progress": asdict(progress), "frontier": frontier.to_json()}))
            complete(self._checkpoints, progress.step, {"emulated": True}, self._config.checkpoint.keep)
        except OSError as error:
            raise EnvironmentSetupError(
                f"checkpoint of step {progress.step} could not be written ({error}); older ones stand: make room for one "
                "more than checkpoint.keep, then resume"
            ) from error
        self.saved_step = progress.step
        self.spool.prune(oldest_step(self._checkpoints))

    def follow(self) -> None:
        """There is one rank."""

    def dismiss(self) -> None:
        """There is one rank."""

    def _report(self, groups: Groups, step: int) -> StepReport:
        tokens = sum(trajectory.num_sampled_tokens for group in groups for trajectory in group)
        metrics = batch_metrics(groups, step - 1) | {"train/tokens": float(tokens)}
        return StepReport(step, metrics, tokens, None)


def step_seconds(emulated: EmulatedTrainerConfig, step: int, num_tokens: int) -> float:
    """How long a step takes: its place in the table, and its sampled tokens at the given pace."""
    table, pace = emulated.step_seconds, emulated.tokens_per_second
    return table[(step - 1) % len(table)] + (0.0 if pace is None else num_tokens / pace)


def _resume(checkpoints: Path) -> tuple[Progress, Frontier | None]:
    path = find_latest(checkpoints)
    if path is None:
        return Progress(), None
    logger.info("resumed from %s", path)
    extra = read_extra(path)
    return Progress(**extra["progress"]), Frontier.from_json(extra["frontier"])
