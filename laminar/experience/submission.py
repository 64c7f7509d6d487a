"""How trajectories are handed in: payload, then the script that links it, in one pipeline.

Invariants: every try of one call uses the same request id and payload key, so a repeated try changes nothing; another call,
even for the same trajectory, has its own key and cannot overwrite what was accepted. A payload that is never linked expires.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from laminar.codec import encode_trajectory
from laminar.errors import ExperienceError, InvariantError
from laminar.experience.answers import SubmitOutcome
from laminar.experience.store import ExperienceStore, as_experience_error, new_request_id, unpack
from laminar.types import Trajectory

MEMORY_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
UNLINKED_SECONDS = 600
PER_PIPELINE = 32
MAX_FAILURE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One trajectory on its way."""

    request_id: str
    payload_key: str
    payload: bytes
    arguments: dict[str, Any]


async def submit_all(
    store: ExperienceStore, trajectories: Sequence[Trajectory], worker: str, memory_seconds: float
) -> list[SubmitOutcome]:
    """Submit in pipelines; what the server had no memory for is sent again until it has.

    Raises:
        ExperienceError: a script refused, the server is away, or its memory stayed full.
    """
    outcomes: dict[int, SubmitOutcome] = {}
    parcels = [_parcel(trajectory, worker) for trajectory in trajectories]
    started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
    while True:
        open_places = [i for i in range(len(parcels)) if i not in outcomes]
        for first in range(0, len(open_places), PER_PIPELINE):
            places = open_places[first : first + PER_PIPELINE]
            waited = time.monotonic() - started if pause > FIRST_PAUSE_SECONDS else 0.0
            answers = await store.insist("submit", partial(_send, store, [parcels[i] for i in places], waited))
            outcomes |= {i: outcome for i, outcome in zip(places, answers, strict=True) if outcome is not None}
        if len(outcomes) == len(parcels):
            return [outcomes[i] for i in range(len(parcels))]
        if time.monotonic() - started > memory_seconds:
            raise ExperienceError(
                f"Redis has had no memory for {len(parcels) - len(outcomes)} trajectories for {memory_seconds:.0f} s; "
                "raise its maxmemory, or lower experience.max_bytes"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _parcel(trajectory: Trajectory, worker: str) -> _Parcel:
    oldest, newest = trajectory.oldest, trajectory.newest
    good = trajectory.failure is None
    if good and (oldest is None or newest is None):
        raise InvariantError(f"trajectory {trajectory.trajectory_id} has a reward but no sampled token")
    request_id = new_request_id()
    payload_name = f"payload:{trajectory.trajectory_id}:{request_id}"
    payload = encode_trajectory(trajectory) if good else b""
    return _Parcel(
        request_id=request_id,
        payload_key=payload_name,
        payload=payload,
        arguments={
            "group": trajectory.group_id,
            "member": trajectory.member,
            "attempt": trajectory.attempt,
            "worker": worker,
            "good": good,
            "kind": trajectory.failure.kind.value if trajectory.failure else "",
            "text": trajectory.failure.text[:MAX_FAILURE_CHARACTERS] if trajectory.failure else "",
            "bytes": len(payload),
            "oldest": oldest.number if oldest else 0,
            "newest": newest.number if newest else 0,
            "payload": payload_name,
        },
    )


async def _send(store: ExperienceStore, parcels: list[_Parcel], waited_seconds: float) -> list[SubmitOutcome | None]:
    """One pipeline; None where the server lacks memory."""
    answers = await _pipeline(store, parcels, waited_seconds)
    if isinstance(answers[0], redis.exceptions.NoScriptError):
        await store.load("submit", repeated=True)
        answers = await _pipeline(store, parcels, waited_seconds)
    return [_outcome(answer) for answer in answers]


async def _pipeline(store: ExperienceStore, parcels: list[_Parcel], waited_seconds: float) -> list[Any]:
    """The scripts' answers, errors as values. A payload without its script, or the other way round, changes nothing."""
    async with store.client.pipeline(transaction=False) as pipeline:
        for parcel in parcels:
            if parcel.payload:
                pipeline.set(store.key(parcel.payload_key), parcel.payload, nx=True, ex=UNLINKED_SECONDS)
        waited = {"waited_ms": round(waited_seconds * 1000)}
        pipeline.execute_command(*store.batch("submit", [(p.request_id, p.arguments | waited) for p in parcels]))
        answer = (await pipeline.execute(raise_on_error=False))[-1]
    return answer if isinstance(answer, list) else [answer] * len(parcels)


def _outcome(answer: Any) -> SubmitOutcome | None:
    if isinstance(answer, redis.exceptions.OutOfMemoryError):
        return None
    if isinstance(answer, redis.ResponseError):
        raise as_experience_error(answer) from answer
    if isinstance(answer, Exception):
        raise answer
    outcome = unpack(answer)
    return None if outcome == "no_payload" else SubmitOutcome(outcome)
