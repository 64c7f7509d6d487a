"""The torch engine as a process: `python -m rollout.engines.server --model PATH --weight-version 0.0`."""

import argparse
import asyncio
import sys
from collections.abc import Callable

import torch

from rollout.engines.command import engine_parser, run_engine
from rollout.engines.door import EngineDoor
from rollout.engines.engine_loop import EngineLoop
from rollout.engines.torch_engine import EngineOptions, TorchEngine


def make_door(options: argparse.Namespace, on_crash: Callable[[BaseException], None]) -> EngineDoor:
    """Load the model and start the engine's thread."""
    torch.set_num_threads(options.threads)
    limits = EngineOptions(
        options.max_running, options.max_cached_tokens, options.max_prefill_tokens, batch_invariant=options.batch_invariant
    )
    engine = TorchEngine(options.model, options.weight_version, limits)
    return EngineLoop(engine, asyncio.get_running_loop(), on_crash)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = engine_parser("rollout.engines.server")
    parser.add_argument("--batch-invariant", action="store_true", help="same numbers however many requests run")
    return run_engine(parser.parse_args(sys.argv[1:]), make_door)


if __name__ == "__main__":
    raise SystemExit(main())
