"""TRL's side of `benchmarks.trl`: its `GRPOTrainer`, unmodified, in a process of its own; told what to do by one JSON file.

Needs `trl==1.16.0` and `accelerate` in the interpreter that runs it, and nothing of ours but `trl_task`. Writes a line
for the start of training and one after every step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import trl_task


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes steps; ends the training when its time is over."""

    def __init__(self, told: Path, seconds: float) -> None:
        self._told, self._seconds, self._started = told, seconds, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The model is loaded, nothing is generated."""
        self._started = time.time()
        self._note(0)

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """One step is done."""
        self._note(state.global_step)
        if time.time() - self._started > self._seconds:
            control.should_training_stop = True

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """What TRL says of the answers that it trained."""
        if "completions/mean_length" in logs:
            self._write({"sample/trained_tokens_mean": logs["completions/mean_length"]})

    def _note(self, step: int) -> None:
        self._write({"step": step, "at": time.time()})

    def _write(self, line: dict[str, float]) -> None:
        with self._told.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train as the file says."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=str(Path(task["told"]).parent / "trl"),
        per_device_train_batch_size=task["prompts_per_step"] * task["group_size"],
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        beta=0.0,
        epsilon_high=task["clip_high"],
        max_grad_norm=1.0,
        temperature=1.0,
        max_steps=100_000,
        seed=task["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )
    GRPOTrainer(
        model=task["model"],
        reward_funcs=trl_task.score_batch,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Watch(Path(task["told"]), task["seconds"])],
    ).train()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
