"""What the data module answers, as frozen values.

This module does not know how the answers are made.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from laminar.types import ClaimedGroup, GroupHeader, WeightVersion


class SubmitOutcome(enum.StrEnum):
    """What became of a submitted trajectory; only `accepted` counts. `replay`: the failed member is to be played again."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REFUSED_UNKNOWN = "refused_unknown"
    REFUSED_LOST = "refused_lost"
    REFUSED_STALE = "refused_stale"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Claim:
    """Groups to play.

    Attributes:
        groups: those granted.
        refused: why no more were granted: `staleness`, `bytes`, `paused`, `end_of_data`, `not_ready` or `old_lineage`;
            None if all were, or if another claim will grant more at once (at the end of an epoch).
        published: the newest published version; `0.0` until a lineage is open.
    """

    groups: tuple[ClaimedGroup, ...]
    refused: str | None
    published: WeightVersion


@dataclass(frozen=True, slots=True)
class Counters:
    """Trajectories by where they stand; groups leave as a whole, single members only as failed.

    Attributes:
        admitted: all that were ever admitted.
        running: not submitted yet.
        buffered: submitted, not taken.
        taken: in a step that is not published.
        trained: in a published step.
        evicted: by reason.
        filtered: dropped for carrying no signal.
        failed: by failure kind; `given_up` after the last attempt's lease, `too_few_siblings` with their group.
        refilled: failures that ended nothing, because their member is played again.
        reissued: of those evicted, how many have their prompt issued again.
        abandoned: of those evicted, how many had their prompt issued again too often already.
        dropped_lengths: those evicted for their age (or a wait that its bound caused), by sampled tokens: a power of two
            that they do not exceed; what was still played counts with what it had put by, `unfinished` had put by nothing.
        refused_claims: claims that were granted nothing, by reason.
        waited_for_memory_seconds: time that accepted trajectories waited because the server's memory was full.
    """

    admitted: int = 0
    running: int = 0
    buffered: int = 0
    taken: int = 0
    trained: int = 0
    filtered: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    reissued: int = 0
    refilled: int = 0
    abandoned: int = 0
    dropped_lengths: dict[str, int] = field(default_factory=dict)
    refused_claims: dict[str, int] = field(default_factory=dict)
    waited_for_memory_seconds: float = 0.0

    @property
    def num_evicted(self) -> int:
        """Evicted for whatever reason."""
        return sum(self.evicted.values())

    @property
    def num_failed(self) -> int:
        """Failed in whatever way."""
        return sum(self.failed.values())

    @property
    def is_balanced(self) -> bool:
        """Whether every admitted trajectory is in exactly one place (DESIGN section 4, rule 1)."""
        ended = self.trained + self.num_evicted + self.filtered + self.num_failed
        return self.admitted == self.running + self.buffered + self.taken + ended

    @classmethod
    def from_flat(cls, flat: Iterable[Any]) -> "Counters":
        """Read the stored form: name, number, name, number, ..."""
        items = iter(flat)
        numbers = {_text(name): int(_text(number)) for name, number in zip(items, items, strict=True)}

        def by_kind(prefix: str) -> dict[str, int]:
            return {name.removeprefix(prefix): n for name, n in sorted(numbers.items()) if name.startswith(prefix) and n}

        plain = ("admitted", "running", "buffered", "taken", "trained", "filtered", "reissued", "refilled", "abandoned")
        return cls(
            **{name: numbers.get(name, 0) for name in plain},
            evicted=by_kind("evicted:"),
            failed=by_kind("failed:"),
            dropped_lengths=by_kind("dropped_length:"),
            refused_claims=by_kind("refused:"),
            waited_for_memory_seconds=numbers.get("waited_for_memory_ms", 0) / 1000,
        )


Occurrence = tuple[int, int, int]
"""Where a group's prompt stands in the data: epoch, place in that epoch's order, and how often it was issued again."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All outstanding groups at one moment.

    Attributes:
        published: the newest published version.
        is_open: whether a lineage is open. It is not at first, nor after the server was restarted or replaced, until the
            trainer restores the run; `published` then means nothing.
        lineage: the newest that was ever opened; -1 before the first.
        headers: in order of admission; without groups that left a taken batch.
        end_of_data: no prompt is left to admit.
        counters: of trajectories.
        num_held: slots held by groups that left a taken batch, until its publish.
        reserved_bytes: payload bytes set aside for outstanding groups, or held until their ack.
        occurrences: which prompt each group of `headers` plays.
        is_paused: nothing is granted, because somebody asked for it.
        max_staleness: the bound that groups are admitted under now; None if unbounded.
        prompts_left: still to be admitted, over all epochs, those to be issued again included; None if there is no end.
    """

    published: WeightVersion
    is_open: bool
    lineage: int
    headers: tuple[GroupHeader, ...]
    end_of_data: bool
    counters: Counters
    num_held: int
    reserved_bytes: int
    occurrences: Mapping[str, Occurrence]
    is_paused: bool = False
    max_staleness: int | None = None
    prompts_left: int | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """The data cursor at a published number, for the checkpoint of that number.

    Every prompt before the cursor is done with (trained, filtered, failed or evicted for good), but the pending ones.

    Attributes:
        version: the published version it belongs to.
        epoch: pass over the data, from 0.
        cursor: place in that epoch's order of the first prompt that was never admitted.
        pending: (epoch, place, times issued again) of prompts admitted but not trained, in the order to issue them again.
        next_admission: index of the next admission.
        counters: stored form of the counters.
    """

    lineage: int = 0
    number: int = 0
    epoch: int = 0
    cursor: int = 0
    next_admission: int = 0
    pending: tuple[Occurrence, ...] = ()
    counters: tuple[str, ...] = ()

    def advance(self, trained: Iterable[Occurrence], num_trajectories: int) -> "Frontier":
        """The frontier of the next number, once these pending prompts are trained.

        Args:
            trained: the step's prompts.
            num_trajectories: good ones in the step.
        """
        gone = {occurrence[:2] for occurrence in trained}
        names = iter(self.counters)
        counters = {name: int(number) for name, number in zip(names, names, strict=True)}
        counters["taken"] = counters.get("taken", 0) - num_trajectories
        counters["trained"] = counters.get("trained", 0) + num_trajectories
        return replace(
            self,
            number=self.number + 1,
            pending=tuple(occurrence for occurrence in self.pending if occurrence[:2] not in gone),
            counters=tuple(part for name, number in counters.items() for part in (name, str(number))),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, data: Any) -> "Frontier":
        """Read what `to_json` gave.

        Raises:
            msgspec.ValidationError: if it is anything else.
        """
        return msgspec.convert(data, cls)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What opening a lineage did, in groups.

    Attributes:
        kept: ready to be trained.
        orphaned: evicted.
        reissued: prompts to be issued again.
        lost: untrained prompts that are neither, found by looking for each of them afterwards; must be 0.
    """

    kept: int
    orphaned: int
    reissued: int
    lost: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ended badly, with its group and details.

    The kinds: `failure`, `refilled`, `given_up`, `abandoned`, `failed`, `evicted` and `filtered`.
    """

    event_id: str
    kind: str
    group_id: str
    detail: str


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
