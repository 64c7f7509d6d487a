"""How trajectories are handed in: payloads and what to know of them, many in one script call, two calls under way at once.

Invariants: a payload is put in its place by the very script that accepts it, and only then, so nothing overwrites what was
accepted; every try of one call uses the same request id, so a repeated try changes nothing. A large payload waits beside its
request, where only that script finds it; one whose script never ran expires.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from laminar.codec import encode_trajectory
from laminar.errors import ExperienceError
from laminar.experience.answers import SubmitOutcome
from laminar.experience.payloads import LARGE_PAYLOAD_BYTES
from laminar.experience.store import ExperienceStore, as_experience_error, new_request_id, unpack
from laminar.types import Trajectory

MEMORY_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
MAX_AT_ONCE = 64
MAX_BYTES_AT_ONCE = 1024 * 1024
"""A script call blocks the server for a few milliseconds."""
CALLS_UNDER_WAY = 2
"""The server works on one call while the next one is encoded."""
MAX_FAILURE_CHARACTERS = 500
STAGED_SECONDS = 600
"""How long a large payload waits for its script, which comes with it."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One trajectory on its way."""

    place: int
    request_id: str
    payload: bytes
    arguments: tuple[Any, ...]


class Submission:
    """One call's trajectories.

    Args:
        store: the run's data.
        worker: who played them.
        memory_seconds: how long to wait for a server whose memory is full.
    """

    def __init__(self, store: ExperienceStore, worker: str, memory_seconds: float) -> None:
        self._store, self._worker, self._memory_seconds = store, worker, memory_seconds
        self._outcomes: dict[int, SubmitOutcome] = {}

    async def run(self, trajectories: Sequence[Trajectory], *, together: bool = False) -> list[SubmitOutcome]:
        """Submit all, in one script call if they belong `together`.

        Raises:
            ExperienceError: a script refused, the server is away, or its memory stayed full.
        """
        limit, call_id = asyncio.Semaphore(CALLS_UNDER_WAY), new_request_id()
        parcels: list[_Parcel] = []
        num_bytes = 0
        try:
            async with asyncio.TaskGroup() as calls:
                for place, trajectory in enumerate(trajectories):
                    parcels.append(_parcel(place, f"{call_id}.{place}", trajectory, self._worker))
                    num_bytes += len(parcels[-1].payload)
                    is_full = not together and (len(parcels) >= MAX_AT_ONCE or num_bytes >= MAX_BYTES_AT_ONCE)
                    if is_full or place + 1 == len(trajectories):
                        await limit.acquire()
                        call = calls.create_task(self._insist(parcels))
                        call.add_done_callback(lambda _: limit.release())
                        parcels, num_bytes = [], 0
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return [self._outcomes[place] for place in range(len(trajectories))]

    async def _insist(self, parcels: list[_Parcel]) -> None:
        """Send until the server has memory for all."""
        started, waited, pause = time.monotonic(), 0.0, FIRST_PAUSE_SECONDS
        while True:
            answers = await self._store.insist("submit", partial(_send, self._store, parcels, waited))
            self._outcomes |= {p.place: o for p, o in zip(parcels, answers, strict=True) if o is not None}
            parcels = [parcel for parcel, outcome in zip(parcels, answers, strict=True) if outcome is None]
            if not parcels:
                return
            if time.monotonic() - started > self._memory_seconds:
                raise ExperienceError(
                    f"Redis has had no memory for {len(parcels)} trajectories for {self._memory_seconds:.0f} s; "
                    "raise its maxmemory, or lower experience.max_bytes"
                )
            await asyncio.sleep(pause)
            pause, waited = min(2 * pause, LONGEST_PAUSE_SECONDS), time.monotonic() - started


def _parcel(place: int, request_id: str, trajectory: Trajectory, worker: str) -> _Parcel:
    failure = trajectory.failure
    good = failure is None
    numbers = [version.number for version in trajectory.versions()] or [0]
    payload = encode_trajectory(trajectory) if good else b""
    return _Parcel(
        place=place,
        request_id=request_id,
        payload=payload,
        arguments=(
            trajectory.group_id,
            trajectory.member,
            trajectory.attempt,
            worker,
            good,
            failure.kind.value if failure else "",
            failure.text[:MAX_FAILURE_CHARACTERS] if failure else "",
            len(payload),
            trajectory.num_sampled_tokens,
            min(numbers),
            max(numbers),
        ),
    )


async def _send(store: ExperienceStore, parcels: list[_Parcel], waited_seconds: float) -> list[SubmitOutcome | None]:
    """One script call, large payloads before it; None where the server lacks memory."""
    waited_ms = round(waited_seconds * 1000)
    large = {parcel.request_id: parcel.payload for parcel in parcels if len(parcel.payload) >= LARGE_PAYLOAD_BYTES}
    requests = [
        (parcel.request_id, (*parcel.arguments, waited_ms), b"" if parcel.request_id in large else parcel.payload)
        for parcel in parcels
    ]
    command = store.batch("submit", requests)
    try:
        try:
            answers = await _call(store, large, command)
        except redis.exceptions.NoScriptError:
            await store.load("submit", repeated=True)
            answers = await _call(store, {}, command)
    except redis.exceptions.OutOfMemoryError:
        return [None] * len(parcels)
    return [_outcome(answer) for answer in answers]


async def _call(store: ExperienceStore, large: dict[str, bytes], command: tuple[Any, ...]) -> list[Any]:
    """The script's answers; for a payload that found no memory it answers that itself."""
    async with store.client.pipeline(transaction=False) as pipeline:
        for request_id, payload in large.items():
            pipeline.set(store.key(f"staged:{request_id}"), payload, ex=STAGED_SECONDS)
        pipeline.execute_command(*command)
        *staged, answers = await pipeline.execute(raise_on_error=False)
    for answer in (*staged, answers):
        is_answered_by_script = answer is not answers and isinstance(answer, redis.exceptions.OutOfMemoryError)
        if isinstance(answer, Exception) and not is_answered_by_script:
            raise answer
    return list(answers)


def _outcome(answer: Any) -> SubmitOutcome | None:
    if answer is None:
        return None
    if isinstance(answer, redis.ResponseError):
        raise as_experience_error(answer) from answer
    return SubmitOutcome(unpack(answer))
