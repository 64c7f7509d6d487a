"""The torch engine under random orders of requests, steps, aborts, pauses and new weights, its cache nearly full."""

import random

import pytest
import torch
import transformers

from rollout.engines.tiny_model import write_tiny_model
from rollout.engines.torch_engine import EngineOptions, TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire

NUM_WEIGHTS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return [write_tiny_model(folder / str(number), scale=1.0 + 0.02 * number) for number in range(NUM_WEIGHTS)]


@pytest.fixture(scope="module")
def models(folders):
    return [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


class Play:
    """An engine, and the dice."""

    def __init__(self, folders, seed):
        self.dice, self.folders, self.number = random.Random(seed), folders, 0
        self.room = self.dice.randint(64, 220)
        options = EngineOptions(self.dice.randint(1, 9), self.room, self.dice.choice([8, 16, 64, 4096]))
        self.engine = TorchEngine(folders[0], "0.0", options)
        self.prompts = [self.dice.sample(range(3, 120), self.dice.randint(1, 24)) for _ in range(4)]
        self.asked = {}
        self.mixed = set()  # answers that went on under other weights with the keys and values of earlier ones

    def ask(self):
        """One more answer to one of a few prompts, so that there are siblings; mostly cold, so that they stay alike."""
        rid, prompt = f"r{len(self.asked)}", self.dice.choice(self.prompts)
        sampling = SamplingWire(
            max_new_tokens=self.dice.randint(1, 40),
            temperature=self.dice.choice([0.2, 0.2, 1.0]),
            sampling_seed=self.dice.randrange(99),
            ignore_eos=self.dice.random() < 0.8,
        )
        key = self.dice.choice([None, None, "x"])
        wire = GenerateWire(input_ids=prompt, rid=rid, sampling_params=sampling, extra_key=key)
        self.asked[rid] = (wire, self.engine.add(wire))

    def pause(self):
        """With other weights, mostly."""
        book, mode = self.engine.book, self.dice.choice(["retract", "in_place", "abort"])
        book.pause(mode)
        if self.dice.random() < 0.7:
            self.mixed |= {request.wire.rid for request in book.running}
            self.number = (self.number + 1) % NUM_WEIGHTS
            book.update_weights(self.folders[self.number], f"0.{self.number}", flush_cache=mode != "in_place")
        book.resume()

    def abort(self):
        """Any, also one that has ended."""
        if self.asked:
            self.engine.book.abort(self.dice.choice(list(self.asked)))

    def run(self):
        """Some of everything, and then to the end."""
        acts = [self.ask] * 35 + [self.engine.step] * 55 + [self.abort] * 4 + [self.pause] * 6
        for _ in range(self.dice.randint(20, 120)):
            self.dice.choice(acts)()
            assert self.engine.load().used_tokens <= self.room
        for _ in range(5000):
            if not self.engine.book.has_work:
                return
            self.engine.step()
        raise AssertionError("the engine does not end")


def reference(model, wire, output):
    with torch.no_grad():
        logits = model(torch.tensor([wire.input_ids + output.ids])).logits[0].double() / wire.sampling_params.temperature
    return logits.log_softmax(-1)[len(wire.input_ids) - 1 : -1].gather(1, torch.tensor(output.ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_ends_with_the_log_probs_of_a_plain_forward(folders, models, seed):
    play = Play(folders, seed)
    play.run()
    assert any(output.ids for _, output in play.asked.values())
    for rid, (wire, output) in play.asked.items():
        assert output.finish_reason is not None
        assert len(output.ids) == len(output.logprobs) <= wire.sampling_params.max_new_tokens
        assert [span.start for span in output.spans] == [0, *(span.end for span in output.spans)][: len(output.spans)]
        if rid in play.mixed or not output.ids:
            continue
        for span in output.spans:
            expected = reference(models[int(span.version[2:])], wire, output)[span.start : span.end]
            assert output.logprobs[span.start : span.end] == pytest.approx(expected, abs=2e-3)
