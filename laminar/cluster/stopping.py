"""A run is told to stop, by a signal or a request: what follows, and in which words that is said.

Invariant: what is said is so. The first order lets the step end and be saved; the second, or one before a step can have
begun, ends everything at once; what is saved already is not cut short by either.
"""

import asyncio
from collections.abc import Callable
from enum import Enum

from laminar.run_folder import RunFolder
from laminar.telemetry.view import RunView

TRAINER = "trainer-0"


class Phase(Enum):
    """Where a life of a run is."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    ENDING = "ending"


class Stopping:
    """Obeys orders to stop.

    Args:
        folder: of the run.
        view: of the run.
        cancel: ends this life after so many seconds.

    Attributes:
        phase: kept by the supervisor.
        is_told: set once somebody has told the run to stop.
        reason: why this life was ended at once, in a sentence; empty if it was not, or if another reason holds.
    """

    def __init__(self, folder: RunFolder, view: RunView, cancel: Callable[[float], None]) -> None:
        self.phase, self.is_told, self.reason = Phase.STARTING, asyncio.Event(), ""
        self._folder, self._view, self._cancel = folder, view, cancel
        self._is_cut = False

    def tell(self, answer_seconds: float = 0.0) -> str:
        """One more order; it is obeyed as the text says that is returned, for which so much time is left."""
        if self._is_cut:
            return "everything is being ended already"
        if self.is_told.is_set() or not self._has_begun():
            return self.cut(answer_seconds)
        self.is_told.set()
        match self.phase:
            case Phase.EVALUATING:
                text = "ending without the rest of the evaluation; every step is saved"
            case Phase.ENDING:
                text = "everything is being ended"
            case _ if self._view.step == 0:
                text = "ending after the first step, if it has begun"
            case _:
                text = "finishing the step and saving a checkpoint"
        return f"{text}; once more to end at once"

    def cut(self, answer_seconds: float = 0.0) -> str:
        """End everything at once; returns what to say, for which so much time is left."""
        self._is_cut = True
        self._cancel(answer_seconds)
        self.is_told.set()
        if self.phase in (Phase.EVALUATING, Phase.ENDING):
            return "ending everything at once"
        if not self._has_begun():
            self.reason = "told to stop while it was starting"
            return "ending, for no step has begun"
        follows = what_follows(self._view.step, self._folder.saved_step())
        self.reason = f"told to stop at once; {follows}"
        return f"ending everything at once; {follows}"

    def _has_begun(self) -> bool:
        """Whether a step may have begun: the trainer is heard of once it takes batches, and until it has trained enough."""
        is_heard = self.phase is Phase.TRAINING and TRAINER in self._view.roles
        return is_heard or self.phase in (Phase.EVALUATING, Phase.ENDING)


def what_follows(step: int, saved: int | None) -> str:
    """What a resume goes on from (pure).

    Args:
        step: the last one that ended; 0: none has.
        saved: that of the newest checkpoint; None: there is none.
    """
    if step == 0:
        return "no step had ended; a resume begins with the first"
    if saved is None:
        return f"there is no checkpoint; a resume replays all {step} steps"
    if saved >= step:
        return f"the checkpoint of step {saved} holds every step"
    return f"a resume replays the steps since the checkpoint of step {saved}"
