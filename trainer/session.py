"""What all ranks do together: load, replay, train a step, save. Rank 0 calls; the others follow its commands.

Invariant: every rank runs the same collectives in the same order, for rank 0 announces each piece of work before it begins.
It knows neither the data module nor the relay.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from laminar.config.root import LaminarConfig
from laminar.experience.answers import Frontier
from laminar.plugins import resolve, validate_options
from laminar.types import Trajectory
from relay.probe import Probe
from relay.publisher import Fill
from trainer.algorithms import ALGORITHM_OPTIONS, ALGORITHMS
from trainer.algorithms.base import Algorithm
from trainer.checkpoint import agree_on_latest, load, save
from trainer.checkpoint_folder import oldest_step
from trainer.engine import TrainerEngine
from trainer.probing import score_probe
from trainer.progress import Progress
from trainer.ranks import join_ranks
from trainer.replay import replay
from trainer.shares import join_shares
from trainer.spool import ReplaySpool
from trainer.spool_file import SpooledStep
from trainer.step import Fetch, Groups, StepReport, train_step

logger = logging.getLogger("laminar.trainer.session")

COLLECTIVE_MARGIN_SECONDS = 60.0
"""Other ranks wait for rank 0's next command longer than the run may stand still."""


def nothing() -> None:
    """Nobody else reads the weights."""


class Session(Protocol):
    """What a trainer rank and its loop ask of training; see `TrainingSession`."""

    spool: ReplaySpool
    progress: Progress
    frontier: Frontier | None
    saved_step: int
    replayed: list[SpooledStep]
    probe: Probe | None

    @property
    def is_partitioned(self) -> bool:
        """Whether reading the weights makes all ranks gather."""
        ...

    @property
    def fill(self) -> Fill | None:
        """What fills a slot where every rank writes its share; None: whole weights are to be read."""
        ...

    def state_tensors(self) -> Generator[tuple[str, Tensor]]:
        """The weights, by name; each is to be read before the next is asked for."""
        ...

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The same without data."""
        ...

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a complete group is worth training."""
        ...

    def replay(self, said: Callable[[SpooledStep, StepReport], None]) -> None:
        """Train the spooled steps after the checkpoint again."""
        ...

    def train(
        self, groups: Groups, step: int, oldest_trained: int | None = None, free_weights: Callable[[], None] = nothing
    ) -> StepReport:
        """Train a step; `free_weights` is called before they change."""
        ...

    def save(self, progress: Progress, frontier: Frontier) -> None:
        """Save a checkpoint."""
        ...

    def follow(self) -> None:
        """Ranks other than 0: do what rank 0 announces, until dismissed."""
        ...

    def dismiss(self) -> None:
        """Rank 0: let the others go."""
        ...


class TrainingSession:
    """One rank's share of training, from the newest checkpoint or from the model.

    Args:
        config: the run's settings.
        checkpoints: the run's folder for them.
        rank: this rank.
        store: where ranks meet; None for one rank.
        fetch: how ranks other than 0 get their rows.
        node_id: this rank's machine; on one machine all ranks publish (`trainer.shares`).

    Attributes:
        saved_step: step of the newest checkpoint that is loaded or was saved; 0 without one.
        replayed: headers of the steps that were trained again after it.
        probe: what the weights as they are make of fixed tokens, to be published with them; None before `replay`.
    """

    def __init__(
        self,
        config: LaminarConfig,
        checkpoints: Path,
        rank: int,
        store: Store | None,
        fetch: Fetch | None,
        node_id: str = "",
    ) -> None:
        self._config, self._checkpoints, self._fetch = config, checkpoints, fetch
        ranks = join_ranks(
            rank,
            config.trainer.num_ranks,
            store,
            use_gpu=config.trainer.num_gpus_per_rank > 0,
            collective_seconds=config.run.no_progress_seconds + COLLECTIVE_MARGIN_SECONDS,
            sequence_size=config.trainer.sequence_parallel_size,
        )
        self.algorithm = build_algorithm(config)
        self.engine = TrainerEngine(config, ranks, self.algorithm.needs)
        self._shares = join_shares(self.engine, store, node_id)
        if self._shares is not None and not ranks.is_first:
            self.engine.before_update = self._shares.finish
        self.spool = ReplaySpool(checkpoints)
        self.progress, self.frontier = self._resume()
        self.saved_step = self.progress.step
        self.replayed: list[SpooledStep] = []
        self.probe: Probe | None = None

    @property
    def is_partitioned(self) -> bool:
        """Whether ranks have only shares of the weights, which all gather together."""
        return self.engine.is_partitioned

    @property
    def fill(self) -> Fill | None:
        """Rank 0: what fills a slot where every rank writes its share; None: whole weights are to be read."""
        shares = self._shares
        return None if shares is None else partial(shares.fill, lambda order: self._command(f"share {order}"))

    def state_tensors(self) -> Generator[tuple[str, Tensor]]:
        """Rank 0: the full model under its Hugging Face names; where ranks have only shares, all gather them together."""
        if self.is_partitioned:
            self._command("gather 0")
        yield from self.engine.state_tensors()

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The same without data."""
        return self.engine.state_shapes()

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether the algorithm finds a complete group worth training."""
        return self.algorithm.keeps(group)

    def replay(self, said: Callable[[SpooledStep, StepReport], None]) -> None:
        """All ranks: train the spooled steps after the checkpoint again, on the same groups, to the same weights.

        Args:
            said: called on rank 0 after each step.
        """
        self.replayed = replay(self.engine, self.algorithm, self.spool, self.progress.step, said)
        if self.replayed:
            self.progress, self.frontier = self.replayed[-1].progress, self.replayed[-1].frontier
        self.probe = score_probe(self.engine)

    def train(
        self, groups: Groups, step: int, oldest_trained: int | None = None, free_weights: Callable[[], None] = nothing
    ) -> StepReport:
        """Rank 0: train a step, all ranks together; see `train_step`. `free_weights` is called before each update."""
        self.engine.before_update = free_weights
        self._command(f"train {step}")
        report = train_step(self.engine, self.algorithm, groups, step, oldest_trained=oldest_trained)
        self.probe = score_probe(self.engine)
        return report

    def save(self, progress: Progress, frontier: Frontier) -> None:
        """Rank 0: save a checkpoint, all ranks together; then let spooled steps go that no kept checkpoint needs.

        Raises:
            EnvironmentSetupError: a file could not be written; older checkpoints stand.
        """
        self._command(f"save {progress.step}")
        self._save(progress.step, self._extra(progress, frontier))
        self.saved_step = progress.step
        self.spool.prune(oldest_step(self._checkpoints))

    def dismiss(self) -> None:
        """Rank 0: let the other ranks go."""
        self._command("dismiss 0")
        self.engine.ranks.leave()

    def follow(self, note: Callable[[str], None] = lambda state: None) -> None:
        """Other ranks: do what rank 0 announces, until dismissed.

        Args:
            note: hears what the rank does: `wait`, `train` or `checkpoint`.
        """
        ranks = self.engine.ranks
        while True:
            note("wait")
            word, order = ranks.decide(lambda: b"").decode().split(" ", 1)
            note("checkpoint" if word == "save" else "train" if word == "train" else "wait")
            match word:
                case "train":
                    train_step(self.engine, self.algorithm, None, int(order), fetch=self._fetch)
                    score_probe(self.engine)
                case "save":
                    self._save(int(order), {})
                case "share":
                    assert self._shares is not None  # rank 0 has shares, so all have
                    self._shares.begin(order)
                case "gather":
                    for _ in self.engine.state_tensors():
                        pass
                case _:
                    ranks.leave()
                    return

    def _command(self, text: str) -> None:
        self.engine.ranks.decide(text.encode)

    def _extra(self, progress: Progress, frontier: Frontier) -> dict[str, object]:
        state = {"algorithm": self.algorithm.state(), "spikes": self.engine.spikes.state()}
        return {"progress": asdict(progress), "frontier": frontier.to_json(), **state}

    def _save(self, step: int, extra: dict[str, object]) -> None:
        save(self._checkpoints, step, self.engine, extra, self._config.checkpoint.keep)

    def _resume(self) -> tuple[Progress, Frontier | None]:
        path = agree_on_latest(self._checkpoints, self.engine.ranks)
        if path is None:
            return Progress(), None
        step, extra = load(path, self.engine)
        logger.info("resumed from %s", path)
        progress = Progress(**extra["progress"])
        assert progress.step == step
        self.algorithm.load_state(extra.get("algorithm", {}))
        self.engine.spikes.load_state(extra.get("spikes", {}))
        return progress, Frontier.from_json(extra["frontier"])


def build_algorithm(config: LaminarConfig) -> Algorithm:
    """The configured algorithm.

    Raises:
        ConfigError: an unknown kind, or options it does not take.
    """
    choice = config.trainer.algorithm
    attribute: Callable[..., Algorithm] = resolve(choice.kind, ALGORITHMS, "trainer.algorithm.kind")
    model = resolve(choice.kind, ALGORITHM_OPTIONS, "trainer.algorithm.kind")
    options = validate_options(model, choice.options, "trainer.algorithm.options")
    return attribute() if options is None else attribute(options)
