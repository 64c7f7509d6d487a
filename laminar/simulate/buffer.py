"""Prompts and buffer of the simulated run: who may be admitted, what is outstanding, which batch is legal.

All decisions are those of `laminar.policies.staleness`. It knows neither engines nor time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from laminar.policies.over_provision import tail_of_batch
from laminar.policies.staleness import BatchPlan, fewest_evictions, free_slots, may_readmit, plan_batch
from laminar.simulate.requests import Group, Request
from laminar.simulate.system import System
from laminar.simulate.workload import Draws, Workload
from laminar.types import GroupState


@dataclass(slots=True)
class Tally:
    """Where trajectories went: `admitted` = open + `trained` + `evicted` + those ready."""

    admitted: int = 0
    trained: int = 0
    evicted: int = 0
    evicted_tokens: float = 0.0


class SimulatedBuffer:
    """See the module.

    Args:
        workload: what is played.
        system: whose rules.
        draws: of lengths.
        on_news: told when a group became ready or was evicted.

    Attributes:
        published: t.
        tally: of trajectories.
        groups: outstanding ones by id.
        num_ready: of them.
    """

    def __init__(self, workload: Workload, system: System, draws: Draws, on_news: Callable[[Group], None]) -> None:
        self._workload, self._system, self._draws, self._on_news = workload, system, draws, on_news
        self._next_admission = 0
        self.published = 0
        self.tally = Tally()
        self.groups: dict[str, Group] = {}
        self.num_ready = 0

    def claim(self, engine_version: int, max_groups: int, now: float) -> list[Group]:
        """Groups for an engine, as many as admission grants."""
        slots = free_slots(
            max_staleness=self._system.max_staleness,
            prompts_per_step=self._workload.prompts_per_step,
            outstanding=len(self.groups),
            published=self.published,
            engine=engine_version,
        )
        if self._system.max_outstanding_groups is not None:
            slots = min(slots, self._system.max_outstanding_groups - len(self.groups))
        return [self._new_group(engine_version, now) for _ in range(min(slots, max_groups))]

    def may_readmit(self, group: Group, engine_version: int) -> bool:
        """Whether an engine may go on with a group that another one has lost."""
        return may_readmit(
            max_staleness=group.max_staleness,
            prompts_per_step=self._workload.prompts_per_step,
            outstanding=len(self.groups),
            published=self.published,
            engine=engine_version,
            oldest=group.oldest,
        )

    def submit(self, request: Request, now: float) -> bool:
        """A trajectory has ended; returns whether its group is complete now."""
        group = request.group
        request.ended_at, request.published_at_end = now, self.published
        group.num_open -= 1
        if group.num_open or group.is_gone:
            return group.num_open == 0
        group.state = GroupState.READY
        self.num_ready += 1
        self._on_news(group)
        return True

    def plan(self, trained_on: int) -> BatchPlan:
        """The batch that would be trained now, or what prevents it."""
        return plan_batch(
            [group.header() for group in self.groups.values()],
            trained_on=trained_on,
            prompts_per_step=self._workload.prompts_per_step,
            max_staleness=self._system.max_staleness,
            order=self._system.sampler,
            end_of_data=False,
        )

    def fewest_evictions(self, trained_on: int) -> tuple[str, ...]:
        """Whom to evict so that nothing in flight prevents a batch."""
        return fewest_evictions(
            [group.header() for group in self.groups.values()],
            trained_on=trained_on,
            prompts_per_step=self._workload.prompts_per_step,
        )

    def tail_of_batch(self, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """With over-provisioning: groups in flight that a batch has overtaken."""
        if self._system.over_provision <= 1 or self._system.max_staleness == 0:
            return ()
        return tail_of_batch(
            [group.header() for group in self.groups.values()],
            chosen,
            ratio=self._system.over_provision,
            prompts_per_step=self._workload.prompts_per_step,
        )

    def take(self, group_ids: tuple[str, ...]) -> list[Group]:
        """Groups of a batch, in its order; they keep their slots."""
        taken = [self.groups[group_id] for group_id in group_ids]
        for group in taken:
            group.state = GroupState.TAKEN
        self.num_ready -= len(taken)
        return taken

    def publish(self, trained: list[Group]) -> None:
        """A step's version is out; its slots are free."""
        self.published += 1
        for group in trained:
            del self.groups[group.group_id]
            self.tally.trained += len(group.members)

    def evict(self, group_id: str) -> Group:
        """Let a group go."""
        group = self.groups.pop(group_id)
        self.num_ready -= group.state is GroupState.READY
        group.is_gone = True
        self.tally.evicted += len(group.members)
        self.tally.evicted_tokens += sum(member.sampled for member in group.members)
        return group

    def _new_group(self, engine_version: int, now: float) -> Group:
        has_deadline = self._system.policy != "mask" and self._system.kind != "partial"
        bound = self._system.max_staleness if has_deadline else None
        group = Group(self._next_admission, engine_version, bound)
        self._next_admission += 1
        for member in range(self._workload.members_per_group):
            group.members.append(self._new_request(group, now, member))
        group.num_open = len(group.members)
        self.groups[group.group_id] = group
        self.tally.admitted += len(group.members)
        return group

    def _new_request(self, group: Group, now: float, member: int) -> Request:
        """Siblings find their prompt in the engine's prefix cache: only the first pays for it."""
        length, turns = self._draws.length(), self._workload.num_turns
        ends = (length,) if turns == 1 else split_turns(length, turns)
        prompt = float(self._workload.prompt_tokens)
        is_trained = member < self._workload.group_size
        return Request(group, length, ends, prompt, prompt if member == 0 else 0.0, is_trained, started_at=now)


def split_turns(length: float, num_turns: int) -> tuple[float, ...]:
    """Sampled tokens at which turns end that are as equal as whole tokens allow; fewer turns than asked for if too short."""
    turns = max(1, min(num_turns, int(length)))
    return tuple(float(round(length * (turn + 1) / turns)) for turn in range(turns))
