"""Data of a verifiers taskset: `python -m rollout.verifiers_data OUT_DIR --taskset ID --settings '{"split": "train"}'`.

Rows have the task's text as `prompt`, for people, and its data as `task`, for environment `verifiers`. Held-out rows are the
first ones of the taskset, training rows those behind them.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from rollout.tiny import write_jsonl
from rollout.verifiers_driver import load_environment


def make_rows(env: dict[str, Any], count: int, skip: int = 0) -> list[dict[str, Any]]:
    """Up to `count` rows of the environment's taskset, behind the first `skip`."""
    tasks = itertools.islice(load_environment(env).taskset, skip, skip + count)
    return [
        {"prompt": task.data.prompt_text or "(begins itself)", "task": task.data.model_dump(mode="json")} for task in tasks
    ]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Make prompts of a verifiers taskset.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--taskset", required=True, help="its id")
    parser.add_argument("--settings", default="{}", help="further settings of the taskset, as JSON")
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-heldout", type=int, default=100)
    arguments = parser.parse_args()
    env = {"taskset": {"id": arguments.taskset, **json.loads(arguments.settings)}}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    heldout = make_rows(env, arguments.num_heldout)
    train = make_rows(env, arguments.num_train, skip=arguments.num_heldout)
    for name, rows in (("heldout", heldout), ("train", train)):
        write_jsonl(arguments.folder / f"{name}.jsonl", rows)
    print(f"{arguments.folder}: {len(train)} prompts, {len(heldout)} held out")


if __name__ == "__main__":
    main()
