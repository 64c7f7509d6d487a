"""Swaps in this process: pause modes, version spans, tied heads, mapped files and their locks (cases D13, D16)."""

import fcntl
import itertools
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from laminar.errors import ConfigError, EngineError
from rollout.engines.mapped_weights import MappedWeights
from rollout.engines.tiny_model import tiny_config, write_tiny_model
from rollout.engines.torch_engine import EngineOptions, TorchEngine
from rollout.engines.torch_model import EMBEDDING, HEAD
from rollout.engines.wire import GenerateWire, SamplingWire

PROMPT = [5, 9, 17, 33, 64, 3, 80, 11]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return [write_tiny_model(root / f"w{i}", scale=1.05**i) for i in range(6)]


def request(rid, *, new=20, seed=0):
    sampling = SamplingWire(max_new_tokens=new, sampling_seed=seed, ignore_eos=True)
    return GenerateWire(input_ids=[*PROMPT, 3 + seed], rid=rid, sampling_params=sampling)


def run(engine, steps=10_000):
    for _ in range(steps):
        if not engine.book.has_work:
            return
        engine.step()


def reference_logprobs(folder, ids, start):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [lines[place - 1, ids[place]].item() for place in range(start, len(ids))]


def test_retracted_requests_go_on_under_the_new_weights_as_if_recomputed(versions):
    engine = TorchEngine(versions[0], "0.0")
    output = engine.add(request("a", new=20))
    run(engine, 7)
    before = len(output.ids)
    engine.book.pause("retract")
    engine.book.update_weights(versions[3], "0.3", flush_cache=True)
    engine.book.resume()
    run(engine)
    ids = [*PROMPT, 3, *output.ids]
    expected = reference_logprobs(versions[0], ids, 9)[:before] + reference_logprobs(versions[3], ids, 9)[before:]
    assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert [(span.version, span.start, span.end) for span in output.spans] == [("0.0", 0, before), ("0.3", before, 20)]
    assert output.num_retractions == 1


def test_a_retract_pause_without_an_update_changes_nothing(versions):
    plain, paused = TorchEngine(versions[0], "0.0"), TorchEngine(versions[0], "0.0")
    expected = [plain.add(request(f"r{i}", seed=i)) for i in range(5)]
    outputs = [paused.add(request(f"r{i}", seed=i)) for i in range(5)]
    run(plain)
    run(paused, 5)
    paused.book.pause("retract")
    paused.step()
    paused.book.resume()
    run(paused)
    assert [output.ids for output in outputs] == [output.ids for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_in_place_keeps_the_cache_that_the_old_weights_made(versions):
    engine = TorchEngine(versions[0], "0.0")
    output = engine.add(request("a"))
    run(engine, 7)
    before = len(output.ids)
    engine.book.pause("in_place")
    engine.book.update_weights(versions[3], "0.3", flush_cache=False)
    engine.book.resume()
    run(engine)
    ids = [*PROMPT, 3, *output.ids]
    recomputed = reference_logprobs(versions[3], ids, 9)[before:]
    assert max(abs(a - b) for a, b in zip(output.logprobs[before:], recomputed, strict=True)) > 1e-3
    assert [span.version for span in output.spans] == ["0.0", "0.3"]


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("in_place", False)])
def test_five_updates_in_a_row_abort_none_of_sixteen_long_requests(versions, mode, flush):
    """Cases D13."""
    engine = TorchEngine(versions[0], "0.0", EngineOptions(max_running=12))
    outputs = [engine.add(request(f"r{i}", new=120, seed=i)) for i in range(16)]
    for number in range(1, 6):
        run(engine, 20)
        engine.book.pause(mode)
        engine.book.update_weights(versions[number], f"0.{number}", flush_cache=flush)
        engine.add(request(f"during{number}", new=3, seed=number))
        engine.book.resume()
    run(engine)
    assert all(output.finish_reason == {"type": "length", "length": 120} for output in outputs)
    for output in outputs:
        numbers = [int(span.version.partition(".")[2]) for span in output.spans]
        assert numbers == sorted(set(numbers))
        assert [span.start for span in output.spans] == [0, *[span.end for span in output.spans[:-1]]]
        assert output.spans[-1].end == len(output.ids) == len(output.logprobs) == 120
    assert engine.generated_tokens == 16 * 120 + 5 * 3


def test_pause_in_abort_mode_ends_running_and_waiting_ones_with_what_they_have(versions):
    engine = TorchEngine(versions[0], "0.0", EngineOptions(max_running=2))
    outputs = [engine.add(request(f"r{i}", seed=i)) for i in range(4)]
    run(engine, 3)
    engine.book.pause("abort")
    report = engine.step()
    assert sorted(report.outputs) == ["r0", "r1", "r2", "r3"]
    assert [output.finish_reason["type"] for output in outputs] == ["abort"] * 4
    assert [len(output.ids) for output in outputs] == [4, 4, 0, 0]
    assert outputs[2].answer("0.0")["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 0}]


def test_abort_returns_the_partial_and_leaves_the_others_alone(versions):
    plain, engine = TorchEngine(versions[0], "0.0"), TorchEngine(versions[0], "0.0")
    expected = [plain.add(request(f"r{i}", seed=i)) for i in range(4)]
    outputs = [engine.add(request(f"r{i}", seed=i)) for i in range(4)]
    run(plain)
    run(engine, 5)
    assert engine.book.abort("r1") == 1
    assert engine.book.abort("nobody") == 0
    run(engine)
    assert outputs[1].ids == expected[1].ids[:6]
    for i in (0, 2, 3):
        assert outputs[i].ids == expected[i].ids
        assert outputs[i].logprobs == pytest.approx(expected[i].logprobs, abs=1e-5)


def test_an_update_while_requests_run_is_refused_and_changes_nothing(versions):
    engine = TorchEngine(versions[0], "0.0")
    output = engine.add(request("a"))
    engine.step()
    with pytest.raises(ConfigError, match="pause generation"):
        engine.book.update_weights(versions[1], "0.1", flush_cache=True)
    run(engine)
    assert [span.version for span in output.spans] == ["0.0"]


def test_an_idle_engine_takes_an_update_without_a_pause(versions):
    engine = TorchEngine(versions[0], "0.0")
    engine.book.update_weights(versions[1], "0.1", flush_cache=True)
    assert engine.book.version == "0.1"


def test_flushing_under_kept_requests_is_refused(versions):
    engine = TorchEngine(versions[0], "0.0")
    engine.add(request("a"))
    engine.step()
    engine.book.pause("in_place")
    with pytest.raises(ConfigError, match="retract"):
        engine.book.update_weights(versions[1], "0.1", flush_cache=True)


def broken_copy(source, folder, change):
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing .*model.norm.weight"),
        (lambda t: t.update(other=torch.zeros(1)), "not known .*other"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"another shape .*\(31,\) for \(32,\)"),
        (lambda t: t.update({HEAD: torch.zeros(128, 32)}), "the two differ"),
    ],
)
def test_a_payload_that_does_not_fit_leaves_the_weights_unknown_until_a_full_one_comes(versions, tmp_path, change, message):
    engine = TorchEngine(versions[0], "0.0")
    with pytest.raises(EngineError, match=message):
        engine.book.update_weights(broken_copy(versions[1], tmp_path / "broken", change), "0.1", flush_cache=True)
    with pytest.raises(EngineError, match="unknown"):
        engine.add(request("a"))
    with pytest.raises(EngineError, match="unknown"):
        engine.book.resume()
    engine.book.update_weights(versions[2], "0.2", flush_cache=True)
    output = engine.add(request("a"))
    run(engine)
    assert [span.version for span in output.spans] == ["0.2"]


def test_a_truncated_file_is_refused_before_it_is_read(versions, tmp_path):
    content = (versions[1] / "model.safetensors").read_bytes()
    for num_bytes in (0, 4, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "model.safetensors").write_bytes(content[:num_bytes])
        with pytest.raises(EngineError, match="not a whole safetensors file"):
            MappedWeights(tmp_path)


def test_weights_that_give_no_finite_logits_end_all_requests_with_the_reason(versions, tmp_path):
    bad = broken_copy(versions[1], tmp_path / "bad", lambda t: t["model.norm.weight"].fill_(float("nan")))
    engine = TorchEngine(versions[0], "0.0")
    engine.book.update_weights(bad, "0.1", flush_cache=True)
    output = engine.add(request("a"))
    report = engine.step()
    assert report.outputs["a"] is output
    assert "not finite" in output.error
    engine.book.update_weights(versions[2], "0.2", flush_cache=True)
    again = engine.add(request("b"))
    run(engine)
    assert again.finish_reason["type"] == "length"
    assert not again.error


def head_and_embedding(engine):
    parameters = engine.model.parameters()
    return parameters[HEAD], parameters[EMBEDDING]


@pytest.mark.parametrize("names", ["embedding", "both"])
def test_a_tied_head_follows_the_embedding_whatever_the_payload_names(versions, tmp_path, names):
    """Cases D16: E + D on both uses."""
    engine = TorchEngine(versions[0], "0.0")

    def change(tensors):
        tensors[EMBEDDING] += 0.1
        if names == "both":
            tensors[HEAD] = tensors[EMBEDDING].clone()

    folder = broken_copy(versions[0], tmp_path / "new", change)
    engine.book.update_weights(folder, "0.1", flush_cache=True)
    head, embedding = head_and_embedding(engine)
    assert head is embedding
    output = engine.add(request("a"))
    run(engine)
    model = transformers.LlamaForCausalLM(tiny_config())
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    ids = [*PROMPT, 3, *output.ids]
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [lines[place - 1, ids[place]].item() for place in range(9, len(ids))]
    assert output.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_numbers_of_the_tied_head_case(tmp_path):
    """Cases D16, its own numbers: logits E h before and (E + D) h after, and the look-up."""
    before = torch.tensor([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]])
    after = before + torch.tensor([[0.1, 0.2], [-0.3, 0.05], [0.25, -0.4]])
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=3, hidden_size=2, intermediate_size=2, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
        max_position_embeddings=64, dtype=torch.float32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    engine = None
    for version, table in enumerate((before, after)):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        config.save_pretrained(folder)
        tensors = {name: tensor.clone() for name, tensor in model.named_parameters()}
        save_file(tensors | {EMBEDDING: table.contiguous()}, folder / "model.safetensors")
        if engine is None:
            engine = TorchEngine(folder, "0.0")
        else:
            engine.book.update_weights(folder, "0.1", flush_cache=True)
        logprobs = engine.model.logits(torch.tensor([[0.8, -0.4]])).log_softmax(-1)[0].tolist()
        expected = ([-0.900430, -0.600430, -3.100430], [-0.788288, -0.748288, -2.628288])[version]
        assert logprobs == pytest.approx(expected, abs=1e-5)
    assert head_and_embedding(engine)[1][1].tolist() == pytest.approx([1.2, 0.3])


def test_an_untied_model_needs_its_head_sent(tmp_path):
    folder = write_tiny_model(tmp_path / "untied", tied=False)
    engine = TorchEngine(folder, "0.0")
    head, embedding = head_and_embedding(engine)
    assert head.data_ptr() != embedding.data_ptr()
    headless = broken_copy(folder, tmp_path / "headless", lambda t: t.pop(HEAD))
    with pytest.raises(EngineError, match=r"missing .*lm_head\.weight"):
        engine.book.update_weights(headless, "0.1", flush_cache=True)


def can_lock_exclusively(path):
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_the_served_file_is_locked_until_the_next_swap(tmp_path):
    folders = [write_tiny_model(tmp_path / name) for name in ("first", "second")]
    engine = TorchEngine(folders[0], "0.0")
    files = [folder / "model.safetensors" for folder in folders]
    assert not can_lock_exclusively(files[0])
    engine.book.update_weights(folders[1], "0.1", flush_cache=True)
    assert can_lock_exclusively(files[0])
    assert not can_lock_exclusively(files[1])
    engine.close()
    assert can_lock_exclusively(files[1])


def test_a_failed_swap_keeps_no_lock_on_the_broken_file(versions, tmp_path):
    engine = TorchEngine(versions[0], "0.0")
    folder = broken_copy(versions[1], tmp_path / "broken", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(EngineError):
        engine.book.update_weights(folder, "0.1", flush_cache=True)
    assert can_lock_exclusively(folder / "model.safetensors")


def test_a_file_that_is_being_rewritten_is_refused(versions):
    path = versions[4] / "model.safetensors"
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(EngineError, match="rewritten"):
            MappedWeights(versions[4])
    finally:
        os.close(descriptor)


def mapped_ranges(path):
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if line.rstrip().endswith(str(path))]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def test_parameters_lie_in_the_mapped_file(versions):
    engine = TorchEngine(versions[0], "0.0")
    for folder in (versions[0], versions[2]):
        engine.book.update_weights(folder, "0.9", flush_cache=True)
        ranges = mapped_ranges((folder / "model.safetensors").resolve())
        for tensor in engine.model.parameters().values():
            last = tensor.data_ptr() + tensor.numel() * tensor.element_size()
            assert any(start <= tensor.data_ptr() and last <= end for start, end in ranges)


def test_a_swap_drops_the_mapping_of_the_file_before(versions):
    engine = TorchEngine(versions[0], "0.0")
    for first, second in itertools.pairwise(versions):
        engine.book.update_weights(second, "0.1", flush_cache=True)
        assert not mapped_ranges((first / "model.safetensors").resolve())
