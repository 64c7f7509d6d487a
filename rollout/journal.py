"""What one running trajectory has sampled, put by in batches while it runs; and what an earlier owner has put by of it.

Invariants: tokens are put by in order, each once; a turn's last tokens are put by only together with its end, so that
nobody ever goes on behind an end; a trajectory that is led to another context than the earlier owner takes nothing from it;
what is put by of a turn is of the answers that the trajectory holds.

Pure: no I/O, no clock. It does not know where batches go.
"""

from collections.abc import Callable

import xxhash

from laminar.experience.partial import AppendOutcome, Partial, PartialPiece, PartialTurn, joined_turns
from laminar.types import ClaimedGroup, FinishReason, Int32Array, Segment

_NOTHING = PartialTurn(0, 0, ())


class Journal:
    """Of one attempt at one member.

    Args:
        group, member, attempt: whose.
        batch_tokens: how many tokens make a batch.
        on_batch: called when there is one; None if nothing is to be put by (nobody could go on with it).
        saved: what an earlier owner left of this attempt.
    """

    def __init__(
        self,
        group: ClaimedGroup,
        member: int,
        attempt: int,
        *,
        batch_tokens: int,
        on_batch: "Callable[[Journal], None] | None" = None,
        saved: Partial | None = None,
    ) -> None:
        self.batch_tokens = batch_tokens
        self._group_id, self._claim, self._member, self._attempt = group.group_id, group.claim, member, attempt
        self._on_batch = on_batch
        self._saved = {turn.turn: turn for turn in saved.turns} if saved else {}
        self._offset = saved.num_tokens if saved else 0
        self._unsaved: list[PartialTurn] = []
        self._num_unsaved = 0
        self._turn, self._context = -1, 0
        self._noted = 0
        self._held: Segment | None = None
        self.resumed_tokens = 0

    def begin_turn(self, context: Int32Array) -> PartialTurn:
        """What is left of the turn that begins behind these token ids; an empty one if nothing is."""
        self._turn, self._context, self._held = self._turn + 1, xxhash.xxh3_64_intdigest(context.tobytes()), None
        saved = self._saved.pop(self._turn, _NOTHING)
        if saved is not _NOTHING and saved.context != self._context:
            self._saved.clear()
            self.close()  # what is stored belongs to another context; this attempt leaves it alone
            saved = _NOTHING
        self._noted = saved.num_tokens
        self.resumed_tokens += saved.num_tokens
        return saved

    def note(self, segment: Segment) -> None:
        """Hear of new tokens of the open turn; they wait for the next ones, since they may be its last."""
        if self._held is not None:
            self._keep(self._held)
        self._held = segment
        self._offer()

    def end_request(self, turn: tuple[Segment, ...], reason: FinishReason | None) -> None:
        """Hear of the whole open turn once a request has ended.

        Args:
            turn: all segments of the turn. If it lacks what was noted, the answer was refused after parts of it had come; as
                some of them may be put by, nothing more is.
            reason: why the turn ended; None if it goes on.
        """
        self._held = None
        if self._noted > sum(map(len, turn)):
            self.close()
        for segment in _behind(turn, self._noted):
            self._keep(segment)
        if reason is not None:
            self._unsaved.append(PartialTurn(self._turn, self._context, (), reason))
        self._offer()

    def batch(self) -> PartialPiece | None:
        """What is to be put by now; None if nothing is."""
        if self._on_batch is None or self._num_unsaved < self.batch_tokens:
            return None
        turns = joined_turns(self._unsaved)
        return PartialPiece(self._group_id, self._member, self._attempt, self._claim, self._offset, turns)

    def settle(self, piece: PartialPiece, outcome: AppendOutcome) -> None:
        """Hear what became of a batch; the trajectory may have ended meanwhile."""
        if outcome is AppendOutcome.NO_MEMORY or self._on_batch is None:
            return
        if outcome is not AppendOutcome.APPENDED:
            self.close()
            return
        count = sum(turn.num_tokens for turn in piece.turns)
        self._offset, self._num_unsaved = self._offset + count, self._num_unsaved - count
        while count or (self._unsaved and not self._unsaved[0].num_tokens):
            count -= self._unsaved.pop(0).num_tokens
        self._offer()

    def close(self) -> None:
        """Put nothing by any more."""
        self._on_batch = None
        self._unsaved.clear()
        self._num_unsaved = 0

    def _keep(self, segment: Segment) -> None:
        self._noted += len(segment)
        if self._on_batch is not None:
            self._unsaved.append(PartialTurn(self._turn, self._context, (segment,)))
            self._num_unsaved += len(segment)

    def _offer(self) -> None:
        if self._on_batch is not None and self._num_unsaved >= self.batch_tokens:
            self._on_batch(self)


def _behind(segments: tuple[Segment, ...], count: int) -> list[Segment]:
    """The segments without their first `count` tokens."""
    rest = []
    for segment in segments:
        skip = min(count, len(segment))
        count -= skip
        if skip < len(segment):
            assert segment.logprobs is not None
            masked = max(0, segment.masked_head_tokens - skip)
            rest.append(Segment(segment.token_ids[skip:], segment.logprobs[skip:], segment.version, masked))
    return rest
