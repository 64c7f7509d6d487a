"""The tasks that Laminar and TRL both play in `benchmarks.trl`: their rows, and a reward that notes when it judged whom.

Few-shot sums (`rollout.addition`), of which a share may be replaced by long ones: counts that the model carries on until
its budget ends; or the digits of `rollout.tiny`. Standard library only, since TRL's process and our workers both import it;
a row says where to note.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

LONG_SHARE = 0.05
COLUMNS = ("answer", "digit", "long", "log")
"""Beside `prompt`; empty where a row has none."""


def with_long_tails(rows: Sequence[Mapping[str, str]], share: float, seed: int) -> list[dict[str, str]]:
    """The rows, evenly chosen ones replaced by counts.

    Args:
        rows: columns `prompt` and `answer`.
        share: of rows that are replaced.
        seed: of the choice.
    """
    draw = random.Random(seed)
    long = set(draw.sample(range(len(rows)), round(share * len(rows))))
    return [_count(draw.randint(1, 50)) if place in long else dict(row) for place, row in enumerate(rows)]


def _count(first: int) -> dict[str, str]:
    shown = ", ".join(str(first + place) for place in range(8))
    return {"prompt": f"{shown},", "answer": f"{first + 8},", "long": "1"}


def judge(row: Mapping[str, Any], completion: str) -> float:
    """1 for a sum whose text before the first newline is the answer, or a count that goes on rightly; else 0.

    A row with a `digit` is one of `rollout.tiny`, and judged as there.
    """
    text = completion.split("\n", 1)[0]
    if row.get("digit"):
        return sum(c.isdigit() and c >= row["digit"] for c in text) / len(text) if text else 0.0
    return float(text.strip().startswith(row["answer"]) if row.get("long") else text.strip() == row["answer"])


def note(row: Mapping[str, Any], completion: str, score: float) -> None:
    """Add a line to the file that the row's column `log` names, in one write, so that several processes may."""
    line = json.dumps({"at": time.time(), "long": bool(row.get("long")), "score": score, "characters": len(completion)})
    descriptor = os.open(row["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def score(prompt: Any, completion: str) -> float:
    """Our side's reward: `prompt.fields` is the row."""
    value = judge(prompt.fields, completion)
    note(prompt.fields, completion, value)
    return value


def score_batch(completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """TRL's side: columns of the data as keywords, one entry an answer."""
    values = []
    for place, completion in enumerate(completions):
        row = {name: columns[name][place] for name in COLUMNS}
        values.append(judge(row, completion))
        note(row, completion, values[-1])
    return values
