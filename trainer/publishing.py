"""Publishing one version: the data module learns the number, the relay gets the weights.

Order: first the number (it frees the slots of the step's groups), then the weights. An engine can therefore never hold a
number that the data module does not know. A version that finds every slot leased is offered again until it is complete or
superseded.

Only rank 0 writes. Under ZeRO 3 no rank has whole weights: whoever takes the tensors makes all ranks gather them, bucket by
bucket (`trainer.gathering`), so the memory that a publish needs beside the slot is one bucket on each rank.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from laminar.types import WeightVersion
from relay.manifest import load_layout
from relay.probe import Probe
from relay.publisher import Publisher

logger = logging.getLogger("laminar.trainer.publishing")


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish cost: `stall_seconds` of standing still, `num_bytes` copied, whether it was skipped for now."""

    stall_seconds: float
    num_bytes: int
    skipped: bool


class Weights(Protocol):
    """The trainer's weights, as `TrainerEngine` gives them."""

    def state_tensors(self) -> Generator[tuple[str, Tensor]]:
        """The whole weights by name; each is to be read before the next is asked for."""
        ...

    def state_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The same without data."""
        ...


class WeightPublisher:
    """Offers the trainer's newest weights to the relay of its machine.

    Args:
        publisher: of the machine's store.
        weights: what is published.
        probe: gives what these weights make of fixed tokens (`relay.probe`).
    """

    def __init__(self, publisher: Publisher, weights: Weights, probe: Callable[[], Probe | None] = lambda: None) -> None:
        self._publisher, self._weights, self._probe = publisher, weights, probe
        self._is_prepared = False
        self._unpublished: WeightVersion | None = None
        self.skipped_publishes = 0

    @property
    def has_unpublished(self) -> bool:
        """Whether the newest version still waits for a free slot."""
        return self._unpublished is not None

    def publish(self, version: WeightVersion, *, wait: bool = True) -> Published:
        """Copy the current weights into a free slot; blocking, called between optimizer steps by one thread.

        Args:
            version: their name.
            wait: until the version is there. If not, checksums and appearance follow while training goes on.
        """
        started = time.monotonic()
        if not self._is_prepared:
            self._publisher.prepare(load_layout(self._weights.state_shapes()))
            self._is_prepared = True
        with contextlib.closing(self._weights.state_tensors()) as tensors:  # whatever fails, no other rank waits
            report = self._publisher.publish(version, tensors, self._probe(), wait=wait)
        self._unpublished = version if report.skipped else None
        if report.skipped:
            self.skipped_publishes += 1
            logger.warning("version %s skipped: %s; it is offered again", version, report.reason)
        return Published(time.monotonic() - started, report.bytes, report.skipped)

    def settle(self) -> None:
        """Wait until the version that was copied last is there."""
        self._publisher.settle()

    def supersede(self) -> None:
        """The weights are about to change: what was skipped is not offered under its number any more."""
        self._unpublished = None

    def offer_again(self) -> None:
        """Publish the version that was skipped, if there is one; the weights have not changed since."""
        if self._unpublished is not None:
            self.publish(self._unpublished)
