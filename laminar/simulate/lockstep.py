"""Systems whose replicas play one batch together: synchronous, one step apart, and streaming of mini-batches.

A batch is shared out beforehand, as evenly as its number of groups allows; nobody helps a slower neighbour.
"""

from collections.abc import Generator

from simpy import Event

from laminar.simulate.fleet import Fleet
from laminar.simulate.recorder import Recorder
from laminar.simulate.requests import Group


class LockstepRun:
    """See the module.

    Args:
        fleet: the replicas, with what they are part of.
        prompts_per_step: B.
        recorder: of the run.
    """

    def __init__(self, fleet: Fleet, prompts_per_step: int, recorder: Recorder) -> None:
        self._env, self._cluster, self._system, self._buffer = fleet.env, fleet.cluster, fleet.system, fleet.buffer
        self._fleet, self._size, self._recorder = fleet, prompts_per_step, recorder
        self._ready: list[Group] = []
        self._wanted = 0
        self._enough: Event | None = None
        self._published: Event = fleet.env.event()

    def run(self, num_steps: int) -> Generator[Event, None, None]:
        """Train so many steps; the systems differ only in what runs beside what."""
        match self._system.kind:
            case "synchronous":
                yield from self._synchronous(num_steps)
            case "one_step":
                yield from self._one_step(num_steps)
            case _:
                yield from self._stream(num_steps)

    def note(self, group: Group) -> None:
        """A group became ready."""
        self._ready.append(group)
        if self._enough is not None and len(self._ready) >= self._wanted:
            enough, self._enough = self._enough, None
            enough.succeed()

    def _synchronous(self, num_steps: int) -> Generator[Event, None, None]:
        for step in range(num_steps):
            begun = self._env.now
            self._start_batch(step)
            batch = yield from self._collect(self._size)
            self._recorder.wait(self._env.now - begun)
            yield from self._train(batch, step)
            yield from self._finish(batch, step, self._cluster.transfers.switch_seconds)

    def _one_step(self, num_steps: int) -> Generator[Event, None, None]:
        self._start_batch(0)
        batch = yield from self._collect(self._size)
        for step in range(num_steps):
            self._start_batch(step)
            yield from self._train(batch, step)
            begun = self._env.now
            following = yield from self._collect(self._size)
            self._recorder.wait(self._env.now - begun)
            yield from self._finish(batch, step, self._global_sync())
            batch = following

    def _stream(self, num_steps: int) -> Generator[Event, None, None]:
        self._env.process(self._generate(num_steps))
        num = min(self._cluster.trainer.mini_batches, self._size)
        for step in range(num_steps):
            batch: list[Group] = []
            for part in range(num):
                begun = self._env.now
                mini_batch = yield from self._collect(self._size // num + (part < self._size % num))
                self._recorder.wait(self._env.now - begun)
                yield from self._train(mini_batch, step, 1 / num)
                batch += mini_batch
            yield from self._finish(batch, step, self._global_sync())

    def _generate(self, num_steps: int) -> Generator[Event, None, None]:
        """Batch n begins when batch n - 1 has been generated and batch n - 2 been published."""
        for step in range(num_steps):
            while self._buffer.published < step - 1:
                yield self._published
            if step:
                yield self._env.timeout(self._global_sync())
            groups = self._start_batch(self._buffer.published)
            while any(group.num_open for group in groups):
                yield self._env.timeout(1.0)

    def _global_sync(self) -> float:
        return self._cluster.transfers.global_sync_seconds(self._cluster.num_gpus)

    def _start_batch(self, version: int) -> list[Group]:
        groups = self._buffer.claim(version, self._size, self._env.now)
        workers = self._fleet.workers
        for place, worker in enumerate(workers):
            mine = groups[place :: len(workers)]
            worker.groups.update(mine)
            worker.version = version
            worker.begin([member for group in mine for member in group.members])
        return groups

    def _collect(self, num_groups: int) -> Generator[Event, None, list[Group]]:
        if len(self._ready) < num_groups:
            self._wanted, self._enough = num_groups, self._env.event()
            yield self._enough
        taken, self._ready = self._ready[:num_groups], self._ready[num_groups:]
        return self._buffer.take(tuple(group.group_id for group in taken))

    def _train(self, batch: list[Group], step: int, share: float = 1.0) -> Generator[Event, None, None]:
        yield self._env.timeout(self._cluster.trainer.seconds(sum(group.tokens for group in batch), step, share))

    def _finish(self, batch: list[Group], step: int, sync_seconds: float) -> Generator[Event, None, None]:
        yield self._env.timeout(sync_seconds)
        self._recorder.wait(sync_seconds)
        self._buffer.publish(batch)
        self._recorder.train([member for group in batch for member in group.trained], step, 0)
        self._recorder.end_step(step)
        published, self._published = self._published, self._env.event()
        published.succeed()
