"""Policy losses against an independent float64 implementation, and their gradients against finite differences of it."""

import math

import numpy as np
import pytest
import torch

from trainer.algorithms.loss import clipped_policy_loss, policy_ratio, weighted_logprob_loss

B, T = 4, 7


def random_inputs(seed):
    """Log-probs, behaviour, advantages (some negative, some ratios far out) and a ragged mask with gaps."""
    random = np.random.default_rng(seed)
    logprobs = random.normal(-1.5, 0.7, (B, T))
    behaviour = logprobs + random.normal(0, 0.4, (B, T))
    mask = random.random((B, T)) < 0.7
    mask[0] = False
    mask[1] = True
    return logprobs, behaviour, random.normal(0, 1, (B, T)), mask


def loss_by_hand(logprobs, behaviour, advantages, mask, *, surrogate, low, high, dual=None, level="token", frozen=None):
    """Sum of token losses, one token at a time, in plain Python floats. `frozen`: log-probs that the weights are made of."""
    total = 0.0
    for b in range(B):
        places = [t for t in range(T) if mask[b, t]]
        source = logprobs if frozen is None else frozen
        differences = {t: source[b, t] - behaviour[b, t] for t in places}
        mean = sum(differences.values()) / max(len(places), 1)
        for t in places:
            ratio = math.exp(differences[t] if level == "token" else mean)
            bounded = min(max(ratio, 1 - low), 1 + high)
            if surrogate == "weighted_logprob":
                total -= bounded * advantages[b, t] * logprobs[b, t]
                continue
            objective = min(ratio * advantages[b, t], bounded * advantages[b, t])
            if dual is not None and advantages[b, t] < 0:
                objective = max(objective, dual * advantages[b, t])
            total -= objective
    return total


CASES = [
    {"surrogate": "clipped", "low": 0.2, "high": 0.28},
    {"surrogate": "clipped", "low": 0.2, "high": 0.2, "dual": 1.3},
    {"surrogate": "clipped", "low": 0.05, "high": 0.08, "level": "sequence"},
    {"surrogate": "weighted_logprob", "low": 1.0, "high": 0.3},
    {"surrogate": "weighted_logprob", "low": 0.2, "high": 0.28},
    {"surrogate": "weighted_logprob", "low": 0.1, "high": 0.1, "level": "sequence"},
]


def loss_of_ours(logprobs, behaviour, advantages, mask, *, surrogate, low, high, dual=None, level="token"):
    inputs = [torch.tensor(array) for array in (logprobs, behaviour, advantages, mask)]
    inputs[0].requires_grad_()
    settings = {"clip_low": low, "clip_high": high, "level": level}
    if surrogate == "clipped":
        result = clipped_policy_loss(*inputs, **settings, dual_clip=dual)
    else:
        result = weighted_logprob_loss(*inputs, **settings)
    result.losses.sum().backward()
    return result, inputs[0].grad.numpy()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_a_plain_float64_loop(case, seed):
    logprobs, behaviour, advantages, mask = random_inputs(seed)
    result, gradient = loss_of_ours(logprobs, behaviour, advantages, mask, **case)
    assert result.losses.sum().item() == pytest.approx(loss_by_hand(logprobs, behaviour, advantages, mask, **case), abs=1e-9)
    frozen = logprobs if case["surrogate"] == "weighted_logprob" else None
    step = 1e-6
    for b in range(B):
        for t in range(T):
            moved = [logprobs.copy(), logprobs.copy()]
            moved[0][b, t] += step
            moved[1][b, t] -= step
            up, down = (loss_by_hand(m, behaviour, advantages, mask, **case, frozen=frozen) for m in moved)
            assert gradient[b, t] == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_a_row_has_the_geometric_mean_of_its_tokens_ratios_as_gspo_defines_it():
    new, old = torch.log(torch.tensor([[0.5, 0.4, 0.9]])), torch.log(torch.tensor([[0.25, 0.1, 0.9]]))
    mask = torch.tensor([[True, True, False]])
    ratio = policy_ratio(new, old, mask, "sequence")
    torch.testing.assert_close(ratio[0, :2], torch.full((2,), math.sqrt(2 * 4)))


def test_dual_clip_bounds_the_loss_of_an_unlikely_bad_token_and_takes_its_gradient():
    new, old = torch.tensor([[math.log(0.8), math.log(0.8)]], requires_grad=True), torch.tensor([[math.log(0.1)] * 2])
    advantages, mask = torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool()
    loss = clipped_policy_loss(new, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss.losses.detach(), torch.tensor([[3.0, -1.2]]))  # ratio 8: without it 8
    loss.losses.sum().backward()
    assert new.grad.tolist() == [[0.0, 0.0]]


def test_cispo_and_aipo_keep_the_gradient_of_a_clipped_token_and_aipo_has_no_lower_bound():
    new = torch.tensor([[math.log(0.8), math.log(0.1)]], requires_grad=True)
    old = torch.tensor([[math.log(0.1), math.log(0.8)]])
    loss = weighted_logprob_loss(new, old, torch.ones(1, 1), torch.ones(1, 2).bool(), clip_low=1.0, clip_high=3.0)
    loss.losses.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-4.0, -0.125]]))
    assert (loss.clipped_high.tolist(), loss.clipped_low.tolist()) == ([[True, False]], [[False, False]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_values_at_masked_places_change_no_surrogate_and_pass_no_gradient(value, level):
    mask = torch.tensor([[True, False, True]])
    clean, gradients = [], []
    for spoilt in (0.0, value):
        new = torch.tensor([[-0.5, spoilt, -0.9]], requires_grad=True)
        inputs = (new, torch.tensor([[-0.7, spoilt, -1.0]]), torch.tensor([[1.5, spoilt, -0.8]]), mask)
        losses = [
            clipped_policy_loss(*inputs, clip_low=0.2, clip_high=0.2, dual_clip=2.0, level=level).losses,
            weighted_logprob_loss(*inputs, clip_low=1.0, clip_high=1.0, level=level).losses,
        ]
        sum(part.sum() for part in losses).backward()
        clean.append([part.tolist() for part in losses])
        gradients.append(new.grad.tolist())
    assert clean[0] == clean[1]
    assert gradients[0] == gradients[1]
    assert gradients[0][0][1] == 0
