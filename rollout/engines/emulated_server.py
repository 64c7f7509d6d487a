"""The emulated engine as a process (`python -m rollout.engines.emulated_server`), or many in one.

It speaks the protocol of the others, with the steps, lengths and cache of a large engine, on a share of a core, and without
torch. What it samples has no meaning.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from laminar.simulate.timings import load_lengths, load_step_times
from rollout.engines.command import engine_parser, run_engine
from rollout.engines.door import EngineDoor
from rollout.engines.emulated_engine import EmulatedEngine, EmulatedOptions
from rollout.engines.emulated_loop import EmulatedLoop
from rollout.engines.routes import EngineServer, listening


class EmulatedServer:
    """One engine in this process, on a port of its own: stands in for a process, so that dozens share one event loop.

    Args:
        model: HF checkpoint folder.
        version: name of its weights.
        options: what to pretend.
        time_factor: seconds of the real engine in one second.
        token, run_id: as for `EngineServer`.
        max_arrears_seconds, stream_interval: as for `EmulatedLoop`.
    """

    def __init__(
        self,
        model: Path,
        version: str,
        options: EmulatedOptions,
        *,
        time_factor: float,
        token: str,
        run_id: str,
        max_arrears_seconds: float = 1.0,
        stream_interval: int = 1,
    ) -> None:
        self.engine = EmulatedEngine(model, version, options)
        self._time_factor, self._token, self._run_id = time_factor, token, run_id
        self._max_arrears, self._stream_interval = max_arrears_seconds, stream_interval
        self._stack = AsyncExitStack()
        self.returncode: int | None = None

    async def start(self) -> str:
        """Listen; returns the URL."""
        self.loop = EmulatedLoop(
            self.engine,
            self._time_factor,
            max_arrears_seconds=self._max_arrears,
            stream_interval=self._stream_interval,
        )
        server = EngineServer(self.loop, token=self._token, run_id=self._run_id)
        return await self._stack.enter_async_context(listening(server, "127.0.0.1", 0))

    async def kill(self) -> None:
        """End as a killed process does: connections break, nothing is answered."""
        if self.returncode is None:
            self.returncode = -9
            await self.loop.stop()
            await self._stack.aclose()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the emulated engine takes beside the common flags."""
    parser.add_argument("--latency", default="32B_TP4", help="whose decode steps, of the paper's figure 4")
    parser.add_argument("--lengths", default="32B_math", help="whose answer lengths, of the paper's figure 17")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--time-factor", type=float, default=1.0, help="seconds of the real engine in one second")
    parser.add_argument("--token-scale", type=int, default=1, help="tokens of the real engine that one of ours stands for")
    parser.add_argument("--step-tokens", type=int, default=1, help="most tokens that one wake-up gives everybody")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens that a stream's reader hears of at once")
    parser.add_argument("--prefill-tokens-per-second", type=float, default=30_000.0, help="context computed, real tokens")


def as_options(flags: argparse.Namespace) -> EmulatedOptions:
    """The engine that the flags describe."""
    return EmulatedOptions(
        times=load_step_times(flags.latency),
        lengths=load_lengths(flags.lengths, flags.length_scale / flags.token_scale),
        max_running=flags.max_running,
        max_cached_tokens=flags.max_cached_tokens,
        prefill_tokens_per_second=flags.prefill_tokens_per_second,
        token_scale=flags.token_scale,
        step_tokens=flags.step_tokens,
    )


def make_door(flags: argparse.Namespace, on_crash: Callable[[BaseException], None]) -> EngineDoor:
    """Make the engine and start its steps."""
    engine = EmulatedEngine(flags.model, flags.weight_version, as_options(flags))
    return EmulatedLoop(engine, flags.time_factor, on_crash, stream_interval=flags.stream_interval)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = engine_parser("rollout.engines.emulated_server")
    add_flags(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Entry point; returns the exit code."""
    return run_engine(parse(sys.argv[1:]), make_door)


if __name__ == "__main__":
    raise SystemExit(main())
