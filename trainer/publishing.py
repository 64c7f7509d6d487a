"""Publishing one version: the data module learns the number, the relay gets the weights.

Order: first the number (it frees the slots of the step's groups), then the weights. An engine can therefore never hold a
number that the data module does not know. A version that finds every slot leased is offered again until it is complete or
superseded.

The copy goes on beside the forward and backward passes of the next step and ends before its first update. Where all ranks
are on this machine, each writes its share of it (`trainer.shares`). Elsewhere, and with adapters, only rank 0 writes; under
ZeRO 3 no rank has whole weights then: whoever takes the tensors makes all ranks gather them, bucket by bucket
(`trainer.gathering`), so what a publish needs beside the slot is one bucket on each rank, and training waits for it.
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
from relay.publisher import Fill, Publisher, Until

logger = logging.getLogger("laminar.trainer.publishing")


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish cost.

    Attributes:
        stall_seconds: that training stood still: for its beginning, and for the end of the copy before it.
        num_bytes: of the version.
        copy_seconds: that the newest finished copy took, beside training or not; 0 if none is finished.
        skipped: whether the version waits for a free slot.
    """

    stall_seconds: float
    num_bytes: int
    copy_seconds: float
    skipped: bool


class Weights(Protocol):
    """The trainer's weights, as `TrainerEngine` gives them."""

    @property
    def is_partitioned(self) -> bool:
        """Whether reading them makes all ranks gather."""
        ...

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
        fill: what fills a slot where every rank writes its share; None: whole weights are read here.
    """

    def __init__(
        self,
        publisher: Publisher,
        weights: Weights,
        probe: Callable[[], Probe | None] = lambda: None,
        fill: Fill | None = None,
    ) -> None:
        self._publisher, self._weights, self._probe, self._fill = publisher, weights, probe, fill
        self._is_prepared = False
        self._unpublished: WeightVersion | None = None
        self._stalled_seconds, self._copy_seconds = 0.0, 0.0
        self.skipped_publishes = 0

    @property
    def has_unpublished(self) -> bool:
        """Whether the newest version still waits for a free slot."""
        return self._unpublished is not None

    def publish(self, version: WeightVersion, *, beside: bool = False) -> Published:
        """Put the current weights into a free slot; blocking, called between optimizer steps by one thread.

        Args:
            version: their name.
            beside: return before they are there: what can goes on beside training. `free_weights` is to be called before
                they change.
        """
        started = time.monotonic()
        if not self._is_prepared:
            self._publisher.prepare(load_layout(self._weights.state_shapes()))
            self._is_prepared = True
        self.free_weights()
        tensors, probe = self._weights.state_tensors(), self._probe()
        until: Until = "visible"
        if beside:
            until = "copied" if self._weights.is_partitioned and self._fill is None else "begun"
        if until == "begun":
            report = self._publisher.publish(version, tensors, probe, until=until, fill=self._fill)
        else:
            with contextlib.closing(tensors):  # whatever fails, no other rank waits
                report = self._publisher.publish(version, tensors, probe, until=until, fill=self._fill)
            self._copy_seconds = report.seconds
        self._unpublished = version if report.skipped else None
        if report.skipped:
            self.skipped_publishes += 1
            logger.warning("version %s skipped: %s; it is offered again", version, report.reason)
        stalled, self._stalled_seconds = self._stalled_seconds + time.monotonic() - started, 0.0
        return Published(stalled, report.bytes, self._copy_seconds, report.skipped)

    def free_weights(self) -> None:
        """Wait until the weights are copied: they are about to change."""
        started = time.monotonic()
        self._copy_seconds = self._publisher.finish_copy() or self._copy_seconds
        self._stalled_seconds += time.monotonic() - started

    def settle(self) -> None:
        """Wait until the version that was begun last is there."""
        self._publisher.settle()

    def supersede(self) -> None:
        """The weights are about to change: what was skipped is not offered under its number any more."""
        self._unpublished = None

    def offer_again(self) -> None:
        """Publish the version that was skipped, if there is one; the weights have not changed since."""
        if self._unpublished is not None:
            self.publish(self._unpublished)
