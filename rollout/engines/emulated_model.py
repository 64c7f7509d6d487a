"""A model that is none: tokens, log-probs and answer lengths as functions of numbers, for engines that only pretend.

Invariants:
- a token is a function of (seed, its position, the context's first token); it never depends on the batch, the replica, or on
  how often the answer was interrupted;
- a log-prob is a function of (weights file, token, its position): after a swap all log-probs move;
- an answer's length is drawn once from the distribution, by (seed, where the answer begins), so that two runs with the same
  seeds have the same lengths (common random numbers). Where it begins is read off the context: what this seed would have
  drawn there was drawn. With temperature 0 the seed does not count, and an answer ends by its budget only.

It knows no time and no scheduling.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from laminar.errors import EngineError
from laminar.simulate.timings import Lengths
from rollout.engines.weights_file import WEIGHTS_NAME, TensorForms, check_same_forms, read_forms

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_GREEDY_SEED = 0
_LOWEST_LOGPROB = 3.0
NO_END = 1 << 60
"""Length of an answer that only its budget ends."""


class EmulatedModel:
    """Stands for the checkpoint in a folder: its vocabulary, its end ids, and a fingerprint of its weights.

    Args:
        folder: holds `config.json` and a whole `model.safetensors`.
        lengths: of answers.

    Raises:
        EngineError: if it is no checkpoint.
    """

    def __init__(self, folder: Path, lengths: Lengths) -> None:
        self._lengths = lengths
        self._forms: TensorForms | None = None
        self.vocabulary_size, self.end_ids, self.max_tokens = _read_config(folder)
        ordinary = [token for token in range(self.vocabulary_size) if token not in self.end_ids]
        if not ordinary or not self.end_ids:
            raise EngineError(f"{folder}: an emulated model needs an end id and other ids")
        self._ordinary = np.array(ordinary, np.int64)
        self.end_id = min(self.end_ids)
        self.swap(folder)

    def swap(self, folder: Path) -> None:
        """Stand for other weights.

        Raises:
            EngineError: if the file is not whole, or holds other tensors than the first one.
        """
        forms = read_forms(folder)
        if self._forms is not None:
            check_same_forms(self._forms, forms, str(folder))
        self._forms = forms
        self._weights = np.uint64(xxhash.xxh3_64_intdigest((folder / WEIGHTS_NAME).read_bytes()))

    def key_of(self, seed: int, temperature: float, first_token: int) -> np.uint64:
        """What the noise of one request hangs on."""
        drawn_by = seed if temperature else _GREEDY_SEED
        return np.uint64(xxhash.xxh3_64_intdigest(f"{drawn_by},{first_token}".encode()))

    def tokens(self, keys: UInt64Array, positions: Int64Array) -> Int64Array:
        """The token (N,) that each key draws at each position; never an end id."""
        noise = mixed(keys + positions.astype(np.uint64) * _STEP)
        return self._ordinary[noise % np.uint64(len(self._ordinary))]

    def logprobs(self, tokens: Int64Array, positions: Int64Array) -> npt.NDArray[np.float64]:
        """Log-prob (N,) of each token at its position under the present weights, in (-3, 0)."""
        noise = mixed(self._weights ^ mixed(tokens.astype(np.uint64) * _STEP + positions.astype(np.uint64)))
        return -_LOWEST_LOGPROB * (noise >> np.uint64(11)).astype(np.float64) / 2.0**53

    def num_drawn(self, ids: Sequence[int], key: np.uint64) -> int:
        """How many tokens at the context's end this request has drawn already."""
        context = np.array(ids, np.int64)
        differs = np.flatnonzero(context != self.tokens(np.full(len(context), key), np.arange(len(context))))
        return len(context) - 1 - int(differs[-1]) if len(differs) else len(context) - 1

    def answer_length(self, key: np.uint64, begin: int, temperature: float) -> int:
        """Tokens of the answer that begins at this position, its end id included."""
        if not temperature:
            return NO_END
        noise = mixed(np.array([key ^ np.uint64(begin + 1)], np.uint64))[0]
        return self._lengths.quantile(float(noise >> np.uint64(11)) / 2.0**53)


def mixed(values: UInt64Array) -> UInt64Array:
    """Each value's bits, well mixed (splitmix64's finalizer)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _read_config(folder: Path) -> tuple[int, frozenset[int], int]:
    """Vocabulary size, end ids, and the longest context."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        generation = folder / "generation_config.json"
        more = json.loads(generation.read_text("utf-8")) if generation.is_file() else {}
        ends = [*_listed(config.get("eos_token_id")), *_listed(more.get("eos_token_id"))]
        return int(config["vocab_size"]), frozenset(ends), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{folder} holds no usable config.json: {error!r}") from error


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
