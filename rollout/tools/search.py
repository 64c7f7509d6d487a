"""Tool `search`: the passages of a small local corpus that fit a query best, by BM25.

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), section 3; k1 = 1.5, b = 0.75.
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from laminar.config.section import Section
from laminar.errors import ConfigError
from rollout.tools.base import Tool, tool_from_function

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75


class Corpus:
    """Passages, indexed by word."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = tuple(passages)
        self._counts = [Counter(_words(passage)) for passage in passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(1, len(self._lengths))
        self._holders: dict[str, list[int]] = {}
        for index, counts in enumerate(self._counts):
            for word in counts:
                self._holders.setdefault(word, []).append(index)

    def best(self, query: str, count: int) -> list[str]:
        """At most `count` passages that share a word with the query, best first; of equals, the earlier one."""
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            holders = self._holders.get(word, [])
            rarity = math.log(1 + (len(self._passages) - len(holders) + 0.5) / (len(holders) + 0.5))
            for index in holders:
                times = self._counts[index][word]
                norm = _K1 * (1 - _B + _B * self._lengths[index] / self._mean_length)
                scores[index] = scores.get(index, 0.0) + rarity * times * (_K1 + 1) / (times + norm)
        ranked = sorted(scores, key=lambda index: (-scores[index], index))
        return [self._passages[index] for index in ranked[:count]]


class Search:
    """Gives one tool, `search(query)`."""

    tool_name = "search"

    class Options(Section):
        """Settings of `search`."""

        path: str
        """JSONL file with a column `text`, one passage a line; a relative path counts from the working folder."""
        num_results: int = Field(3, ge=1)
        """Passages in one answer."""

        @field_validator("path")
        @classmethod
        def _is_file(cls, path: str) -> str:
            if not Path(path).is_file():
                raise ValueError("there is no file of that name; give a JSONL file, from the working folder")
            return path

    def __init__(self, options: Options) -> None:
        self._options = options

    async def open(self) -> Sequence[Tool]:
        """The tool."""
        load_corpus(self._options.path)
        return [replace(tool_from_function(Search.search), call=self.search)]

    async def close(self) -> None:
        """The corpus stays for the next episode."""

    def search(self, query: str) -> str:
        """Find passages about something.

        Args:
            query: a few words.
        """
        found = load_corpus(self._options.path).best(query, self._options.num_results)
        return "\n".join(f"[{number}] {passage}" for number, passage in enumerate(found, 1)) or "nothing found"


@functools.cache
def load_corpus(path: str) -> Corpus:
    """The corpus in a file; read once.

    Raises:
        ConfigError: it cannot be read, or a line has no text.
    """
    try:
        rows: list[Any] = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
        return Corpus([str(row["text"]) for row in rows])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"search corpus {path}: {error!r}; give a JSONL file with a column `text`") from error


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
