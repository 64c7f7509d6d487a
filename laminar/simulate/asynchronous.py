"""The trainer of the asynchronous systems: takes legal batches, trains, publishes; as `trainer.loop` does."""

from collections.abc import Generator

from simpy import Event

from laminar.policies.masking import oldest_trained_number
from laminar.simulate.fleet import Fleet
from laminar.simulate.recorder import Recorder
from laminar.simulate.requests import Group


class AsynchronousTrainer:
    """See the module.

    Args:
        fleet: the replicas, with what they are part of.
        prompts_per_step: B.
        recorder: of the run.
    """

    def __init__(self, fleet: Fleet, prompts_per_step: int, recorder: Recorder) -> None:
        self._env, self._cluster, self._system, self._buffer = fleet.env, fleet.cluster, fleet.system, fleet.buffer
        self._fleet, self._size, self._recorder = fleet, prompts_per_step, recorder
        self._masks = self._system.policy == "mask" and self._system.kind == "laminar"
        self._news: Event | None = None
        self._due: dict[str, float] = {}
        self._may_matter = False

    def run(self, num_steps: int) -> Generator[Event, None, None]:
        """Train so many steps.

        Consumes: legal batches. Produces: versions. Waits for: the next batch.
        """
        for step in range(num_steps):
            asked = self._env.now
            batch = yield from self._next_batch(step)
            self._recorder.wait(self._env.now - asked)
            if self._system.kind == "partial":
                yield from self._train_with_broadcasts(batch, step)
            else:
                yield self._env.timeout(self._cluster.trainer.seconds(sum(group.tokens for group in batch), step))
                yield self._env.timeout(self._cluster.transfers.publish_seconds)
                self._buffer.publish(batch)
                self._fleet.announce(step + 1)
            bound = self._system.max_staleness if self._masks else None
            requests = [member for group in batch for member in group.trained]
            self._recorder.train(requests, step, oldest_trained_number(step, bound))
            self._recorder.end_step(step)
            self._fleet.claim_all()

    def note(self, group: Group) -> None:
        """A group became ready; wake up if that may matter: with a batch's worth, once one that was due is among them."""
        self._may_matter |= not self._due or group.group_id in self._due
        if self._news is not None and self._may_matter and self._buffer.num_ready >= self._size:
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.succeed()

    def _train_with_broadcasts(self, batch: list[Group], step: int) -> Generator[Event, None, None]:
        num = self._system.syncs_per_step
        seconds = self._cluster.trainer.seconds(sum(group.tokens for group in batch), step)
        for part in range(num):
            yield self._env.timeout(seconds / num)
            begun = self._env.now
            if part == num - 1:
                self._buffer.publish(batch)
            yield self._env.process(self._fleet.broadcast(self._buffer.published))
            self._recorder.wait(self._env.now - begun)

    def _next_batch(self, step: int) -> Generator[Event, None, list[Group]]:
        self._due = {}
        while True:
            if self._masks and self._evict_fully_masked(step):
                continue
            plan = self._buffer.plan(step)
            if plan.over_age:
                self._evict(plan.over_age)
                continue
            if plan.chosen:
                batch = self._buffer.take(plan.chosen)
                self._evict(self._buffer.tail_of_batch(plan.chosen))
                return batch
            self._due = {header.group_id: self._due.get(header.group_id, self._env.now) for header in plan.due}
            if self._system.policy == "drop" and plan.is_held_by_bound:
                self._evict(self._buffer.fewest_evictions(step))
                continue
            wait = min(self._due.values(), default=self._env.now) + self._system.max_wait_seconds - self._env.now
            if self._due and wait <= 0:
                self._evict(self._buffer.fewest_evictions(step))
                continue
            self._news, self._may_matter = self._env.event(), not self._due
            if self._due:
                yield self._news | self._env.timeout(wait)
                self._news = None
            else:
                yield self._news

    def _evict_fully_masked(self, step: int) -> bool:
        """Let ready groups go that have no token young enough."""
        oldest_trained = oldest_trained_number(step, self._system.max_staleness)
        masked = tuple(
            group_id
            for group_id, group in self._buffer.groups.items()
            if not group.num_open and all(m.spans[-1][0] < oldest_trained for m in group.members)
        )
        self._evict(masked)
        return bool(masked)

    def _evict(self, group_ids: tuple[str, ...]) -> None:
        groups = [self._buffer.evict(group_id) for group_id in group_ids]
        self._fleet.drop(groups)
        if groups:
            self._fleet.claim_all()
