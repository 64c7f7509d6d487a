"""Five groups, one tiny model, and what a plain loop makes of them; shared by the tests of DeepSpeed."""

import numpy as np
import pytest
import torch

from laminar.config.root import LaminarConfig
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.step import train_step

SETTINGS = {"adam_epsilon": 1.0, "learning_rate": 0.5, "max_grad_norm": 0.7}
"""So large an epsilon makes an update proportional to the gradient, and so comparable."""


def make_groups(seed=0, num_groups=5, poison=False):
    """Groups of 3 with prompts and answers of unlike lengths; one trajectory has a tool's answer in the middle."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        prompt = given(random.integers(1, 40, 3 + group))
        members = []
        for member in range(3):
            lengths = [2, 3] if (group, member) == (1, 1) else [1 + int(random.integers(0, 6))]
            segments = [prompt]
            for length in lengths:
                logprobs = random.normal(-3.7, 0.3, length)
                segments.append(sampled(random.integers(1, 40, length), logprobs, WeightVersion(0, 0)))
                segments.append(given(random.integers(1, 40, 2)))
            name = f"{group}-{member}"
            if poison and name == "3-1":
                segments[1].logprobs[0] = np.nan
            reward, sampling = float(random.integers(0, 3)), SamplingParameters(0.8, 8, 0)
            chains = (Chain(tuple(segments)),)
            members.append(
                Trajectory(name, str(group), "p", member, 1, Purpose.TRAIN, sampling, chains, FinishReason.STOP, reward)
            )
        groups.append(tuple(members))
    return groups


def make_config(model, **trainer):
    return LaminarConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "-"},
            "trainer": SETTINGS | trainer,
            "staleness": {"max_staleness": "unbounded"},  # the same old groups serve every step
        }
    )


def train(config, ranks, steps=2):
    """Some steps on fixed batches: the engine, and what it reported."""
    engine = TrainerEngine(config, ranks)
    reports = []
    for step in range(1, steps + 1):
        groups = make_groups(step)
        by_id = {group[0].group_id: group for group in groups}
        own = groups if ranks.is_first else None
        reports.append(
            train_step(
                engine, PolicyGradient(GrpoOptions()), own, step, fetch=lambda ids, by_id=by_id: [by_id[i] for i in ids]
            )
        )
    return engine, reports


def weights(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}


def plain_loop(model_path, steps=2):
    """The same training without our code: one row at a time, no padding, one AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0)
    losses, norms = [], []
    for step in range(1, steps + 1):
        terms, tokens = [], 0
        for group in make_groups(step):
            rewards = np.array([member.reward for member in group])
            scale = rewards.std(ddof=1) + 1e-6
            for member, reward in zip(group, rewards, strict=True):
                chain = member.chains[0]
                ids = torch.tensor(chain.token_ids(), dtype=torch.int64)
                places = torch.tensor(np.flatnonzero(chain.mask()))
                logits = model(input_ids=ids[None]).logits[0] / 0.8
                ratio = (
                    logits.log_softmax(-1)[places - 1, ids[places]] - torch.tensor(chain.rollout_logprobs())[places]
                ).exp()
                advantage = (reward - rewards.mean()) / scale
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum())
                tokens += len(places)
        loss = sum(terms) / tokens
        adam.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        adam.step()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses, norms


def assert_same_training(own, reports, reference):
    expected, losses, norms = reference
    assert [report["train/loss"] for report in reports] == pytest.approx(losses, abs=1e-6)
    assert [report["train/grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-5)
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


def save_tiny_model(path):
    """A Llama of two layers whose head is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return path
