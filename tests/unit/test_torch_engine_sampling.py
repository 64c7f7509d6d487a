"""The draw: noise, inverse CDF, temperature, truncation (cases D07)."""

import math

import numpy as np
import pytest
import torch

from laminar.errors import EngineError
from rollout.engines.sampling import DrawRow, draw, uniform

LOGITS = [2.0, 1.0, 0.0, -1.0]
D07 = {
    0.7: [-0.270674, -1.699245, -3.127817, -4.556388],
    1.0: [-0.440190, -1.440190, -2.440190, -3.440190],
    1.5: [-0.648333, -1.314999, -1.981666, -2.648333],
}


def expected_logprobs(temperature):
    """In float64, by the definition."""
    z = np.array(LOGITS) / temperature
    return z - np.log(np.exp(z).sum())


def draws(count, *, temperature=1.0, top_p=1.0, top_k=-1, seed=1):
    logits = torch.tensor([LOGITS] * count)
    return draw(logits, [DrawRow(temperature, top_p, top_k, seed, position) for position in range(count)])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_sampling_temperature(temperature):
    ids, logprobs = draws(200, temperature=temperature)
    assert set(ids) >= {0, 1}
    for token, logprob in zip(ids, logprobs, strict=True):
        assert logprob == pytest.approx(D07[temperature][token], abs=1e-5)


def test_tokens_are_drawn_in_proportion_to_the_tempered_softmax():
    count = 10000
    ids, _ = draws(count, temperature=2.0)
    for token, probability in enumerate(np.exp(expected_logprobs(2.0))):
        bound = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(ids.count(token) / count - probability) < bound


def test_temperature_zero_takes_the_best_token_and_reports_its_logprob_at_temperature_one():
    ids, logprobs = draws(5, temperature=0.0)
    assert ids == [0] * 5
    assert logprobs == pytest.approx([expected_logprobs(1.0)[0]] * 5, abs=1e-6)


def test_top_k_draws_only_from_the_largest_and_keeps_the_full_logprob():
    ids, logprobs = draws(300, temperature=2.0, top_k=2)
    assert set(ids) == {0, 1}
    assert logprobs[ids.index(1)] == pytest.approx(expected_logprobs(2.0)[1], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    # at temperature 1: 0.6439, 0.2369, 0.0871, 0.0321; 0.7 needs two tokens, 0.6 one
    assert set(draws(300, top_p=0.7)[0]) == {0, 1}
    assert set(draws(300, top_p=0.6)[0]) == {0}


def test_a_row_is_drawn_alike_whatever_other_rows_do():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    rows = [DrawRow(1.0 if i % 2 else 0.7, 0.9 if i % 3 else 1.0, -1, i, 10 + i) for i in range(20)]
    together = draw(logits.clone(), rows)
    alone = [draw(logits[i : i + 1].clone(), rows[i : i + 1]) for i in range(20)]
    assert together == ([ids[0] for ids, _ in alone], [logprobs[0] for _, logprobs in alone])


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]] * 500)
    ids, _ = draw(logits, [DrawRow(1.0, 1.0, -1, 9, position) for position in range(500)])
    assert set(ids) == {1, 3}


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(EngineError, match="broken"):
        draw(torch.tensor([[0.0, math.nan]]), [DrawRow(1.0, 1.0, -1, 0, 0)])


def test_noise_is_uniform_and_unrelated_between_neighbours():
    noise = uniform([7] * 4000, range(4000))
    assert noise.min() >= 0
    assert noise.max() < 1
    # standard errors: mean 0.0046, correlation 0.016; five of each
    assert abs(noise.mean() - 0.5) < 0.023
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.08
    assert abs(np.corrcoef(noise, uniform([8] * 4000, range(4000)))[0, 1]) < 0.08


def test_noise_is_fixed_for_ever():
    # by hand in arbitrary-precision integers, from the definition of SplitMix64
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (123, 45), (2**63 - 1, 100000)):
        word = mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask)
        assert uniform([seed], [position])[0] == (word >> 11) / 2**53
