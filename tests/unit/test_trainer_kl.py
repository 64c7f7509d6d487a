"""Case D08: each KL estimator's value, and the gradient that each setting is documented to give, in expectation."""

import numpy as np
import pytest
import torch

from trainer.algorithms.kl import kl_loss_tokens, kl_tokens

P, Q, BEHAVIOUR = ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2])
TRUE = [0.346243, -0.220389, -0.125854]
OTHER_DIRECTION = [0.3, -0.2, -0.1]
MASK = torch.ones(3, 1).bool()


def expected(behaviour, estimator, gradient):
    """Value and gradient with respect to the logits, averaged over every token with its probability under `behaviour`."""
    logits = torch.log(torch.tensor(P, dtype=torch.float64)).requires_grad_()
    logprobs = logits.log_softmax(-1)[:, None]
    ref, sampled_with = (torch.log(torch.tensor(x, dtype=torch.float64))[:, None] for x in (Q, behaviour))
    tokens = kl_loss_tokens(logprobs, ref, sampled_with, MASK, estimator=estimator, gradient=gradient)
    value = (torch.tensor(behaviour, dtype=torch.float64)[:, None] * tokens).sum()
    value.backward()
    return value.item(), logits.grad.numpy()


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.223805), ("k2", 0.265479), ("k3", 0.223805)])
@pytest.mark.parametrize("gradient", ["straight_through", "estimator"])
def test_the_value_is_the_named_estimators_whatever_the_gradient(estimator, value, gradient):
    assert expected(P, estimator, gradient)[0] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("behaviour", [P, BEHAVIOUR], ids=["on_policy", "off_policy"])
def test_straight_through_gives_the_true_gradient_on_and_off_policy(estimator, behaviour):
    np.testing.assert_allclose(expected(behaviour, estimator, "straight_through")[1], TRUE, atol=1e-6)


@pytest.mark.parametrize(
    ("behaviour", "estimator", "gradient"),
    [
        (P, "k1", [0, 0, 0]),
        (P, "k2", TRUE),
        (P, "k3", OTHER_DIRECTION),
        (BEHAVIOUR, "k2", [0.325970, -0.228658, -0.097312]),
    ],
)
def test_an_estimators_own_gradient_is_the_one_documented(behaviour, estimator, gradient):
    np.testing.assert_allclose(expected(behaviour, estimator, "estimator")[1], gradient, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_agree_with_their_formulas_in_float64_and_ignore_masked_places(estimator):
    random = np.random.default_rng(1)
    logprobs, ref = random.normal(-2, 1, (2, 5)), random.normal(-2, 1, (2, 5))
    mask = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], bool)
    d = logprobs - ref
    formula = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    logprobs[~mask], ref[~mask] = np.nan, -np.inf
    ours = kl_tokens(torch.tensor(logprobs), torch.tensor(ref), torch.tensor(mask), estimator).numpy()
    np.testing.assert_allclose(ours, np.where(mask, formula, 0), atol=1e-12)
