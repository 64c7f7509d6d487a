"""The losses and gradients that TRL 1.16 gives, where it has the same algorithm. Nothing is slow but TRL's import.

TRL's trainer object is replaced by what its loss reads: settings, and log-probs that are leaves of the graph.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from laminar.plugins import resolve, validate_options
from trainer.algorithms import ALGORITHM_OPTIONS
from trainer.algorithms.advantages import group_advantages
from trainer.algorithms.base import TokenInputs
from trainer.algorithms.loss import loss_denominator, loss_numerator
from trainer.algorithms.policy_gradient import PolicyGradient

pytest.importorskip("accelerate", reason="TRL needs accelerate; `make setup` installs both")

B, T, LONGEST = 6, 9, 16


def make_batch():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(B, T, generator=generator) * 3
    near = [logprobs + torch.randn(B, T, generator=generator) * 0.3 for _ in range(2)]
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = torch.arange(T) < lengths[:, None]
    mask[3, 2:4] = False  # a tool's answer
    return {
        "logprobs": logprobs,
        "old": near[0],
        "ref": near[1],
        "mask": mask,
        "advantages": torch.randn(B, generator=generator),
    }


def loss_of_trl(batch, loss_type, *, low=0.2, high=0.28, delta=None, level="token", beta=0.0):
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs = batch["logprobs"].clone().requires_grad_()
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(B, T), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=low, epsilon_high=high,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
        accelerator=same, _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long), "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long), "completion_mask": batch["mask"].long(),
        "advantages": batch["advantages"], "old_per_token_logps": batch["old"], "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": batch["mask"].sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad


def loss_of_ours(batch, kind, options):
    algorithm = PolicyGradient(validate_options(resolve(kind, ALGORITHM_OPTIONS), options))
    logprobs, mask = batch["logprobs"].clone().requires_grad_(), batch["mask"]
    inputs = TokenInputs(
        logprobs, mask, batch["advantages"][:, None].expand(B, T), batch["old"], torch.zeros(B, T), ref_logprobs=batch["ref"]
    )
    policy = algorithm.policy_loss(inputs)
    losses = policy.losses if policy.penalty is None else policy.losses + policy.penalty
    denominator = loss_denominator(
        algorithm.aggregation, num_tokens=int(mask.sum()), num_sequences=B, fixed_tokens=algorithm.fixed_tokens
    )
    loss = loss_numerator(losses, mask, algorithm.aggregation, mask.sum(dim=1)) / denominator
    loss.backward()
    return loss.item(), logprobs.grad


OWN_KL = {"kl_coef": 0.1, "kl_gradient": "estimator"}
PAIRS = {
    "grpo of the paper": (("grpo", {"high": 0.2}), "grpo", {"aggregation": "sequence_mean", "clip_high": 0.2}),
    "grpo with kl": (("grpo", {"beta": 0.1}), "grpo", {"aggregation": "sequence_mean", **OWN_KL}),
    "dapo": (("dapo", {}), "dapo", {}),
    "token mean with kl": (("dapo", {"beta": 0.1}), "grpo", OWN_KL),
    "dual clip": (("dapo", {"delta": 1.4}), "grpo", {"dual_clip": 1.4}),
    "dr_grpo": (
        ("dr_grpo", {"high": 0.2}), "dr_grpo", {"aggregation": "fixed_denominator", "fixed_tokens": LONGEST},
    ),
    "gspo": (("grpo", {"low": 3e-4, "high": 4e-4, "level": "sequence"}), "gspo", {}),
    "gspo with wide clips": (
        ("grpo", {"low": 0.1, "high": 0.1, "level": "sequence"}), "gspo", {"clip_low": 0.1, "clip_high": 0.1},
    ),
    "cispo": (("cispo", {"high": 5.0}), "cispo", {}),
    "cispo with a low bound": (("cispo", {"high": 1.2}), "cispo", {"clip_high": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradient_are_those_of_trl(name):
    (loss_type, settings), kind, options = PAIRS[name]
    batch = make_batch()
    theirs, their_gradient = loss_of_trl(batch, loss_type, **settings)
    ours, gradient = loss_of_ours(batch, kind, options)
    assert ours == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-5)
    assert gradient.abs().max() > 1e-3


def test_group_standard_deviations_are_those_of_trl():
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.25, 1.0])
    theirs = (rewards.view(2, 3) - rewards.view(2, 3).mean(dim=1, keepdim=True)) / (
        nanstd(rewards.view(2, 3), dim=1)[:, None] + 1e-4
    )
    ours, _ = group_advantages(rewards.tolist(), list("aaabbb"), std="sample", std_epsilon=1e-4)
    torch.testing.assert_close(torch.tensor(ours).float().view(2, 3), theirs, rtol=0, atol=1e-5)


def test_on_policy_the_gradient_of_rloo_is_that_of_trl():
    """TRL's ratio is of whole answers, ours of tokens: at a ratio of 1 both are REINFORCE, A_i grad log p(y_i) / B."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    batch = make_batch()
    batch["mask"] = torch.arange(T) < torch.tensor([9, 1, 4, 7, 2, 9])[:, None]  # theirs knows no tool's answer
    batch["old"] = batch["logprobs"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(B, T), None),
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2, model=SimpleNamespace(training=True), accelerator=same,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long), "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long), "completion_mask": batch["mask"].long(),
        "advantages": batch["advantages"], "old_logps": (batch["logprobs"] * batch["mask"]).sum(1),
    }  # fmt: skip
    RLOOTrainer._compute_loss(trainer, None, inputs).backward()
    _, gradient = loss_of_ours(batch, "rloo", {})
    torch.testing.assert_close(gradient, logprobs.grad, rtol=0, atol=1e-5)
    assert gradient.abs().max() > 1e-3
