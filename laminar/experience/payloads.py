"""How taken groups are read: where their payloads lie, then the payloads, over a few connections at once.

Invariant: whatever is missing is an error that names it; nothing is skipped silently.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import msgspec

from laminar.codec import decode_trajectory
from laminar.errors import ExperienceError
from laminar.experience.store import ExperienceStore
from laminar.types import Trajectory, trajectory_id

NUM_CONNECTIONS = 4
MAX_CHUNK_BYTES = 4 * 1024**2
LARGE_PAYLOAD_BYTES = 16 * 1024
"""As `LARGE_PAYLOAD` in scripts/prelude.lua, where they are written."""


class _Record(msgspec.Struct, array_like=True):
    """A member's stored record; a failed member has no payload."""

    request: str
    attempt: int
    bytes: int
    tokens: int
    good: bool


_records = msgspec.msgpack.Decoder(_Record)


class PayloadLostError(ExperienceError):
    """A complete group's payload is gone from the server, deleted by somebody else (case D19)."""

    def __init__(self, group_id: str, text: str) -> None:
        super().__init__(text)
        self.group_id = group_id


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one member's payload lies."""

    group_id: str
    member: int
    num_bytes: int

    @property
    def is_large(self) -> bool:
        """Whether it has a key of its own."""
        return self.num_bytes >= LARGE_PAYLOAD_BYTES


async def fetch_groups(store: ExperienceStore, group_ids: Sequence[str]) -> list[tuple[Trajectory, ...]]:
    """The good members of each group, in the given order, members in member order.

    Raises:
        PayloadLostError: a group or a payload is gone.
    """
    places = await store.insist("locate", lambda: _locate(store, group_ids))
    limit = asyncio.Semaphore(NUM_CONNECTIONS)

    async def read(chunk: list[_Place]) -> list[Trajectory]:
        async with limit:
            frames = await store.insist("fetch", lambda: _read(store, chunk))
        return [_decoded(place, frame) for place, frame in zip(chunk, frames, strict=True)]

    try:
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(read(chunk)) for chunk in _chunks(places)]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    by_group: dict[str, list[Trajectory]] = {group_id: [] for group_id in group_ids}
    for trajectory in (trajectory for task in reads for trajectory in task.result()):
        by_group[trajectory.group_id].append(trajectory)
    return [tuple(by_group[group_id]) for group_id in group_ids]


async def _locate(store: ExperienceStore, group_ids: Sequence[str]) -> list[_Place]:
    async with store.client.pipeline(transaction=False) as pipeline:
        for group_id in group_ids:
            pipeline.hgetall(store.key(f"members:{group_id}"))
        rows = await pipeline.execute()
    places = []
    for group_id, stored in zip(group_ids, rows, strict=True):
        records = {int(member): _records.decode(packed) for member, packed in stored.items()}
        if not records:
            text = f"group {group_id} holds no trajectory: it was evicted, or its step was acknowledged"
            raise PayloadLostError(group_id, text)
        places += [_Place(group_id, member, record.bytes) for member, record in sorted(records.items()) if record.good]
    return places


async def _read(store: ExperienceStore, chunk: Sequence[_Place]) -> list[bytes | None]:
    """The frames at these places; None where one is gone."""
    async with store.client.pipeline(transaction=False) as pipeline:
        for (group_id, is_large), places in groupby(chunk, attrgetter("group_id", "is_large")):
            if is_large:
                pipeline.mget([store.key(f"payload:{group_id}:{place.member}") for place in places])
            else:
                pipeline.hmget(store.key(f"payloads:{group_id}"), [place.member for place in places])
        rows = await pipeline.execute()
    return [frame for row in rows for frame in row]


def _chunks(places: list[_Place]) -> list[list[_Place]]:
    """Runs of payloads of about `MAX_CHUNK_BYTES`, at least one for each connection."""
    most = min(MAX_CHUNK_BYTES, sum(place.num_bytes for place in places) // NUM_CONNECTIONS + 1)
    chunks: list[list[_Place]] = []
    room = 0
    for place in places:
        if room <= 0:
            chunks.append([])
            room = most
        chunks[-1].append(place)
        room -= place.num_bytes
    return chunks


def _decoded(place: _Place, frame: bytes | None) -> Trajectory:
    if frame is None:
        name = trajectory_id(place.group_id, place.member)
        text = f"payload of trajectory {name} is gone from Redis, deleted by somebody else"
        raise PayloadLostError(place.group_id, text)
    trajectory = decode_trajectory(frame)
    if trajectory.group_id != place.group_id or trajectory.member != place.member:
        name = trajectory_id(place.group_id, place.member)
        raise ExperienceError(f"payload of trajectory {name} holds trajectory {trajectory.trajectory_id}")
    return trajectory
