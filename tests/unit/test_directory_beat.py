"""A heartbeat ends with its task, though the client loses a cancellation (CPython issue 86296)."""

import asyncio
import contextlib

import pytest

from laminar.directory import ReplicaDirectory, ReplicaEntry


class Losing:
    """A client whose pipeline swallows the cancellation that comes while it sends."""

    def __init__(self):
        self.sending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def pipeline(self, transaction):
        yield self

    def sadd(self, *arguments):
        return None

    def set(self, *arguments, **options):
        return None

    async def execute(self):
        self.sending.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def test_a_cancelled_beat_is_cancelled_whatever_the_client_makes_of_it():
    client = Losing()
    entry = ReplicaEntry("rollout-0", "", "0.0", "0.0", False, 0, 1, 0, 0, 0, 0)
    beat = asyncio.create_task(ReplicaDirectory(client, "run").beat(entry))
    await client.sending.wait()
    beat.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beat
