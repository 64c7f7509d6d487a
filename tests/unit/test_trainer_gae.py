"""Generalised advantage estimation and the critic's loss, by hand and against independent float64 implementations."""

import math

import numpy as np
import pytest
import torch

from trainer.algorithms.advantages import gae, returns_to_go
from trainer.algorithms.base import RowScores
from trainer.algorithms.loss import value_loss
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import PpoOptions

MASK = np.array([0, 1, 1, 0, 0, 1, 0], bool)
"""A prompt token, two sampled ones, a tool's answer, one sampled, padding."""


def test_gae_by_hand():
    rewards, values = np.array([9, 0, 0, 9, 9, 1.0, 9]), np.array([9, 0.5, 0.25, 9, 9, 0.75, 9])
    # d: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.75 - 0.25 = 0.125; 1 - 0.75 = 0.25. gamma lambda = 0.4
    expected = [0, -0.375 + 0.4 * (0.125 + 0.4 * 0.25), 0.125 + 0.4 * 0.25, 0, 0, 0.25, 0]
    np.testing.assert_allclose(gae(rewards, values, MASK, gamma=0.5, gae_lambda=0.8), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_discounted_sum_of_temporal_differences_of_its_definition(seed):
    random = np.random.default_rng(seed)
    mask = random.random(12) < 0.6
    rewards, values, gamma, lam = random.normal(size=12), random.normal(size=12), 0.9, 0.7
    r, v = rewards[mask], np.append(values[mask], 0.0)
    differences = r + gamma * v[1:] - v[:-1]
    n = len(r)
    expected = [sum((gamma * lam) ** k * differences[t + k] for k in range(n - t)) for t in range(n)]
    np.testing.assert_allclose(gae(rewards, values, mask, gamma=gamma, gae_lambda=lam)[mask], expected, atol=1e-12)


def test_lambda_1_is_return_less_value_and_lambda_0_one_temporal_difference():
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=7), random.normal(size=7)
    returns = returns_to_go(rewards, MASK, 0.9)
    np.testing.assert_allclose(gae(rewards, values, MASK, gamma=0.9, gae_lambda=1.0)[MASK], (returns - values)[MASK])
    (first, *_) = gae(rewards, values, MASK, gamma=0.9, gae_lambda=0.0)[MASK]
    assert first == pytest.approx(rewards[1] + 0.9 * values[2] - values[1])


@pytest.mark.parametrize("bad", [100.0, math.nan])
def test_values_and_rewards_at_given_tokens_change_nothing(bad):
    rewards, values = np.arange(7.0), np.arange(7.0) / 2
    expected = gae(rewards, values, MASK, gamma=0.9, gae_lambda=0.9)
    rewards[~MASK], values[~MASK] = bad, bad
    np.testing.assert_array_equal(gae(rewards, values, MASK, gamma=0.9, gae_lambda=0.9), expected)


def test_ppo_gives_the_reward_at_the_last_trained_token_less_k1_at_each():
    ppo = PolicyGradient(PpoOptions(kl_coef=0.5, gamma=1.0, gae_lambda=1.0))
    proximal, ref = np.float32([0, -1, -2, 0, 0, -3, 0]), np.float32([0, -1.5, -2, 0, 0, -2, 0])
    scores = RowScores(MASK, proximal, proximal, ref, np.float32([0, 0.5, 0.25, 0, 0, 0.75, 0]))
    # k1: 0.5, 0, -1; rewards -0.25, 0, 2 + 0.5; returns 2.25, 2.5, 2.5
    np.testing.assert_allclose(ppo.token_advantages(2.0, scores)[MASK], [1.75, 2.25, 1.75], atol=1e-6)


def test_a_row_whose_trajectory_was_dropped_gets_no_advantage():
    ppo = PolicyGradient(PpoOptions())
    scores = RowScores(np.zeros(3, bool), np.zeros(3, np.float32), values=np.ones(3, np.float32))
    assert ppo.token_advantages(2.0, scores).tolist() == [0, 0, 0]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_and_its_gradient_are_those_of_a_float64_loop(clip):
    random = np.random.default_rng(3)
    values, start, returns = (random.normal(0, 0.4, (3, 6)) for _ in range(3))
    mask = random.random((3, 6)) < 0.7

    def by_hand(values):
        total = 0.0
        for place in zip(*np.nonzero(mask), strict=True):
            error = (values[place] - returns[place]) ** 2
            if clip is not None:
                held = start[place] + min(max(values[place] - start[place], -clip), clip)
                error = max(error, (held - returns[place]) ** 2)
            total += error / 2
        return total

    inputs = [torch.tensor(np.where(mask, array, np.nan)) for array in (values, start, returns)]
    inputs[0].requires_grad_()
    loss = value_loss(*inputs, torch.tensor(mask), clip).sum()
    loss.backward()
    assert loss.item() == pytest.approx(by_hand(values), abs=1e-12)
    for place in np.ndindex(values.shape):
        up, down = values.copy(), values.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        assert inputs[0].grad[place].item() == pytest.approx((by_hand(up) - by_hand(down)) / 2e-6, abs=1e-6)
