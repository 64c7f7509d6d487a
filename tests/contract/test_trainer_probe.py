"""The trainer's side of the probe: its own forward pass over the fixed tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar.config.root import LaminarConfig
from relay.probe import probe_tokens
from rollout.engines.tiny_model import write_tiny_model
from trainer.engine import TrainerEngine
from trainer.probing import score_probe

pytestmark = [pytest.mark.heavy, pytest.mark.slow]


def make_engine(path, ranks, **trainer):
    tree = {"model": {"path": str(path)}, "data": {"path": "-"}, "trainer": trainer}
    return TrainerEngine(LaminarConfig.model_validate(tree), ranks)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_probe_is_what_a_plain_forward_pass_makes_of_the_fixed_tokens(tmp_path, ranks, share_prompts):
    path = write_tiny_model(tmp_path / "model")
    probe = score_probe(make_engine(path, ranks, share_prompts=share_prompts))
    ids = probe_tokens(128)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert probe.token_ids == ids
    assert probe.logprobs == pytest.approx([lines[i - 1, ids[i]].item() for i in range(1, len(ids))], abs=1e-5)


def test_broken_weights_have_no_probe_and_that_is_logged(tmp_path, ranks, caplog):
    engine = make_engine(write_tiny_model(tmp_path / "model"), ranks)
    engine.model.model.norm.weight.data[0] = torch.nan
    assert score_probe(engine) is None
    assert "a log-prob of the probe is not finite" in caplog.text
