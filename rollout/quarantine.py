"""How often in a row an engine's weights were found wrong, and when its replica is to leave the rota. Pure.

What finds them wrong (`verification`) ends in a verdict; the engine is then killed, started anew and loaded again. One that
is found wrong again and again has a fault that no restart mends: memory, a device, a file on its machine.
It knows neither engines nor who acts on it.
"""

from dataclasses import dataclass

from laminar.errors import EngineError
from rollout.verification import Verdict

MAX_REJECTIONS_IN_ROW = 3


class RejectedWeightsError(EngineError):
    """An engine that was started does not hold what it should; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"the engine was started on {verdict.version}: {verdict.reason}")
        self.verdict = verdict


@dataclass(slots=True)
class Quarantine:
    """One replica's record.

    Attributes:
        num_rejections: verdicts against its weights, in its life.
        num_in_row: those since the last swap that was accepted. A start that is accepted ends no row: else a replica whose
            every swap fails and whose every restart passes would go on for ever.
        reason: of the last one.
    """

    num_rejections: int = 0
    num_in_row: int = 0
    reason: str = ""

    def note_swap(self, verdict: Verdict) -> None:
        """Hear the verdict on a swap."""
        if verdict.is_accepted:
            self.num_in_row = 0
        else:
            self.note_rejection(verdict)

    def note_rejection(self, verdict: Verdict) -> None:
        """Hear of weights that were found wrong, at a swap or a start."""
        self.num_rejections += 1
        self.num_in_row += 1
        self.reason = verdict.reason

    @property
    def is_final(self) -> bool:
        """Whether the replica is to leave the rota instead of being restarted."""
        return self.num_in_row >= MAX_REJECTIONS_IN_ROW
