"""Cases D04, D05, D06 and D10: token losses and their aggregation, with gradients."""

import itertools
import math

import pytest
import torch

from trainer.algorithms.loss import (
    clipped_policy_loss,
    loss_denominator,
    loss_numerator,
    non_finite_row,
)

LOSSES = torch.tensor([[0.5, 1.0, 1.5, 2.0, 0.25], [2.2, 0, 0, 0, 0], [0.2, 0.4, 0, 0, 0], [1.0, 3.0, 2.0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]], dtype=torch.bool)
D04 = {"token_mean": 1.105, "sequence_mean": 1.2625, "sequence_sum": 2.7625, "fixed_denominator": 0.3453125}
SPLITS = [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2], [3]], [[3, 0], [], [2, 1]]]


def aggregate(losses, mask, aggregation, split, fixed_tokens=None):
    tokens = mask.sum(dim=1)
    denominator = loss_denominator(
        aggregation,
        num_tokens=int(tokens.sum()),
        num_sequences=int((tokens > 0).sum()),
        fixed_tokens=fixed_tokens,
    )
    return sum(loss_numerator(losses[rows], mask[rows], aggregation, tokens[rows]) for rows in split) / denominator


@pytest.mark.parametrize(("aggregation", "split"), list(itertools.product(D04, SPLITS)))
def test_no_split_changes_the_loss_or_its_gradient(aggregation, split):
    losses = LOSSES.clone().requires_grad_()
    loss = aggregate(losses, MASK, aggregation, split, 8 if aggregation == "fixed_denominator" else None)
    loss.backward()
    assert loss.item() == pytest.approx(D04[aggregation], abs=1e-5)
    weight = {
        "token_mean": torch.full((4, 1), 1 / 10),
        "sequence_mean": 1 / (4 * MASK.sum(dim=1, keepdim=True)),
        "sequence_sum": torch.full((4, 1), 1 / 4),
        "fixed_denominator": torch.full((4, 1), 1 / 32),
    }[aggregation]
    torch.testing.assert_close(losses.grad, torch.where(MASK, weight, 0.0))


def test_a_sequence_in_two_rows_weighs_as_one_in_a_sequence_mean():
    losses, mask = (
        torch.tensor([[1.0, 3.0], [5.0, 0.0], [9.0, 9.0]]),
        torch.tensor([[True, True], [True, False], [True, True]]),
    )
    numerator = loss_numerator(losses, mask, "sequence_mean", torch.tensor([3, 3, 2]))
    assert numerator.item() / loss_denominator("sequence_mean", num_tokens=5, num_sequences=2) == pytest.approx(6.0)


D05_LOSSES = torch.tensor([[0.4, -0.2, 0.6, 0, 0], [1.0] * 5, [-0.3, 0.9, 0, 0, 0]])
D05_MASK = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("excluded", "expected"), [([0, 0, 0], 0.64), ([0, 1, 0], 0.28), ([1, 1, 1], 0.0)], ids=["none", "truncated", "all"]
)
def test_excluded_rows_leave_numerator_and_denominator_alike(excluded, expected):
    losses = D05_LOSSES.clone().requires_grad_()
    mask = D05_MASK & ~torch.tensor(excluded, dtype=torch.bool)[:, None]
    loss = aggregate(losses, mask, "token_mean", [[0, 1, 2]])
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    if all(excluded):
        assert (losses.grad == 0).all()


def policy_loss(new, old, advantage, mask):
    rows = [torch.tensor([values]) for values in (new, old, advantage, mask)]
    rows[0].requires_grad_()
    result = clipped_policy_loss(*rows[:3], rows[3].bool(), clip_low=0.2, clip_high=0.2)
    loss = loss_numerator(result.losses, rows[3].bool(), "token_mean", torch.tensor([sum(mask)]))
    loss = loss / loss_denominator("token_mean", num_tokens=sum(mask), num_sequences=1)
    loss.backward()
    return loss.item(), rows[0].grad[0], result


@pytest.mark.parametrize("old", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [2.0, math.nan])
def test_values_at_masked_places_change_neither_loss_nor_gradient(old, advantage):
    loss, gradient, result = policy_loss([-0.5, -1.2, -0.9], [-0.7, -1.0, old], [1.5, -0.8, advantage], [1, 1, 0])
    torch.testing.assert_close(result.ratio[0, :2], torch.tensor([1.221403, 0.818731]), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.losses[0], torch.tensor([-1.8, 0.654985, 0]), atol=1e-5, rtol=0)
    assert loss == pytest.approx(-0.572508, abs=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([0, 0.327492, 0]), atol=1e-5, rtol=0)
    assert gradient[2] == 0
    assert result.clipped_high.tolist() == [[True, False, False]]
    assert not result.clipped_low.any()


def test_an_empty_mask_gives_zero_loss_and_zero_gradient():
    loss, gradient, _ = policy_loss([-0.5, math.nan], [math.nan, 1.0], [1.5, -0.8], [0, 0])
    assert loss == 0
    assert (gradient == 0).all()


def test_nan_at_an_unmasked_place_stays_visible():
    loss, _, result = policy_loss([-0.5, -1.2], [-0.7, math.nan], [1.5, -0.8], [1, 1])
    assert math.isnan(loss)
    assert non_finite_row(result.losses, torch.tensor([[True, True]])) == 0
    assert non_finite_row(result.losses, torch.tensor([[True, False]])) is None


def test_clip_higher_gives_more_room_upwards_than_downwards():
    new = torch.log(torch.tensor([[1.25, 1.3, 0.85, 0.75]]))
    result = clipped_policy_loss(
        new, torch.zeros(1, 4), torch.tensor([[1.0, 1, -1, -1]]), torch.ones(1, 4).bool(), clip_low=0.2, clip_high=0.28
    )
    assert result.clipped_high.tolist() == [[False, True, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False, True]]
    torch.testing.assert_close(result.losses, torch.tensor([[-1.25, -1.28, 0.85, 0.8]]))


def test_an_extreme_ratio_stays_finite_in_float32():
    loss, gradient, _ = policy_loss([0.0], [-500.0], [-1.0], [1])
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
