"""The engine in this process: agreement with transformers, batching, sharing, limits, seeds (cases D10, D30)."""

import dataclasses
import itertools

import msgspec
import pytest
import torch
import transformers

from laminar.errors import ConfigError, EngineError
from rollout.engines.tiny_model import write_tiny_model
from rollout.engines.torch_engine import EngineOptions, TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire

PROMPT = [5, 9, 17, 33, 64, 3, 80, 11]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "w0")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "untied", tied=False)


def request(rid, ids=PROMPT, *, new=6, seed=0, temperature=1.0, **more):
    sampling = SamplingWire(
        max_new_tokens=new, temperature=temperature, sampling_seed=seed, ignore_eos=more.pop("ignore_eos", True), **more
    )
    return GenerateWire(input_ids=list(ids), rid=rid, sampling_params=sampling)


def run(engine, limit=2000):
    for _ in range(limit):
        if not engine.book.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not end")


def reference_logprobs(folder, prompt, output, temperature=1.0):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt) + list(output)])).logits[0].double() / temperature
    lines = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [lines[i, token].item() for i, token in enumerate(output)]


@pytest.mark.parametrize("which", ["tiny", "untied"])
def test_logprobs_agree_with_a_plain_forward_for_unequal_requests_that_join_and_leave(which, request_folder):
    folder = request_folder(which)
    engine = TorchEngine(folder, "0.0", EngineOptions(max_running=3))
    prompts = [[3 + (7 * i + j) % 120 for j in range(2 + 9 * i)] for i in range(6)]
    outputs = [
        engine.add(request(f"r{i}", prompt, new=3 + 5 * (i % 4), seed=i, temperature=0.8))
        for i, prompt in enumerate(prompts)
    ]
    run(engine)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.logprobs == pytest.approx(reference_logprobs(folder, prompt, output.ids, 0.8), abs=1e-4)


@pytest.fixture
def request_folder(tiny, untied):
    return {"tiny": tiny, "untied": untied}.__getitem__


def small_config(kind):
    return getattr(transformers, f"{kind}Config")(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        head_dim=16,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral"])
def test_other_models_of_the_family_agree_with_transformers(kind, tmp_path):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, "0.0")
    output = engine.add(request("a", new=12))
    other = engine.add(request("b", PROMPT[:3], new=12))
    run(engine)
    assert output.logprobs == pytest.approx(reference_logprobs(tmp_path, PROMPT, output.ids), abs=1e-4)
    assert other.logprobs == pytest.approx(reference_logprobs(tmp_path, PROMPT[:3], other.ids), abs=1e-4)


def test_another_architecture_is_refused_by_name(tmp_path):
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="GPT2LMHeadModel"):
        TorchEngine(tmp_path, "0.0")


def test_a_folder_without_a_checkpoint_is_refused_by_path(tmp_path):
    with pytest.raises(EngineError, match=r"nothing holds no config\.json"):
        TorchEngine(tmp_path / "nothing", "0.0")


def test_rows_longer_than_the_first_allocation_keep_their_cache(tiny):
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_running=4))
    short = engine.add(request("short", new=60))
    engine.step()
    long_prompt = [3 + i % 100 for i in range(700)]
    long = engine.add(request("long", long_prompt, new=10))
    run(engine)
    assert short.logprobs == pytest.approx(reference_logprobs(tiny, PROMPT, short.ids), abs=1e-4)
    assert long.logprobs == pytest.approx(reference_logprobs(tiny, long_prompt, long.ids), abs=1e-4)


def test_siblings_share_one_prefill_also_when_they_come_later(tiny):
    engine = TorchEngine(tiny, "0.0")
    group = [engine.add(request(f"g{i}", new=5, seed=i)) for i in range(4)]
    engine.step()
    late = engine.add(request("late", new=5, seed=2))
    run(engine)
    assert [output.cached_tokens for output in group] == [0, 8, 8, 8]
    assert late.cached_tokens == 8
    assert late.ids == group[2].ids
    assert late.logprobs == pytest.approx(group[2].logprobs, abs=1e-5)


def counted_decodes(engine):
    """How many rows there are in each decoding step, and how many of them are computed."""
    counts, decode = [], engine.model.decode

    def count(ids, lengths, context_of, store):
        hidden = decode(ids, lengths, context_of, store)
        counts.append((len(ids), len(hidden)))
        return hidden

    engine.model.decode = count
    return counts


def test_siblings_are_computed_once_for_as_long_as_they_have_drawn_the_same(tiny):
    """Two groups of unlike ends, at a temperature at which siblings part sooner or later; numbers from the answers alone."""
    engine = TorchEngine(tiny, "0.0")
    counts = counted_decodes(engine)
    asked = [
        (ids, engine.add(request(f"{len(ids)}-{i}", ids, new=3 + 3 * i, seed=i, temperature=0.25)))
        for ids in (PROMPT, PROMPT[:5])
        for i in range(6)
    ]
    run(engine)
    expected = []
    for step in range(1, 18):
        going = [(tuple(ids), tuple(output.ids[:step])) for ids, output in asked if len(output.ids) > step]
        expected.append((len(going), len(set(going))))
    assert counts == expected
    assert any(1 < computed < rows for rows, computed in counts)
    for ids, output in asked:
        assert output.logprobs == pytest.approx(reference_logprobs(tiny, ids, output.ids, 0.25), abs=1e-4)


def test_siblings_of_unlike_weights_share_nothing_though_their_tokens_are_alike(tiny, tmp_path):
    engine = TorchEngine(tiny, "0.0")
    counts = counted_decodes(engine)
    early = [engine.add(request(f"early{i}", new=6, temperature=0.0)) for i in range(2)]
    engine.step()
    folder = write_tiny_model(tmp_path / "w1", scale=1.002)
    engine.book.pause("in_place")
    engine.book.update_weights(folder, "0.1", flush_cache=False)
    engine.book.resume()
    late = engine.add(request("late", new=6, temperature=0.0))
    run(engine)
    assert counts == [(2, 1)] + [(3, 2)] * 4 + [(1, 1)]
    assert early[0].ids == early[1].ids == late.ids
    assert late.logprobs == pytest.approx(reference_logprobs(folder, PROMPT, late.ids), abs=1e-5)
    assert early[0].logprobs != pytest.approx(late.logprobs, abs=1e-5)


def test_a_new_weight_version_shares_nothing_with_the_old_one(tiny, tmp_path):
    """Cases D14: a live engine after an update equals a fresh one, and reports no cached token."""
    prompt = [3 + (5 * i) % 120 for i in range(100)]
    live = TorchEngine(tiny, "0.0")
    old = live.add(request("old", prompt, new=8, temperature=0.0))
    run(live)
    for number in range(1, 11):
        folder = write_tiny_model(tmp_path / f"w{number}", scale=1.05**number)
        live.book.update_weights(folder, f"0.{number}", flush_cache=False)
        output = live.add(request(f"new{number}", prompt, new=8, temperature=0.0))
        run(live)
        fresh = TorchEngine(folder, f"0.{number}")
        expected = fresh.add(request("fresh", prompt, new=8, temperature=0.0))
        run(fresh)
        assert output.cached_tokens == 0
        assert output.ids == expected.ids
        assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(old.logprobs, output.logprobs, strict=True)) > 1e-3


def test_a_kept_prompt_that_goes_for_another_one_still_serves_who_came_with_it(tiny):
    """375 tokens are reserved and 20 kept of 400; keeping the new prompt of 10 as well drops the old one."""
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_cached_tokens=400))
    old, new = [3 + i for i in range(20)], [60 + i for i in range(10)]
    first = engine.add(request("first", old, new=5))
    run(engine)
    engine.add(request("other", new, new=170))
    late = engine.add(request("late", old, new=175))
    run(engine)
    assert late.cached_tokens == 20
    assert late.ids[:5] == first.ids
    assert late.logprobs == pytest.approx(reference_logprobs(tiny, old, late.ids), abs=1e-4)


def test_admission_is_first_in_first_out_within_the_limits(tiny):
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_running=8, max_cached_tokens=64))
    outputs = {name: engine.add(request(name, new=new)) for name, new in (("a", 20), ("b", 40), ("c", 4))}
    started = []
    while engine.book.has_work:
        engine.step()
        load = engine.load()
        assert load.used_tokens <= 64
        started += [name for name, output in outputs.items() if output.ids and name not in started]
    # a and b need 28 + 48 tokens together, so b waits for a; c would fit at once but must not overtake b
    assert started == ["a", "b", "c"]
    assert [len(output.ids) for output in outputs.values()] == [20, 40, 4]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tiny):
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_cached_tokens=100))
    with pytest.raises(ConfigError, match=r"8 prompt tokens \+ max_new_tokens 93 exceed 100"):
        engine.add(request("a", new=93))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [128]}, "outside"),
        ({"sampling_params": SamplingWire(temperature=-1)}, "temperature"),
        ({"sampling_params": SamplingWire(top_p=0)}, "top_p"),
        ({"sampling_params": SamplingWire(top_k=0)}, "top_k"),
        ({"sampling_params": SamplingWire(max_new_tokens=0)}, "max_new_tokens"),
    ],
)
def test_senseless_requests_are_refused(tiny, change, message):
    wire = GenerateWire(**({"input_ids": PROMPT, "rid": "a"} | change))
    with pytest.raises(ConfigError, match=message):
        TorchEngine(tiny, "0.0").add(wire)


def test_every_declared_end_id_stops_and_so_do_the_requests_own(tmp_path):
    """Cases D10: reasons are stop or length by what happened, not by the last id."""
    folder = write_tiny_model(tmp_path / "ends", end_ids=(20, 21))
    engine = TorchEngine(folder, "0.0")
    assert engine.model.end_ids == {20, 21}
    outputs = [engine.add(request(f"r{i}", new=60, seed=i, ignore_eos=False, stop_token_ids=[7])) for i in range(60)]
    run(engine)
    matched = set()
    for output in outputs:
        if output.finish_reason["type"] == "stop":
            matched.add(output.finish_reason["matched"])
            assert output.ids[-1] == output.finish_reason["matched"]
        else:
            assert output.finish_reason == {"type": "length", "length": 60}
            assert len(output.ids) == 60
        assert not set(output.ids[:-1]) & {7, 20, 21}
    assert matched == {7, 20, 21}


def test_an_end_id_exactly_at_the_cap_is_a_stop(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    engine = TorchEngine(folder, "0.0")
    free = engine.add(request("free", new=4))
    run(engine)
    capped = engine.add(request("capped", new=4, stop_token_ids=[free.ids[3]]))
    run(engine)
    first = free.ids.index(free.ids[3])
    assert capped.ids == free.ids[: first + 1]
    assert capped.finish_reason == {"type": "stop", "matched": free.ids[3]}


def completions(folder, seeds, order, **options):
    """Twenty answers: 5 prompts, 4 samples each, fed in the given order."""
    engine = TorchEngine(folder, "0.0", EngineOptions(**options))
    prompts = [[4 + i, 50 + i, 90 - i] for i in range(5)]
    outputs = {}
    for place in order:
        outputs[place] = engine.add(request(f"r{place}", prompts[place // 4], new=12, seed=seeds[place]))
        if options.get("max_running", 64) < 8:
            engine.step()
    run(engine)
    return [tuple(outputs[place].ids) for place in range(20)]


def test_seeds_decide_the_answers_and_nothing_else_does(tiny):
    """Cases D30."""
    seeds = list(range(100, 120))
    first = completions(tiny, seeds, range(20))
    assert completions(tiny, seeds, range(20)) == first
    assert completions(tiny, seeds, reversed(range(20)), max_running=3) == first
    other = completions(tiny, [seed + 1000 for seed in seeds], range(20))
    assert sum(a != b for a, b in zip(first, other, strict=True)) >= 18
    for prompt in range(5):
        samples = first[4 * prompt : 4 * prompt + 4]
        assert all(a != b for a, b in itertools.combinations(samples, 2))


def test_batch_invariant_numbers_do_not_depend_on_the_other_requests(tiny):
    alone = TorchEngine(tiny, "0.0", EngineOptions(batch_invariant=True))
    lonely = alone.add(request("a", new=20))
    run(alone)
    crowd = TorchEngine(tiny, "0.0", EngineOptions(batch_invariant=True))
    for i in range(11):
        crowd.add(request(f"x{i}", PROMPT[: 1 + i % 8], new=3 + i, seed=50 + i))
        crowd.step()
    crowded = crowd.add(request("a", new=20))
    run(crowd)
    assert crowded.ids == lonely.ids
    # exact on processors whose matrix kernels sum alike from four rows on; elsewhere the last bits may differ
    assert crowded.logprobs == pytest.approx(lonely.logprobs, abs=1e-6)


def test_a_moved_request_goes_on_with_the_same_noise(tiny):
    """Tokens in, tokens out: prompt + partial elsewhere draws what the first engine would have drawn."""
    engine = TorchEngine(tiny, "0.0")
    whole = engine.add(request("whole", new=20, seed=4))
    run(engine)
    other = TorchEngine(tiny, "0.0")
    rest = other.add(request("rest", PROMPT + whole.ids[:7], new=13, seed=4))
    run(other)
    assert rest.ids == whole.ids[7:]


def test_load_counts_what_is_there(tiny):
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_running=2, max_cached_tokens=4096))
    for i in range(3):
        engine.add(request(f"r{i}", new=4, seed=i))
    engine.step()
    load = engine.load()
    assert dataclasses.astuple(load)[:2] == (2, 1)
    # two rows of 8 prompt tokens + 1 decoded, and the prompt kept for later siblings
    assert load.used_tokens == 2 * 9 + 8
    assert load.generated_tokens == 4
    assert load.capacity_tokens == 4096


def test_given_tokens_are_scored_before_those_who_wait(tiny):
    """After a swap, answers are held back until a probe has been scored: it must not stand at the end of the queue."""
    engine = TorchEngine(tiny, "0.0", EngineOptions(max_running=1))
    outputs = {name: engine.add(request(name, seed=place)) for place, name in enumerate(["runs", "waits", "waits too"])}
    engine.step()
    probe = msgspec.structs.replace(request("probe", new=1), logprob_start_len=0)
    outputs["probe"] = engine.add(probe)
    ends = []
    while engine.book.has_work:
        engine.step()
        ends += [name for name, output in outputs.items() if output.finish_reason and name not in ends]
    assert ends == ["runs", "probe", "waits", "waits too"]
