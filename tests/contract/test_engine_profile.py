"""What the worker relies on, whichever engine it is: one suite, run on every kind through `EngineClient`.

Your own kind: `LAMINAR_ENGINE_KIND=package.module:Attr pytest tests/contract/test_engine_profile.py -k yours`. `not_on`
marks what a kind does otherwise; the reasons are the table "What differs" of rollout/engines/README.md.
"""

import asyncio
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from aiohttp import ClientSession
from safetensors.torch import load_file, save_file

from laminar.errors import DeadlineError, EngineError
from laminar.simulate.timings import load_lengths
from laminar.types import FinishReason, SamplingParameters, WeightVersion
from rollout.engines.client import BrokenAnswerError, EngineClient
from rollout.engines.emulated_model import EmulatedModel
from rollout.engines.launch import EngineLaunch, engine_kind
from rollout.engines.process import EngineProcess
from rollout.engines.tiny_model import write_tiny_model

PROMPT = np.array([5, 9, 17, 33, 64, 3, 80, 11], np.int32)
TOKEN, RUN = "secret", "run-1"
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
SGLANG_PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"


@dataclass
class Engine:
    """A running engine and how to reach it."""

    url: str
    process: EngineProcess
    kind: str = "torch"
    first_weights: Path | None = None

    @property
    def traits(self) -> set[str]:
        return {self.kind, "checks files" if self.first_weights is None else "is checked by the client"}

    def client(self, **changes) -> EngineClient:
        settings = {"token": TOKEN, "run_id": RUN, "version": V0, "request_seconds": 60.0, "control_seconds": 30.0}
        return EngineClient(self.url, first_weights=self.first_weights, **(settings | changes))


def launch(model: Path, log: Path, **settings) -> EngineLaunch:
    return EngineLaunch(model, V0, TOKEN, RUN, log, max_running=8, max_cached_tokens=8192, **settings)


@asynccontextmanager
async def torch_engine(model: Path, log: Path) -> AsyncIterator[Engine]:
    process = EngineProcess(launch(model, log))
    try:
        yield Engine(await process.start(60), process)
    finally:
        await process.kill()


@asynccontextmanager
async def emulated_engine(model: Path, log: Path) -> AsyncIterator[Engine]:
    pace = {"latency": "7B_TP4", "length-scale": 0.01, "time-factor": 4.0}
    process = EngineProcess(launch(model, log, kind="emulated", options=pace))
    try:
        yield Engine(await process.start(60), process, "emulated")
    finally:
        await process.kill()


@asynccontextmanager
async def sglang_engine(model: Path, log: Path) -> AsyncIterator[Engine]:
    process = EngineProcess(launch(model, log, kind="sglang", python=str(SGLANG_PYTHON), dtype="float32"))
    try:
        yield Engine(await process.start(400), process, "sglang", first_weights=model)
    finally:
        await process.kill()


@asynccontextmanager
async def own_engine(model: Path, log: Path) -> AsyncIterator[Engine]:
    process = EngineProcess(launch(model, log, kind=OWN_KIND))
    first_weights = None if engine_kind(OWN_KIND).checks_weights else model
    try:
        yield Engine(await process.start(400), process, "yours", first_weights)
    finally:
        await process.kill()


OWN_KIND = os.environ.get("LAMINAR_ENGINE_KIND", "")
KINDS: dict[str, Callable] = {
    "torch": torch_engine,
    "emulated": emulated_engine,
    "sglang": sglang_engine,
    **({"yours": own_engine} if OWN_KIND else {}),
}
NEEDS_SGLANG = (pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs `make sglang-cpu`"))


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return [write_tiny_model(root / f"w{i}", scale=1.05**i) for i in range(3)]


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=NEEDS_SGLANG if kind == "sglang" else ()) for kind in KINDS]
)
def shared(request, versions, tmp_path_factory):
    """One engine for all tests that leave it as they found it (weights 0, running)."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        context = KINDS[request.param](versions[0], tmp_path_factory.mktemp("logs") / "engine.log")
        engine = runner.run(stack.enter_async_context(context))
        yield engine
        runner.run(stack.aclose())


@pytest.fixture(autouse=True)
def skip_what_differs(request):
    for mark in request.node.iter_markers("not_on"):
        if "shared" in request.fixturenames and mark.args[0] in request.getfixturevalue("shared").traits:
            pytest.skip(mark.args[1])


@pytest.fixture
async def client(shared, versions):
    client = shared.client()
    yield client
    await client.resume()
    if await client.weight_version() != V0:
        await client.pause("abort")
        await client.update_weights(versions[0], V0, flush_cache=True)
        await client.resume()
    await client.close()


def sampling(new=6, seed=0, temperature=1.0, **more):
    return SamplingParameters(temperature, new, seed, **more)


def new_id():
    return uuid.uuid4().hex


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"waited 20 s for {what}, in vain")


def expected_logprobs(shared, folder, prompt, output):
    """What the weights in a folder give; the emulated engine's weights are a fingerprint."""
    if shared.kind != "emulated":
        return reference_logprobs(folder, prompt, output)
    positions = np.arange(len(prompt), len(prompt) + len(output))
    return EmulatedModel(folder, load_lengths("32B_math")).logprobs(output.astype(np.int64), positions).tolist()


def reference_logprobs(folder, prompt, output, temperature=1.0):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt.tolist(), *output.tolist()]])).logits[0].double() / temperature
    lines = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [lines[i, token].item() for i, token in enumerate(output)]


@pytest.mark.not_on("emulated", "has no model, so no distribution: log-probs are a function of weights, token and position")
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
async def test_logprobs_are_those_of_a_plain_forward_at_the_sampling_temperature(client, versions, temperature):
    answer = await client.generate(PROMPT, sampling(12, temperature=temperature), new_id())
    ids = answer.token_ids()
    assert answer.segments[0].version == V0
    expected = reference_logprobs(versions[0], PROMPT, ids, temperature)
    assert answer.segments[0].logprobs.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.not_on("emulated", "has no model, so no distribution: log-probs are a function of weights, token and position")
async def test_logprobs_are_those_before_top_k_and_top_p_cut_the_distribution(client, versions):
    answer = await client.generate(PROMPT, sampling(12, temperature=1.2, top_k=5, top_p=0.9), new_id())
    expected = reference_logprobs(versions[0], PROMPT, answer.token_ids(), 1.2)
    assert answer.segments[0].logprobs.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.not_on("emulated", "has no model, so no distribution: log-probs are a function of weights, token and position")
async def test_greedy_takes_the_best_token_and_reports_untempered_logprobs(client, versions):
    answer = await client.generate(PROMPT, sampling(5, temperature=0.0), new_id())
    expected = reference_logprobs(versions[0], PROMPT, answer.token_ids())
    assert answer.segments[0].logprobs.tolist() == pytest.approx(expected, abs=1e-4)


async def test_many_requests_at_once_are_all_answered_and_siblings_share_their_prompt(client):
    prompt = np.arange(10, 60, dtype=np.int32)
    answers = await asyncio.gather(*[client.generate(prompt, sampling(10, seed), new_id()) for seed in range(40)])
    assert all(answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for answer in answers)
    assert len({tuple(answer.token_ids()) for answer in answers}) > 35
    assert sum(answer.cached_tokens > 0 for answer in answers) >= 30


async def test_a_streamed_answer_is_the_same_and_comes_in_parts(client):
    parts = []
    whole = await client.generate(PROMPT, sampling(9, temperature=0.0), new_id())
    streamed = await client.generate(PROMPT, sampling(9, temperature=0.0), new_id(), parts.append)
    assert streamed.token_ids().tolist() == whole.token_ids().tolist()
    assert streamed.segments[0].logprobs == pytest.approx(whole.segments[0].logprobs, abs=1e-5)
    assert [token for part in parts for token in part.token_ids] == whole.token_ids().tolist()
    assert len(parts) > 1
    assert {part.version for part in parts} == {V0}


async def test_stop_ids_of_the_request_and_of_the_model_end_an_answer(client):
    answers = await asyncio.gather(
        *[client.generate(PROMPT, sampling(80, seed, stop_token_ids=(7,)), new_id()) for seed in range(16)]
    )
    ends = {int(answer.token_ids()[-1]) for answer in answers if answer.finish_reason is FinishReason.STOP}
    assert ends == {2, 7}
    assert all(answer.num_tokens == 80 for answer in answers if answer.finish_reason is FinishReason.LENGTH)


async def test_abort_returns_the_partial_answer(client):
    for _ in range(20):  # a fast engine may be at the end before the abort comes
        rid, seen = new_id(), asyncio.Event()
        task = asyncio.create_task(client.generate(PROMPT, never_ending(1500), rid, lambda *_, seen=seen: seen.set()))
        await asyncio.wait_for(seen.wait(), 20)
        await client.abort(rid)
        answer = await task
        if answer.num_tokens < 1500:
            break
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < answer.num_tokens < 1500
    again = await client.generate(PROMPT, never_ending(answer.num_tokens), new_id())
    assert again.token_ids().tolist() == answer.token_ids().tolist()
    assert again.segments[0].logprobs == pytest.approx(answer.segments[0].logprobs, abs=1e-5)


def never_ending(new, seed=0):
    """Greedy on these weights runs into a loop without an end id."""
    return sampling(new, seed, temperature=0.0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_of_another_client_during_a_pause_is_answered_by_the_new_weights(shared, client, versions, mode):
    """The other client does not know of the pause: its request waits in the engine, under the key of the old weights."""
    other = shared.client(swap=mode)
    await other.generate(PROMPT, sampling(4), new_id())
    await client.pause(mode)
    waiting = asyncio.create_task(other.generate(PROMPT, sampling(6, temperature=0.0), new_id()))
    await client.update_weights(versions[1], V1, flush_cache=mode == "retract")
    assert not waiting.done()
    await client.resume()
    (segment,) = (await waiting).segments
    await other.close()
    assert segment.version == V1
    if mode == "retract":
        expected = expected_logprobs(shared, versions[1], PROMPT, segment.token_ids)
        assert segment.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    else:
        assert segment.masked_head_tokens == 1


async def test_requests_during_a_pause_are_queued_and_answered_later(client):
    await client.pause("in_place")
    tasks = [asyncio.create_task(client.generate(PROMPT, sampling(5, seed), new_id())) for seed in range(4)]

    async def all_waiting():
        return (await client.loads()).waiting == 4

    await eventually(all_waiting, "queued requests")
    assert not any(task.done() for task in tasks)
    await client.resume()
    answers = await asyncio.gather(*tasks)
    assert all(answer.num_tokens > 0 for answer in answers)


async def test_closing_a_client_fails_the_requests_that_it_holds(shared, client):
    leaving = shared.client()
    await leaving.pause("in_place")
    task = asyncio.create_task(leaving.generate(PROMPT, sampling(), new_id()))

    async def waiting():
        return (await leaving.loads()).waiting == 1

    await eventually(waiting, "a held request")
    await leaving.close()
    with pytest.raises(EngineError, match="was closed"):
        await task


async def test_closing_a_client_fails_its_answers_on_their_way_and_keeps_what_had_come(shared, client):
    """A reader of a closed session would wait until the request's deadline, ten minutes."""
    leaving = shared.client()
    for _ in range(20):  # a fast engine may be at the end before we are told of the beginning
        seen = asyncio.Event()
        task = asyncio.create_task(leaving.generate(PROMPT, never_ending(1500), new_id(), lambda *_, seen=seen: seen.set()))
        await asyncio.wait_for(seen.wait(), 20)
        await client.pause("in_place")
        done, _ = await asyncio.wait({task}, timeout=0.2)
        if not done:
            break
        await client.resume()
    await leaving.close()
    with pytest.raises(BrokenAnswerError, match="was closed") as caught:
        await asyncio.wait_for(task, 20)
    await client.resume()
    assert caught.value.received.num_tokens > 0
    await eventually(lambda: nothing_left(client), "an empty engine")


async def test_an_abort_of_a_queued_request_returns_nothing_sampled_also_during_a_pause(client):
    await client.pause("in_place")
    rid = new_id()
    task = asyncio.create_task(client.generate(PROMPT, sampling(), rid))

    async def waiting():
        return (await client.loads()).waiting == 1

    await eventually(waiting, "a queued request")
    await client.abort(rid)
    answer = await task
    assert (answer.segments, answer.finish_reason) == ((), FinishReason.ABORT)


@pytest.mark.parametrize(("mode", "masked"), [("retract", 0), ("in_place", 1)])
async def test_live_requests_survive_a_swap_with_one_change_of_version(shared, client, versions, mode, masked):
    """Cases D13; the mask of an in-place swap falls on the first token of the later span."""
    swapping = shared.client(swap=mode)
    started = asyncio.Event()
    tasks = [
        asyncio.create_task(swapping.generate(PROMPT + i, never_ending(120), new_id(), lambda *_: started.set()))
        for i in range(16)
    ]
    await asyncio.wait_for(started.wait(), 20)
    await client.pause(mode)
    await client.update_weights(versions[1], V1, flush_cache=mode == "retract")
    assert await client.weight_version() == V1
    await client.resume()
    answers = await asyncio.gather(*tasks)
    await swapping.close()
    assert all(answer.finish_reason is not FinishReason.ABORT for answer in answers)
    changed = [answer for answer in answers if len(answer.segments) == 2]
    assert changed
    for answer in changed:
        assert [segment.version for segment in answer.segments] == [V0, V1]
        assert [segment.masked_head_tokens for segment in answer.segments] == [0, masked]
    assert all(answer.num_tokens == 120 for answer in answers if answer.finish_reason is FinishReason.LENGTH)


async def test_an_interrupted_answer_is_resumed_within_its_budget(shared, client, versions):
    """Cases D12: parts at two versions, each log-prob as received, the budget lowered by what is there."""
    budget, ids, logprobs, numbers = 400, [], [], []
    for part, version in enumerate((V0, V1)):
        if part:
            await client.pause("abort")
            await client.update_weights(versions[1], V1, flush_cache=True)
            await client.resume()
        rid, seen = new_id(), asyncio.Event()
        context = np.concatenate([PROMPT, np.array(ids, np.int32)])
        task = asyncio.create_task(
            client.generate(context, never_ending(budget - len(ids)), rid, lambda *_, e=seen: e.set())
        )
        if part == 0:
            await asyncio.wait_for(seen.wait(), 20)
            await client.abort(rid)
        answer = await task
        ids += answer.token_ids().tolist()
        logprobs += [value for segment in answer.segments for value in segment.logprobs.tolist()]
        numbers += [version.number] * answer.num_tokens
    first = numbers.count(0)
    assert 0 < first < len(ids) <= budget
    assert len(ids) == len(logprobs)
    expected = expected_logprobs(shared, versions[0], PROMPT, np.array(ids))[:first]
    expected += expected_logprobs(shared, versions[1], PROMPT, np.array(ids))[first:]
    assert logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_live_engine_equals_a_fresh_one_after_an_update(shared, client, versions, tmp_path):
    """Cases D14: no cached prefix of other weights."""
    prompt = np.arange(3, 103, dtype=np.int32)
    greedy = sampling(8, temperature=0.0)
    old = await client.generate(prompt, greedy, new_id())
    await client.pause("retract")
    await client.update_weights(versions[2], V1, flush_cache=True)
    await client.resume()
    live = await client.generate(prompt, greedy, new_id())
    expected = expected_logprobs(shared, versions[2], prompt, live.token_ids())
    assert live.cached_tokens == 0
    assert live.segments[0].logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    pairs = zip(live.segments[0].logprobs, old.segments[0].logprobs, strict=False)
    assert max(abs(a - b) for a, b in pairs) > 1e-3


async def test_given_tokens_are_scored_by_the_weights_that_are_served(shared, client, versions):
    ids = np.array([5, 9, 90, 17, 4, 33, 100, 64], np.int32)
    version, scored = await client.score(ids.tolist())
    assert version == V0
    assert scored == pytest.approx(expected_logprobs(shared, versions[0], ids[:1], ids[1:]), abs=1e-4)


@pytest.mark.not_on("sglang", "honours seeds with deterministic inference only, which has no attention backend on this CPU")
async def test_the_same_seed_gives_the_same_answer_and_another_seed_another(client):
    """Cases D30."""
    first = [await client.generate(PROMPT, sampling(12, seed), new_id()) for seed in range(6)]
    again = await asyncio.gather(*[client.generate(PROMPT, sampling(12, seed), new_id()) for seed in range(6)])
    assert [a.token_ids().tolist() for a in first] == [a.token_ids().tolist() for a in again]
    assert len({tuple(a.token_ids()) for a in first}) == 6


@pytest.mark.not_on("is checked by the client", "is shown no broken file, and the weights stay known")
async def test_a_failed_update_leaves_the_weights_unknown_until_a_full_one_succeeds(shared, client, versions, tmp_path):
    other = shared.client()
    (tmp_path / "model.safetensors").write_bytes((versions[1] / "model.safetensors").read_bytes()[:-100])
    await client.pause("retract")
    with pytest.raises(EngineError, match="not a whole safetensors file"):
        await client.update_weights(tmp_path, V1, flush_cache=True)
    with pytest.raises(EngineError, match="unknown"):
        await client.weight_version()
    with pytest.raises(EngineError, match="unknown"):
        await other.generate(PROMPT, sampling(), new_id())
    await other.close()
    await client.update_weights(versions[1], V1, flush_cache=True)
    await client.resume()
    assert (await client.generate(PROMPT, sampling(), new_id())).segments[0].version == V1


@pytest.mark.not_on("checks files", "checks files itself; see the test above")
@pytest.mark.parametrize("fault", ["truncated", "a tensor is missing"])
async def test_a_file_that_would_harm_the_engine_is_kept_from_it_and_it_serves_on(shared, client, versions, tmp_path, fault):
    whole = versions[1] / "model.safetensors"
    broken = tmp_path / "model.safetensors"
    if fault == "truncated":
        broken.write_bytes(whole.read_bytes()[:-100])
    else:
        tensors = load_file(whole)
        tensors.pop("model.norm.weight")
        save_file(tensors, broken)
    await client.pause("retract")
    with pytest.raises(EngineError, match=r"not a whole safetensors file|missing .*norm"):
        await client.update_weights(tmp_path, V1, flush_cache=True)
    await client.resume()
    answer = await client.generate(PROMPT, sampling(4, temperature=0.0), new_id())
    assert answer.segments[0].logprobs.tolist() == pytest.approx(
        expected_logprobs(shared, versions[0], PROMPT, answer.token_ids()), abs=1e-4
    )


async def test_an_update_under_running_requests_is_refused_with_the_remedy(client, versions):
    rid, seen = new_id(), asyncio.Event()
    task = asyncio.create_task(client.generate(PROMPT, never_ending(1500), rid, lambda *_: seen.set()))
    await asyncio.wait_for(seen.wait(), 20)
    with pytest.raises(EngineError, match="pause generation"):
        await client.update_weights(versions[1], V1, flush_cache=True)
    await client.abort(rid)
    await task


async def test_a_request_that_can_never_fit_is_refused_in_words(client):
    with pytest.raises(EngineError, match="exceed"):
        await client.generate(PROMPT, sampling(100_000), new_id())


async def test_an_answer_that_takes_too_long_is_aborted_and_named(shared, client):
    hasty = shared.client(request_seconds=0.05)
    await client.pause("in_place")
    with pytest.raises(DeadlineError, match="/generate"):
        await hasty.generate(PROMPT, sampling(), new_id())
    await hasty.close()
    await client.resume()
    await eventually(lambda: nothing_left(client), "an empty engine")


async def nothing_left(client):
    load = await client.loads()
    return (load.running, load.waiting) == (0, 0)


async def test_a_caller_that_goes_away_frees_the_engine(shared, client):
    leaving = shared.client()
    seen = asyncio.Event()
    task = asyncio.create_task(leaving.generate(PROMPT, never_ending(1900), new_id(), lambda *_: seen.set()))
    await asyncio.wait_for(seen.wait(), 20)
    task.cancel()
    await asyncio.wait([task])
    await eventually(lambda: nothing_left(client), "an empty engine")
    await leaving.close()


async def test_calls_without_the_token_are_refused(shared):
    async with ClientSession() as session:
        guarded = ("/v1/loads", "/model_info") if shared.kind == "sglang" else ("/v1/loads", "/model_info", "/health")
        for path in guarded:
            async with session.get(shared.url + path) as response:
                assert response.status == 401
    stranger = shared.client(token="guess")
    with pytest.raises(EngineError, match="token"):
        await stranger.generate(PROMPT, sampling(), new_id())
    await stranger.close()


@pytest.mark.not_on("sglang", "knows no runs; the run's token keeps others out")
async def test_another_run_may_not_change_the_weights(shared, client, versions):
    stranger = shared.client(run_id="run-2")
    await stranger.pause("retract")
    with pytest.raises(EngineError, match="belongs to run 'run-1'"):
        await stranger.update_weights(versions[1], V1, flush_cache=True)
    await stranger.close()


async def test_unknown_fields_are_refused_by_name(shared):
    async with ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        body = {"input_ids": [5], "rid": "a", "sampling_params": {"min_new_tokens": 3}}
        async with session.post(shared.url + "/generate", json=body) as response:
            assert response.status == 400
            assert "min_new_tokens" in await response.text()


async def test_loads_count_capacity_and_tokens(client):
    before = await client.loads()
    answer = await client.generate(PROMPT, sampling(7), new_id())

    async def counted():
        load = await client.loads()
        return load.generated_tokens == before.generated_tokens + answer.num_tokens

    await eventually(counted, "the count of sampled tokens")
    assert before.capacity_tokens == 8192
    assert dataclasses.replace(before, generated_tokens=0, used_tokens=0).running == 0


async def test_short_request_ids_are_refused_before_they_can_match_others(client):
    with pytest.raises(EngineError, match="32 characters"):
        await client.generate(PROMPT, sampling(), "abc")
