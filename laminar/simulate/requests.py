"""Trajectories and groups, as the simulation moves them around."""

from dataclasses import dataclass, field

from laminar.types import GroupHeader, GroupState


@dataclass(slots=True, eq=False)
class Request:
    """One trajectory: on an engine, in its environment, or ended.

    Attributes:
        group: its group.
        length: tokens that it samples in all.
        turn_ends: sampled tokens at which its turns end, ascending; the last is `length`.
        context: tokens of prompt, answers and observations so far.
        sampled: tokens sampled so far.
        is_trained: whether its group's batch trains it; if not, others are compared with it.
        uncached: tokens of its context that the next engine has to compute before it decodes.
        spans: (version, sampled tokens before it), of every version that sampled some.
        started_at: when it was begun, in seconds.
        ended_at: when it ended.
        published_at_end: the version that was published then.
        end_step: of its engine, at which its turn ends; only while it is decoded.
    """

    group: "Group"
    length: float
    turn_ends: tuple[float, ...]
    context: float
    uncached: float
    is_trained: bool = True
    sampled: float = 0.0
    turn: int = 0
    spans: list[tuple[int, float]] = field(default_factory=list)
    started_at: float = 0.0
    ended_at: float = 0.0
    published_at_end: int = 0
    end_step: float = 0.0

    @property
    def oldest(self) -> int:
        """The oldest version that sampled a token of it."""
        spans = self.spans
        if len(spans) == 1:
            return spans[0][0]
        return min((version for version, _ in spans), default=self.group.claimed_at_version)

    def note_version(self, version: int) -> None:
        """From here on `version` samples; a version that has sampled nothing leaves no trace."""
        while self.spans and self.spans[-1][1] >= self.sampled:
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, self.sampled))

    def over_age_tokens(self, oldest_trained: int) -> float:
        """Sampled tokens of versions below `oldest_trained`."""
        ends = [start for _, start in self.spans[1:]] + [self.sampled]
        return sum(end - start for (version, start), end in zip(self.spans, ends, strict=True) if version < oldest_trained)


@dataclass(slots=True, eq=False)
class Group:
    """One prompt's siblings.

    Attributes:
        admission: index in the order of admission.
        claimed_at_version: of the engine that claimed it.
        max_staleness: the bound it was admitted under; None: no deadline.
        members: its trajectories.
        num_open: that have not ended.
        state: as `laminar.types.GroupHeader`.
        is_gone: evicted: nobody wants it any more.
    """

    admission: int
    claimed_at_version: int
    max_staleness: int | None
    members: list[Request] = field(default_factory=list)
    num_open: int = 0
    state: GroupState = GroupState.IN_FLIGHT
    is_gone: bool = False

    @property
    def group_id(self) -> str:
        """Its name."""
        return f"{self.admission:09d}"

    @property
    def oldest(self) -> int:
        """The oldest version of its members; that of the claiming engine until a token is known."""
        return min((member.oldest for member in self.members), default=self.claimed_at_version)

    @property
    def tokens(self) -> float:
        """Tokens of those that are trained, given ones included."""
        return sum(member.context for member in self.trained)

    @property
    def trained(self) -> list[Request]:
        """Its members without those that are only compared with."""
        return [member for member in self.members if member.is_trained]

    def header(self) -> GroupHeader:
        """What policies see."""
        newest = max((m.spans[-1][0] for m in self.members if m.spans), default=self.claimed_at_version)
        return GroupHeader(self.group_id, self.admission, self.state, self.oldest, newest, self.max_staleness)
