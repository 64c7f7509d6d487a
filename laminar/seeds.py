"""Where randomness comes from: every seed is a keyed hash of names, never of a process, a clock or an order of arrival.

Sampling noise hangs on the run seed, the order of prompts on the data seed; neither touches the other.
Equal on every machine, Python and NumPy version: blake2b, and the raw output of PCG64, are fixed.
"""

import hashlib

import numpy as np

from laminar.errors import InvariantError
from laminar.types import Int32Array


def trajectory_seed(run_seed: int, trajectory_id: str, attempt: int) -> int:
    """Seed of one attempt at a trajectory's sampling noise; a new attempt draws anew.

    Returns:
        63 bits: a non-negative signed 64-bit integer, as engines take it.
    """
    return _hash64(f"sampling/{run_seed}/{attempt}/{trajectory_id}") >> 1


def prompt_order(data_seed: int, epoch: int, num_prompts: int, shuffle: bool) -> Int32Array:
    """The order of the prompts in one pass over the data.

    Returns:
        (num_prompts,) int32: prompt indices, each once.

    Raises:
        InvariantError: if there is no prompt.
    """
    if num_prompts < 1:
        raise InvariantError(f"num_prompts {num_prompts} must be 1 or more")
    if not shuffle:
        return np.arange(num_prompts, dtype=np.int32)
    keys = np.random.PCG64(_hash64(f"prompts/{data_seed}/{epoch}")).random_raw(num_prompts)
    return np.argsort(keys, kind="stable").astype(np.int32)


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
