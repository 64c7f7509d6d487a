"""What do episodes and the gateway cost? `python -m benchmarks.agentic [--quick]`.

The engine is emulated in a process of its own: it speaks the engine protocol over HTTP and answers with random tokens. The
measuring process is pinned to one core.

- episodes: 256 at once, chats of four turns with a tool's answer between them, in which the environment takes as long as the
  paper's sandboxes (figure 2, quantiles from 8 s to 574 s), scaled down a thousandfold. CPU seconds of the measuring process
  (episode, client, tokens, the harness included) over sampled turns. Bar: 2 ms a turn. This is the printed value.
- gateway: one chat through the gateway, over HTTP, less the same request to the engine through `EngineClient`, one after the
  other, order alternated, medians. Bar: 3 ms.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from laminar.types import ClaimedGroup, Message, Prompt, SamplingParameters
from rollout.clock import EpisodeClock
from rollout.conversations import Conversations
from rollout.engines.client import EngineClient
from rollout.engines.wire import Output
from rollout.environments.base import Observation, StepResult
from rollout.episode import play_episode
from rollout.gateway import Gateway, Session
from rollout.rewards.scorer import RewardScorer, Term
from rollout.tiny_tools import TEMPLATE
from rollout.tokens import HuggingFaceTokenizer
from rollout.tools.calls import parse_hermes

MODEL = Path("models/smollm2-135m")
NUM_AT_ONCE, NUM_TURNS, TURN_TOKENS = 256, 4, 64
QUANTILES = (
    (0.0, 8.0),
    (0.1, 8.0),
    (0.25, 10.7),
    (0.5, 21.4),
    (0.75, 47.6),
    (0.9, 144.0),
    (0.95, 236.0),
    (0.99, 395.0),
    (1.0, 574.0),
)
SCALE = 1e-3
BAR_TURN_SECONDS, BAR_GATEWAY_SECONDS = 2e-3, 3e-3
QUESTION = "How many bridges cross the river between the two towns, and which is the oldest of them?"
TOOL_RESULT = "The register lists seven bridges; the oldest was built in 1786 and is closed to cars."


def serve_engine(told: Connection) -> None:
    """The emulated engine's process: random printable ids, log-prob -1, version 0.0."""
    draw = random.Random(0)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        output = Output(body["rid"], len(body["input_ids"]))
        for _ in range(min(TURN_TOKENS, body["sampling_params"]["max_new_tokens"])):
            output.append(draw.randrange(200, 40_000), -1.0, "0.0")
        output.finish_reason = {"type": "stop"}
        return web.json_response(output.answer("0.0"))

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(runner.addresses[0][1])
        await asyncio.to_thread(told.poll, None)  # until the benchmark ends

    asyncio.run(main())


@contextlib.contextmanager
def emulated_engine() -> Iterator[str]:
    """The URL of an engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_engine, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        theirs.close()
        process.terminate()
        process.join()


def sandbox_seconds(draw: random.Random) -> float:
    """A latency of the paper's sandboxes, scaled down."""
    points, seconds = zip(*QUANTILES, strict=True)
    return float(np.interp(draw.random(), points, seconds)) * SCALE


class Sandbox:
    """A chat with a tool that takes its time."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._turn = draw, 0

    async def reset(self, prompt: Prompt) -> Observation:
        """The question."""
        return Observation((Message("user", QUESTION),))

    async def step(self, completion: str) -> StepResult:
        """The tool's answer, later."""
        self._turn += 1
        await asyncio.sleep(sandbox_seconds(self._draw))
        if self._turn == NUM_TURNS:
            return StepResult(done=True, reward_terms={"done": 1.0})
        return StepResult(done=False, observation=Observation((Message("tool", TOOL_RESULT),)))

    async def close(self) -> None:
        """Nothing is held."""


async def play_all(client: EngineClient, tokenizer: HuggingFaceTokenizer, count: int) -> tuple[float, int]:
    """CPU seconds and turns of `count` episodes, at most `NUM_AT_ONCE` at a time."""
    places, draw = asyncio.Semaphore(NUM_AT_ONCE), random.Random(1)
    scorer = RewardScorer([Term("length", count_turns)])

    async def play(index: int) -> int:
        async with places:
            trajectory = await play_episode(
                group=ClaimedGroup(str(index), index, Prompt("p", QUESTION), (0,), 0),
                member=0,
                attempt=0,
                engine=client,
                make_environment=lambda: Sandbox(draw),
                scorer=scorer,
                tokenizer=tokenizer,
                sampling=SamplingParameters(1.0, NUM_TURNS * TURN_TOKENS, 0),
                run_seed=0,
                wall_seconds=60,
            )
            assert trajectory.failure is None, trajectory.failure
            return len(trajectory.turns)

    begin = time.process_time()
    turns = await asyncio.gather(*[play(index) for index in range(count)])
    return time.process_time() - begin, sum(turns)


async def count_turns(prompt: Prompt, completion: str) -> float:
    """A reward that costs nothing."""
    return float(bool(completion))


async def measure_gateway(
    client: EngineClient, tokenizer: HuggingFaceTokenizer, count: int
) -> tuple[list[float], list[float]]:
    """Seconds of chats, ascending: through the gateway, and of the same requests to the engine."""
    through, direct = [], []
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TURN_TOKENS}
    ids = tokenizer.encode((Message("user", QUESTION),))
    sampling = SamplingParameters(1.0, TURN_TOKENS, 0)
    gateway = Gateway()
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        for index in range(count):
            session = Session(Conversations(client, tokenizer, sampling), parse_hermes, EpisodeClock(60))
            with gateway.open(session) as key:
                for which in ("gateway", "direct") if index % 2 else ("direct", "gateway"):
                    begin = time.perf_counter()
                    if which == "direct":
                        await client.generate(ids, sampling, f"{index:032d}")
                        direct.append(time.perf_counter() - begin)
                        continue
                    head = {"Authorization": f"Bearer {key}"}
                    async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=head) as response:
                        assert response.status == 200, await response.text()
                        await response.json()
                    through.append(time.perf_counter() - begin)
    await gateway.close()
    return sorted(through), sorted(direct)


def make_tokenizer() -> tuple[HuggingFaceTokenizer, str]:
    """SmolLM2's tokenizer, or a small byte-level one where that has not been made."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if MODEL.is_dir():
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(MODEL), "smollm2"), "smollm2-135m"
    from tokenizers import ByteLevelBPETokenizer

    small = ByteLevelBPETokenizer()
    small.train_from_iterator(
        [QUESTION, TOOL_RESULT] * 100, vocab_size=40_000, special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=small._tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return HuggingFaceTokenizer(fast, "bytes"), "byte-level"


async def measure(url: str, num_episodes: int, num_calls: int) -> dict[str, Any]:
    """All figures."""
    tokenizer, name = make_tokenizer()
    client = EngineClient(url, token="")
    try:
        await play_all(client, tokenizer, 8)  # connections, caches
        seconds, turns = await play_all(client, tokenizer, num_episodes)
        through, direct = await measure_gateway(client, tokenizer, num_calls)
    finally:
        await client.close()
    return {
        "cpu_seconds_per_turn": seconds / turns,
        "turns": turns,
        "episodes": num_episodes,
        "at_once": NUM_AT_ONCE,
        "gateway_p50_seconds": statistics.median(through),
        "direct_p50_seconds": statistics.median(direct),
        "gateway_overhead_p50_seconds": statistics.median(through) - statistics.median(direct),
        "gateway_overhead_p10_seconds": through[len(through) // 10] - direct[len(direct) // 10],
        "tokenizer": name,
    }


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description="Measure what episodes and the gateway cost.")
    parser.add_argument("--quick", action="store_true", help="fewer episodes and calls")
    arguments = parser.parse_args()
    with emulated_engine() as url:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        figures = asyncio.run(measure(url, 512 if arguments.quick else 4096, 200 if arguments.quick else 2000))
    holds = {
        "episodes": figures["cpu_seconds_per_turn"] <= BAR_TURN_SECONDS,
        "gateway": figures["gateway_overhead_p50_seconds"] <= BAR_GATEWAY_SECONDS,
    }
    result = {
        "name": "agentic",
        "value": figures["cpu_seconds_per_turn"],
        "unit": "CPU s per turn",
        "bar": {"episodes": BAR_TURN_SECONDS, "gateway": BAR_GATEWAY_SECONDS},
        "holds": all(holds.values()),
        "holds_each": holds,
        "load": os.getloadavg()[0],
        **figures,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
