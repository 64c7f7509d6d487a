"""The relay as the supervisor starts it: a role, made of the run's settings, that tells what each broadcast cost.

Invariant: a lost Redis costs telemetry, never weights.
Does not know stores or hops (`relay.server`).
"""

import asyncio
import contextlib
from pathlib import Path

from laminar.allocator import keep_freed_memory
from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.config.sizes import is_one_machine, published_bytes, read_model_size
from laminar.errors import EnvironmentSetupError
from laminar.experience.client import connect
from laminar.plugins import resolve
from laminar.telemetry.clock import StateClock, report_clock
from laminar.telemetry.stream import TelemetryWriter
from relay.directory import RelayStatus
from relay.link import Credentials
from relay.receiver import HopReport
from relay.server import Chained, Relay
from relay.store import open_store
from relay.transports.base import TRANSPORTS

KEPT_PIECES_BYTES = 1024**3
"""Memory of received pieces that is reused: with pieces of 4 MB, receiving 256 MB takes 0.14 instead of 0.22 CPU seconds."""
CONNECT_AGAIN_SECONDS = 5.0


class RelayRole:
    """The relay as the supervisor starts it.

    Args:
        context: the process's surroundings.
        config: the run's settings.
        is_master: whether trainer rank 0 is on this machine.
    """

    def __init__(self, context: RoleContext, config: LaminarConfig, is_master: bool = True) -> None:
        self._config, self._context = config, context
        self._reports: asyncio.Queue[HopReport] = asyncio.Queue()
        self._clock = StateClock("start")
        store = open_store(config, context.run_id, context.node_id)
        self._relay = Relay(store, context.redis_url, self._chained(context, is_master))

    def _chained(self, context: RoleContext, is_master: bool) -> Chained | None:
        """How this relay takes part in the chain; None where Ray was started for this machine alone."""
        if is_one_machine(self._config):
            return None
        device = {"device": "cuda:0"} if self._config.relay.num_gpus else {}  # Ray shows a role its own GPU only
        transport = resolve(self._config.relay.transport, TRANSPORTS, "relay.transport")(context.node_address, **device)
        credentials = Credentials(context.run_id, context.node_id, context.token)
        return Chained(transport, credentials, is_master, report=self._reports.put_nowait)

    async def start(self) -> None:
        """Own the store; refuse a machine that cannot hold the weights, as `Relay.start`."""
        keep_freed_memory(KEPT_PIECES_BYTES)
        size = read_model_size(Path(self._config.model.path))
        await self._relay.start(published_bytes(self._config, size) if size else 0)

    async def run(self) -> None:
        """Beat, make room, receive and pass on until `stop`."""
        async with asyncio.TaskGroup() as group:
            telling = [
                group.create_task(tell_reports(self._reports, self._context)),
                group.create_task(tell_clock(self._clock, self._context)),
            ]
            self._clock.enter("serve")
            await self._relay.run()
            for task in telling:
                task.cancel()

    async def status(self) -> RelayStatus:
        """What the store holds now."""
        return await self._relay.status()

    async def stop(self) -> None:
        """End `run`; the versions stay for whoever still reads."""
        await self._relay.stop()

    async def remove(self) -> None:
        """End `run` and free the machine's memory: the orderly end of the run, after trainer and engines."""
        await self._relay.remove()


async def tell_clock(clock: StateClock, context: RoleContext) -> None:
    """Say twice a second that the relay lives, and what it does, until cancelled; without Redis nobody is told."""
    while True:
        with contextlib.suppress(EnvironmentSetupError):
            await report_clock(clock, TelemetryWriter(await connect(context.redis_url), context.run_id, context.role))
        await asyncio.sleep(CONNECT_AGAIN_SECONDS)


async def tell_reports(reports: "asyncio.Queue[HopReport]", context: RoleContext) -> None:
    """Send what every received version cost to the observer, until cancelled; without Redis it is not told."""
    writer: TelemetryWriter | None = None
    while True:
        report = await reports.get()
        if writer is None:
            with contextlib.suppress(EnvironmentSetupError):
                writer = TelemetryWriter(await connect(context.redis_url), context.run_id, context.role)
        if writer is not None:
            await writer.emit("relay", broadcast_metrics(report))


def broadcast_metrics(report: HopReport) -> dict[str, float]:
    """The metrics of one received version."""
    return {
        "weights/broadcast_seconds": report.seconds,
        "weights/broadcast_bytes": report.bytes,
        "weights/broadcast_bytes_per_second": report.bytes / max(report.seconds, 1e-9),
        "weights/broken_pieces": report.broken,
    }
