"""Recently prefilled prompts, so that a group's later siblings need no prefill.

Invariants: an entry is used only for exactly the same ids under the same weights (the key holds both); the sum of its
tokens stays within the bound; the least recently used goes first. This module does not know how keys and values are laid
out.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefilled prompt: its keys and values, and the last hidden state (H,) from which the first token is drawn."""

    num_tokens: int
    key_values: torch.Tensor
    last_hidden: torch.Tensor


class PrefixCache:
    """Least-recently-used prompts.

    Args:
        max_tokens: bound on the sum of their lengths.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[Hashable, Prefix] = OrderedDict()
        self.num_tokens = 0

    def get(self, key: Hashable) -> Prefix | None:
        """The entry, now the most recently used, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of that length may be stored at all."""
        return num_tokens <= self._max_tokens

    def put(self, key: Hashable, prefix: Prefix) -> None:
        """Store, dropping the least recently used ones to keep the bound."""
        while self.num_tokens + prefix.num_tokens > self._max_tokens:
            self.drop_oldest()
        self._entries[key] = prefix
        self.num_tokens += prefix.num_tokens

    def drop_oldest(self) -> bool:
        """Drop one entry; False if there is none."""
        if not self._entries:
            return False
        _, prefix = self._entries.popitem(last=False)
        self.num_tokens -= prefix.num_tokens
        return True

    def clear(self) -> None:
        """Drop all."""
        self._entries.clear()
        self.num_tokens = 0
