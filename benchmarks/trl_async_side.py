"""TRL's asynchronous side of `benchmarks.trl`: its `AsyncGRPOTrainer` with our torch engine behind its two public hooks.

TRL's own rollout worker and weight transfer need vLLM on a GPU, so these shims stand in for them, with TRL's rules: groups
of one prompt, at most `max_staleness` steps' worth of answers in flight, advantages by group, the version at a group's start
as its version, generation paused (caches kept) while weights are sent after every step. The trainer, its queue, batches,
loss and staleness filter are TRL's. A third shim: its packed attention is a CUDA kernel from the hub; `tree_attention`
computes the same on a CPU, registered through `transformers.AttentionInterface`. A fourth: the trainer asks CUDA for the
GPU's name, for a metric; here it is told that nothing is known. Needs TRL and our package in one interpreter.
"""

import asyncio
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from benchmarks import trl_task
from benchmarks.tree_attention import attend
from laminar.types import SamplingParameters, WeightVersion
from rollout.engines.client import EngineClient
from rollout.engines.launch import EngineLaunch
from rollout.engines.process import EngineProcess

MAX_STALENESS = 4
START_SECONDS, CALL_SECONDS = 120.0, 120.0
STD_EPSILON = 1e-8


class Engine:
    """Our torch engine in a process of its own, and the thread whose event loop talks to it. TRL's `weight_transfer`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.number = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, coroutine: Any) -> Any:
        """Run it in the loop and wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_SECONDS)

    def init_weight_transfer(self) -> None:
        """Start the engine on the first weights."""
        launch = EngineLaunch(
            self._model, WeightVersion(0, 0), token="bench", run_id="bench", log=self._folder / "engine.log",
            max_running=64, max_cached_tokens=8192,
        )  # fmt: skip
        self._process = EngineProcess(launch)
        url = self.call(self._process.start(START_SECONDS))
        self.client = EngineClient(url, token="bench", run_id="bench", version=WeightVersion(0, 0))

    def pause(self) -> None:
        """Stand still, caches kept."""
        self.call(self.client.pause("in_place"))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """By a file in shared memory."""
        self.number += 1
        folder = self._folder / f"weights-{self.number % 2}"
        folder.mkdir(exist_ok=True)
        for file in self._model.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in iterator}, folder / "model.safetensors")
        self.call(self.client.update_weights(folder, WeightVersion(0, self.number), flush_cache=False))

    def resume(self) -> None:
        """Go on."""
        self.call(self.client.resume())

    def destroy(self) -> None:
        """End the engine."""
        self.call(self.client.close())
        self.call(self._process.kill())


class Worker:
    """Plays groups on the engine, as TRL's own worker does on vLLM. TRL's `rollout_worker`."""

    def __init__(self, engine: Engine, task: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self._engine, self._task, self._rows = engine, task, rows
        self._tokenizer = AutoTokenizer.from_pretrained(task["model"])
        self._in_flight = asyncio.Semaphore(MAX_STALENESS * task["prompts_per_step"])
        self._version = 0
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=1024)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        """Begin to play."""
        self._producing = asyncio.run_coroutine_threadsafe(self._produce(), self._engine.loop)

    def stop(self) -> None:
        """End."""
        self._producing.cancel()

    def update_model_version(self, model_version: int) -> None:
        """Groups that begin from now on are of this version."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Fail if playing has failed."""
        if self._producing.done() and not self._producing.cancelled():
            self._producing.result()

    async def _produce(self) -> None:
        order = np.random.default_rng(self._task["seed"])
        group_id = 0
        async with asyncio.TaskGroup() as group:
            while True:
                for place in order.permutation(len(self._rows)):
                    await self._in_flight.acquire()
                    group.create_task(self._play(self._rows[place], group_id))
                    group_id += 1

    async def _play(self, row: dict[str, Any], group_id: int) -> None:
        version, size = self._version, self._task["group_size"]
        prompt = np.array(self._tokenizer(row["prompt"], add_special_tokens=False)["input_ids"], np.int32)
        try:
            answers = await asyncio.gather(*(self._generate(prompt, group_id * size + member) for member in range(size)))
        finally:
            self._in_flight.release()
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in answers]
        rewards = np.array(trl_task.score_batch(texts, **{name: [row[name]] * size for name in trl_task.COLUMNS}))
        advantages = (rewards - rewards.mean()) / (rewards.std() + STD_EPSILON)
        for (ids, logprobs), advantage, reward in zip(answers, advantages, rewards, strict=True):
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([prompt, ids]),
                completion_mask=np.concatenate([np.zeros(len(prompt), np.int64), np.ones(len(ids), np.int64)]),
                old_log_probs=np.concatenate([np.zeros(len(prompt), np.float32), logprobs]),
                advantage=float(advantage),
                model_version=version,
                group_id=group_id,
                metrics={"reward": float(reward)},
                enqueued_at=time.time(),
            )
            await asyncio.to_thread(self.rollout_buffer.put, sample)

    async def _generate(self, prompt: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        sampling = SamplingParameters(
            1.0, self._task["max_new_tokens"], seed, stop_token_ids=tuple(self._task["stop_token_ids"])
        )
        generation = await self._engine.client.generate(prompt, sampling, uuid.uuid4().hex)
        logprobs = [segment.logprobs for segment in generation.segments if segment.logprobs is not None]
        return generation.token_ids(), np.concatenate(logprobs)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes steps and staleness; ends the training when its time is over."""

    def __init__(self, told: Path, seconds: float) -> None:
        self._told, self._seconds, self._started = told, seconds, 0.0

    def begin(self) -> None:
        """The engine listens: what follows is training."""
        self._started = time.time()
        self._note({"step": 0})

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """One step is done."""
        self._note({"step": state.global_step})
        if time.time() - self._started > self._seconds:
            control.should_training_stop = True

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """What TRL says about staleness, and of the answers that it trained."""
        names = ("sample/staleness_mean", "sample/staleness_max", "sample/dropped_stale_total", "sample/trained_tokens_mean")
        self._note({name: logs[name] for name in names if logs.get(name) is not None})

    def _note(self, line: dict[str, Any]) -> None:
        with self._told.open("a") as file:
            file.write(json.dumps(line | {"at": time.time()}) + "\n")


def main() -> None:
    """Train as the file says."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    folder = Path(task["told"]).parent
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    settings = AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=task["prompts_per_step"] * task["group_size"],
        token_budget=0,
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        max_staleness=MAX_STALENESS,
        learning_rate=task["learning_rate"],
        adam_beta2=0.99,
        epsilon=0.2,
        epsilon_high=task["clip_high"],
        max_grad_norm=1.0,
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
    )
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    engine = Engine(Path(task["model"]), folder)
    watch = Watch(Path(task["told"]), task["seconds"])
    worker = Worker(engine, task, rows)
    trainer = AsyncGRPOTrainer(
        model=task["model"],
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
        rollout_worker=worker,
        weight_transfer=engine,
    )
    AttentionInterface.register(TREE_ATTENTION, attend)
    engine.init_weight_transfer()
    engine.init_weight_transfer = watch.begin  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        worker.stop()
        engine.destroy()


if __name__ == "__main__":
    main()
