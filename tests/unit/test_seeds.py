"""Seeds (case D30 as far as it goes here): the digests are computed by hand."""

import hashlib

import numpy as np
import pytest

from laminar.errors import InvariantError
from laminar.seeds import prompt_order, trajectory_seed
from laminar.types import trajectory_id


def seeds(run_seed: int, attempt: int = 0) -> list[int]:
    """5 prompts, 4 samples each."""
    return [
        trajectory_seed(run_seed, trajectory_id(f"{group:08d}", member), attempt)
        for group in range(5)
        for member in range(4)
    ]


def test_twenty_requests_get_twenty_seeds() -> None:
    assert len(set(seeds(run_seed=7))) == 20


def test_the_same_run_seed_gives_the_same_seeds() -> None:
    assert seeds(run_seed=7) == seeds(run_seed=7)


def test_another_run_seed_changes_every_seed() -> None:
    assert not set(seeds(run_seed=7)) & set(seeds(run_seed=8))


def test_another_attempt_changes_every_seed() -> None:
    assert not set(seeds(run_seed=7, attempt=0)) & set(seeds(run_seed=7, attempt=1))


def test_a_seed_is_half_the_digest_of_its_names() -> None:
    digest = hashlib.blake2b(b"sampling/7/1/00000003-002", digest_size=8).digest()
    assert trajectory_seed(7, "00000003-002", 1) == int.from_bytes(digest, "little") // 2


def test_a_seed_fits_a_signed_64_bit_integer() -> None:
    assert all(0 <= seed < 2**63 for seed in seeds(run_seed=2**40))
    assert max(seeds(run_seed=0)).bit_length() > 32


def test_no_two_names_run_into_one() -> None:
    assert trajectory_seed(1, "1/x", 1) != trajectory_seed(1, "x", 11)
    assert trajectory_seed(11, "x", 1) != trajectory_seed(1, "x", 11)


@pytest.mark.parametrize("num_prompts", [1, 2, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_holds_every_prompt_once(num_prompts: int, shuffle: bool) -> None:
    order = prompt_order(3, 0, num_prompts, shuffle)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(num_prompts))


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    assert prompt_order(3, 5, 4, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_order_differs_by_epoch_and_by_data_seed() -> None:
    orders = {
        tuple(prompt_order(data_seed, epoch, 50, shuffle=True).tolist()) for data_seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_sorts_the_raw_output_of_pcg64() -> None:
    """PCG64's raw stream is kept stable by NumPy; the shuffles of `Generator` are not."""
    key = int.from_bytes(hashlib.blake2b(b"prompts/3/2", digest_size=8).digest(), "little")
    raw = [int(np.random.PCG64(key).random_raw(6)[i]) for i in range(6)]
    assert prompt_order(3, 2, 6, shuffle=True).tolist() == sorted(range(6), key=raw.__getitem__)


def test_the_order_of_a_known_seed_stays_as_it_is() -> None:
    """A resume must find the order that the run began with, whatever was upgraded in between."""
    assert prompt_order(0, 0, 8, shuffle=True).tolist() == [7, 1, 0, 3, 5, 2, 6, 4]


def test_every_place_is_about_equally_likely() -> None:
    """First place of 4 over 4000 orders: 1000 each, standard deviation 27."""
    first = np.bincount([prompt_order(seed, 0, 4, shuffle=True)[0] for seed in range(4000)], minlength=4)
    assert np.all(np.abs(first - 1000) < 5 * 27.4)


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(InvariantError, match="num_prompts 0"):
        prompt_order(0, 0, 0, shuffle=True)
