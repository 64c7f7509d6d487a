"""A trajectory's seat on another worker's replica: the home's end of the socket.

Invariants: the seat is held as long as the socket stands; a socket that ends gives back what had been streamed, as an
aborted answer, so nothing that was received is sampled again. It knows neither episodes nor plans.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
import numpy as np

from laminar.errors import DeadlineError, EngineError, reason
from laminar.types import FinishReason, Int32Array, SamplingParameters, Segment, WeightVersion
from rollout.berths import SeatRefusedError
from rollout.generation import Generation, OnSegment
from rollout.guest_wire import (
    Abort,
    Answer,
    Ask,
    Failed,
    FromHome,
    FromHost,
    MoveOn,
    Part,
    Refusal,
    Sit,
    Welcome,
    decode_from_host,
    encode,
)

HEARTBEAT_SECONDS = 10.0


class GuestSeat:
    """A seat that was granted; made by `take_seat`.

    Args:
        url: the host's door.
        version: what its engine held at the welcome.
        socket: speaks with the host.
        on_move_on: called with a URL when the host wants to be empty.
        request_seconds: deadline of one answer.
    """

    def __init__(
        self,
        url: str,
        version: WeightVersion,
        socket: aiohttp.ClientWebSocketResponse,
        on_move_on: Callable[[str], None],
        request_seconds: float,
    ) -> None:
        self.url, self.version = url, version
        self._socket, self._on_move_on, self._request_seconds = socket, on_move_on, request_seconds
        self._messages: asyncio.Queue[FromHost | None] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    @property
    def life(self) -> int:
        """A seat ends with its engine."""
        return 0

    @property
    def is_well(self) -> bool:
        """Whether the host is there."""
        return not self._socket.closed and not self._listening.done()

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """Continue `input_ids`, as `Replica.generate`.

        Raises:
            EngineError: the host's engine failed, or the host is gone, before the first part.
            DeadlineError: no answer came in time.
        """
        parts: list[Segment] = []
        try:
            async with asyncio.timeout(self._request_seconds):
                await self._say(Ask.of(request_id, input_ids, sampling, on_segment is not None))
                return await self._await_answer(request_id, parts, on_segment)
        except TimeoutError:
            await self.leave()
            raise DeadlineError(f"the replica at {self.url} to answer a guest", self._request_seconds) from None
        except EngineError:
            if not parts:
                raise
            return Generation(joined(parts), FinishReason.ABORT)

    async def _await_answer(self, request_id: str, parts: list[Segment], on_segment: OnSegment | None) -> Generation:
        while True:
            message = await self._messages.get()
            match message:
                case None:
                    raise EngineError(f"the replica at {self.url} is gone")
                case Part() if message.request_id == request_id:
                    segment = message.segment.segment()
                    parts.append(segment)
                    if on_segment is not None:
                        on_segment(segment)
                case Answer() if message.request_id == request_id:
                    return message.generation()
                case Failed() if message.request_id == request_id:
                    raise EngineError(f"the replica at {self.url}: {message.text}")

    async def abort(self, request_id: str) -> None:
        """End a request; its answer comes.

        Raises:
            EngineError: the host is gone.
        """
        await self._say(Abort(request_id))

    async def leave(self) -> None:
        """Give the seat up; a running request is aborted there. Harmless when repeated."""
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await self._socket.close()

    async def _say(self, message: FromHome) -> None:
        try:
            await self._socket.send_bytes(encode(message))
        except (ConnectionError, aiohttp.ClientError) as error:
            raise EngineError(f"the replica at {self.url} is gone ({reason(error)})") from error

    async def _listen(self) -> None:
        """Sort what the host says. Waits for: messages. Ends with the socket."""
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                word = decode_from_host(message.data)
                if isinstance(word, MoveOn):
                    self._on_move_on(word.url)
                else:
                    self._messages.put_nowait(word)
        finally:
            self._messages.put_nowait(None)


async def take_seat(
    session: aiohttp.ClientSession,
    url: str,
    sit: Sit,
    on_move_on: Callable[[str], None],
    *,
    seconds: float,
    request_seconds: float,
) -> GuestSeat:
    """Ask a replica for a seat.

    Args:
        session: carries the run's token.
        url: the replica's door.
        sit: for what.
        on_move_on: see `GuestSeat`.
        seconds: deadline of the seat.
        request_seconds: deadline of one answer later.

    Raises:
        SeatRefusedError: it has none, or is not there.
    """
    async with contextlib.AsyncExitStack() as undo:
        try:
            async with asyncio.timeout(seconds):
                socket = await session.ws_connect(f"{url}/guest", heartbeat=HEARTBEAT_SECONDS, max_msg_size=0)
                undo.push_async_callback(socket.close)
                await socket.send_bytes(encode(sit))
                word = decode_from_host(await socket.receive_bytes())
        except TimeoutError:
            raise SeatRefusedError(f"{url} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, TypeError, msgspec.DecodeError) as error:
            raise SeatRefusedError(f"{url} is not there: {error!r}") from error
        match word:
            case Welcome(version=version):
                undo.pop_all()
                return GuestSeat(url, WeightVersion.parse(version), socket, on_move_on, request_seconds)
            case Refusal(reason=reason):
                raise SeatRefusedError(f"{url}: {reason}")
            case _:
                raise SeatRefusedError(f"{url} answered {word!r}")


def joined(parts: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same tokens, consecutive ones of one version in one segment; a masked head stays the head of its own."""
    whole: list[Segment] = []
    for part in parts:
        last = whole[-1] if whole else None
        if last is None or last.version != part.version or part.masked_head_tokens:
            whole.append(part)
        else:
            assert last.logprobs is not None
            assert part.logprobs is not None
            ids = np.concatenate([last.token_ids, part.token_ids])
            whole[-1] = Segment(ids, np.concatenate([last.logprobs, part.logprobs]), last.version, last.masked_head_tokens)
    return tuple(whole)
