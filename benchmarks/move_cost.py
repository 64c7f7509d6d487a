"""What one move of a trajectory costs in CPU: both workers, their doors, sockets and engine clients, everything included.

Two real workers in this process, emulated engines in another. All trajectories of the first are moved to the second and
back, as a release does, while nothing else happens but generation without streams; what the process needs at rest is taken
off.
Used by `benchmarks.repack`; does not count the engines' own work (a destination computes the context anew).
"""

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.emulated_fleet import running_fleet
from laminar.config.root import LaminarConfig

FLAGS: dict[str, object] = {"length-scale": 20.0, "time-factor": 1.0, "step-tokens": 10**6, "stream-interval": 10**6}
"""At most 90 tokens a second and request, which nobody hears of before the next move; no answer ends."""
PROMPT_TOKENS = 2000
"""The 32B answers of the paper have 3,322 tokens on average; half-way there are about so many to send along."""
REST_SECONDS = 0.7


def settings(model: Path, num_groups: int) -> LaminarConfig:
    """Two replicas that swap in flight, so that nothing drains."""
    return LaminarConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "-", "max_prompt_tokens": PROMPT_TOKENS},
            "rewards": [{"kind": "benchmarks.emulated_fleet:one"}],
            "rollout": {
                "num_workers": 2,
                "group_size": 4,
                "max_new_tokens": 50_000,
                "max_in_flight_groups": num_groups,
                "weight_update": "in_flight",
                "engine": {"kind": "emulated", "max_running": 256, "max_cached_tokens": 4_000_000},
            },
            "trainer": {"kind": "emulated", "prompts_per_step": 64},
        }
    )


async def measure_moves(model: Path, folder: Path, seconds: float = 2.5, num_groups: int = 4) -> dict[str, Any]:
    """Move back and forth for a while; CPU milliseconds of one move, and how many there were, of what context."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    async with running_fleet(settings(model, num_groups), folder / run_id, run_id, FLAGS, PROMPT_TOKENS) as fleet:
        async with asyncio.timeout(20):
            while min(len(player.seats) for player in fleet.players) < 4 * num_groups:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        seats = list(fleet.players[0].seats)
        home = seats[0].url
        other = next(iter(fleet.players[1].seats)).url
        cpu, started = time.process_time(), time.monotonic()
        await asyncio.sleep(REST_SECONDS)
        at_rest = (time.process_time() - cpu) / (time.monotonic() - started)
        cpu, started, num_moves = time.process_time(), time.monotonic(), 0
        while time.monotonic() - started < seconds:
            for url in (other, home):
                num_moves += sum(await asyncio.gather(*(seat.move(url) for seat in seats)))
        spent = time.process_time() - cpu - at_rest * (time.monotonic() - started)
        return {
            "move_cpu_milliseconds": spent / max(num_moves, 1) * 1000,
            "num_moves": num_moves,
            "context_tokens": PROMPT_TOKENS,
        }
