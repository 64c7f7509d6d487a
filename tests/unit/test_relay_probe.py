"""The probe: fixed tokens, and how far two models are apart on them."""

import math

import pytest

from laminar.errors import RelayError
from relay.probe import NARROW_TOLERANCE, WIDE_TOLERANCE, Probe, default_tolerance, probe_tokens


def test_the_tokens_are_the_same_each_time_and_lie_in_the_vocabulary():
    tokens = probe_tokens(128)
    assert tokens == probe_tokens(128)
    assert len(tokens) == 32
    assert 0 <= min(tokens) <= max(tokens) < 128
    assert len(set(tokens)) > 16


def test_the_difference_is_the_mean_of_absolute_differences_in_nats():
    probe = Probe((1, 2, 3, 4), (-1.0, -2.0, -3.0))
    assert probe.difference([-1.5, -2.0, -2.0]) == pytest.approx(0.5)  # (0.5 + 0 + 1) / 3


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, -2.0, -3.0, -4.0], [-1.0, math.nan, -3.0], [-1.0, -math.inf, -3.0]])
def test_what_cannot_be_compared_is_infinitely_far(logprobs):
    assert Probe((1, 2, 3, 4), (-1.0, -2.0, -3.0)).difference(logprobs) == math.inf


@pytest.mark.parametrize(
    ("token_ids", "logprobs"), [((1,), ()), ((1, 2), (-1.0, -2.0)), ((1, 2), (math.nan,)), ((1, 2), (-math.inf,))]
)
def test_a_probe_that_proves_nothing_is_refused(token_ids, logprobs):
    with pytest.raises(RelayError):
        Probe(token_ids, logprobs)


def test_narrow_number_types_may_differ_more():
    assert default_tolerance(["F32", "F64"]) == WIDE_TOLERANCE
    assert default_tolerance(["F32", "BF16"]) == NARROW_TOLERANCE > WIDE_TOLERANCE
