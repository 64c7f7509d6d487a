"""Publishing one version: the data module learns the number, the relay gets the weights.

Order: first the number (it frees the slots of the step's groups), then the weights. An engine can therefore never hold a
number that the data module does not know. A version that finds every slot leased is offered again until it is complete or
superseded.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from laminar.types import WeightVersion
from relay.probe import Probe
from relay.publisher import Publisher

logger = logging.getLogger("laminar.trainer.publishing")


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish cost: `stall_seconds` of standing still, `num_bytes` copied, whether it was skipped for now."""

    stall_seconds: float
    num_bytes: int
    skipped: bool


class WeightPublisher:
    """Offers the trainer's newest weights to the relay of its machine.

    Args:
        publisher: of the relay.
        state_tensors: gives the weights as they are.
        probe: gives what these weights make of fixed tokens (`relay.probe`).
    """

    def __init__(
        self,
        publisher: Publisher,
        state_tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        probe: Callable[[], Probe | None] = lambda: None,
    ) -> None:
        self._publisher, self._state_tensors, self._probe = publisher, state_tensors, probe
        self._unpublished: WeightVersion | None = None
        self.skipped_publishes = 0

    @property
    def has_unpublished(self) -> bool:
        """Whether the newest version still waits for a free slot."""
        return self._unpublished is not None

    def publish(self, version: WeightVersion) -> Published:
        """Copy the current weights into a free slot; blocking, called between optimizer steps by one thread."""
        started = time.monotonic()
        report = self._publisher.publish(version, self._state_tensors(), self._probe())
        self._unpublished = version if report.skipped else None
        if report.skipped:
            self.skipped_publishes += 1
            logger.warning("version %s skipped: %s; it is offered again", version, report.reason)
        return Published(time.monotonic() - started, report.bytes, report.skipped)

    def supersede(self) -> None:
        """The weights are about to change: what was skipped is not offered under its number any more."""
        self._unpublished = None

    def offer_again(self) -> None:
        """Publish the version that was skipped, if there is one; the weights have not changed since."""
        if self._unpublished is not None:
            self.publish(self._unpublished)
