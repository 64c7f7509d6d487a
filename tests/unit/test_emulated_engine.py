"""The emulated engine: steps, lengths, cache and preemption without a clock; and that nobody waits for a step's end."""

import asyncio
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from laminar.simulate.timings import Lengths, StepTimes, load_lengths, load_step_times
from rollout.engines.book import StepReport
from rollout.engines.door import Reader, Readers
from rollout.engines.emulated_engine import EmulatedEngine, EmulatedOptions
from rollout.engines.emulated_loop import EmulatedLoop
from rollout.engines.wire import GenerateWire, Output, SamplingWire

TEN = Lengths(np.array([0.0, 1.0]), np.array([10.0, 10.0]))
TIMES = StepTimes(np.array([1.0, 3.0, 5.0]), np.array([0.010, 0.014, 0.020]), 1000.0)


def checkpoint(folder, scale=1.0):
    config = {"vocab_size": 128, "eos_token_id": 2, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.full(4, scale, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"))


def make(folder, lengths=TEN, **options):
    return EmulatedEngine(folder, "0.0", EmulatedOptions(TIMES, lengths, **options))


def wire(rid, ids, new=50, seed=7, temperature=1.0):
    return GenerateWire(
        ids, rid, SamplingWire(max_new_tokens=new, temperature=temperature, sampling_seed=seed), extra_key="0.0"
    )


def step(engine, times=1):
    seconds = 0.0
    for _ in range(times):
        plan = engine.begin()
        seconds += plan.seconds
        engine.end(plan.num_tokens)
    return seconds


def test_a_step_takes_what_the_paper_measured_at_4096_tokens():
    times = load_step_times("32B_TP4")
    assert times.step_seconds(64, 64 * 4096) == pytest.approx(0.0182)
    assert times.step_seconds(1, 4096) == pytest.approx(0.0106)


def test_what_a_batch_costs_beyond_one_request_is_proportional_to_its_context():
    """Three requests: 10 ms, and 4 ms more at 1,000 tokens each; between and beyond the points the slopes go on."""
    assert TIMES.step_seconds(3, 3 * 500) == pytest.approx(0.012)
    assert TIMES.step_seconds(4, 4 * 1000) == pytest.approx(0.017)
    assert TIMES.step_seconds(7, 7 * 1000) == pytest.approx(0.026)


@pytest.mark.parametrize(("name", "mean"), [("7B_math", 5531), ("32B_math", 3322), ("72B_math", 1024), ("7B_tool", 1042)])
def test_lengths_have_the_mean_that_the_paper_states(name, mean):
    lengths = load_lengths(name)
    assert np.mean([lengths.quantile((i + 0.5) / 4000) for i in range(4000)]) == pytest.approx(mean, rel=0.03)


def test_an_answer_has_the_drawn_length_and_ends_with_the_end_id(folder):
    engine = make(folder)
    output = engine.add(wire("a", [5, 9, 17]))
    step(engine, 12)
    assert len(output.ids) == 10
    assert output.ids[-1] == 2
    assert 2 not in output.ids[:-1]
    assert output.finish_reason == {"type": "stop", "matched": 2}


def test_an_answer_resumed_anywhere_is_the_same_to_the_last_token(folder):
    whole = make(folder)
    expected = whole.add(wire("a", [5, 9, 17]))
    step(whole, 12)
    for cut in range(1, 10):
        rest = make(folder)
        output = rest.add(wire("b", [5, 9, 17, *expected.ids[:cut]]))
        step(rest, 12)
        assert output.ids == expected.ids[cut:]
        assert output.logprobs == expected.logprobs[cut:]


def test_a_later_turn_draws_a_length_of_its_own(folder):
    spread = Lengths(np.array([0.0, 1.0]), np.array([2.0, 200.0]))
    lengths = set()
    for given in ([3], [3, 4], [3, 4, 6]):
        engine = make(folder, spread, step_tokens=200)
        output = engine.add(wire("a", [5, 9, 17, *given], new=300))
        step(engine, 2)
        assert output.finish_reason["type"] == "stop"
        lengths.add(len(output.ids))
    assert len(lengths) == 3


def test_greedy_answers_end_by_their_budget_and_do_not_hang_on_the_seed(folder):
    engine = make(folder)
    outputs = [engine.add(wire(name, [5, 9], new=40, seed=seed, temperature=0.0)) for seed, name in enumerate("ab")]
    step(engine, 40)
    assert [output.finish_reason["type"] for output in outputs] == ["length", "length"]
    assert outputs[0].ids == outputs[1].ids


def test_seconds_are_those_of_prefill_and_of_one_token_for_everybody(folder):
    """1,000 prompt tokens at 10,000 a second, twice the same prompt: 0.1 s once. Then 3 requests with 1,000, 1,000 and 4."""
    engine = make(folder, prefill_tokens_per_second=10_000.0)
    prompt = [5] * 1000
    for name, ids in (("a", prompt), ("b", prompt), ("c", [6] * 4)):
        engine.add(wire(name, ids))
    assert engine.begin().seconds == pytest.approx(0.1 + 0.0004 + 0.010 + 0.004 * 2004 / 3000)
    assert engine.load().prefill_seconds == pytest.approx(0.1004)


def test_one_emulated_token_may_stand_for_many_real_ones(folder):
    """Each of the 3 x 100 tokens stands for 10: context 1,000 each, and 10 steps of 14 ms a token."""
    engine = make(folder, token_scale=10, prefill_tokens_per_second=10_000.0)
    for name, first in zip("abc", (5, 6, 7), strict=True):
        engine.add(wire(name, [first] * 100))
    assert engine.begin().seconds == pytest.approx(3000 / 10_000 + 10 * 0.014)


def test_a_full_cache_sends_the_youngest_request_back_and_it_loses_nothing(folder):
    """40 places: 2 x 15 prompt tokens fit; after 5 tokens each there is no more room for two."""
    engine = make(folder, max_cached_tokens=40)
    first, second = engine.add(wire("a", [5] * 15, new=20)), engine.add(wire("b", [6] * 15, new=20))
    step(engine, 5)
    assert (len(first.ids), len(second.ids)) == (5, 5)
    kept = list(second.ids)
    step(engine)
    assert (len(first.ids), len(second.ids)) == (6, 5)
    assert (engine.load().running, engine.load().waiting, engine.load().num_retractions) == (1, 1, 1)
    step(engine, 12)
    assert (len(first.ids), len(second.ids)) == (10, 10)
    assert second.ids[:5] == kept
    assert engine.load().used_tokens == 0


def test_tokens_after_a_swap_carry_the_new_version_and_other_logprobs(folder, tmp_path):
    engine, old = make(folder), make(folder)
    output, unswapped = engine.add(wire("a", [5, 9])), old.add(wire("a", [5, 9]))
    step(engine, 3)
    engine.book.pause("in_place")
    engine.book.update_weights(checkpoint(tmp_path, scale=1.05), "0.1", flush_cache=False)
    engine.book.resume()
    step(engine, 7)
    step(old, 10)
    assert [(span.version, span.start, span.end) for span in output.spans] == [("0.0", 0, 3), ("0.1", 3, 10)]
    assert output.ids == unswapped.ids
    assert output.logprobs[:3] == unswapped.logprobs[:3]
    assert all(a != b for a, b in zip(output.logprobs[3:], unswapped.logprobs[3:], strict=True))
    assert all(-3 < value <= 0 for value in output.logprobs)


def test_a_step_of_many_tokens_ends_where_the_first_request_does(folder):
    """Of two answers of 10 tokens one has a budget of 4."""
    engine = make(folder, step_tokens=100)
    short, whole = engine.add(wire("a", [5], new=4)), engine.add(wire("b", [6]))
    assert [engine.begin().num_tokens, engine.end(4), engine.begin().num_tokens] == [4, None, 6]
    assert (len(short.ids), len(whole.ids)) == (4, 4)


async def test_nobody_waits_for_the_end_of_a_step_of_many_tokens(folder):
    """The first answer's step would take 10 to the 6 tokens of 10 ms: hours."""
    endless = Lengths(np.array([0.0, 1.0]), np.array([1e6, 1e6]))
    loop = EmulatedLoop(make(folder, endless, step_tokens=10**6, max_cached_tokens=10**7), time_factor=10.0)
    first = await loop.generate(wire("a", [5], new=10**6))
    second = await loop.generate(wire("b", [6], new=3))
    async with asyncio.timeout(20):
        short = (await second.get()).answer
        await loop.call(lambda book: book.abort("a"))
        partial = (await first.get()).answer
    await loop.stop()
    assert short["meta_info"]["finish_reason"]["type"] == "length"
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert 3 <= len(partial["output_ids"]) < 10**6


def test_a_streams_reader_hears_of_so_many_tokens_at_once_and_of_the_last_ones():
    readers, output = Readers(stream_interval=4), Output("a", 1)
    readers.add("a", Reader(asyncio.Queue(), streams=True))
    heard = []
    for count in (3, 2, 3, 1):
        for _ in range(count):
            output.append(7, -1.0, "0.0")
        output.finish_reason = {"type": "stop"} if len(output.ids) == 9 else None
        heard.append([len(update.answer["output_ids"]) for _, update in readers.updates(StepReport({"a": output}), "0.0")])
    assert heard == [[], [5], [], [4]]
