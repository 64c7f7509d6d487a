"""A plain synchronous GRPO loop: generate, score, train, in lock step, in one process. The oracle for `max_staleness = 0`.

Its training is written anew on plain PyTorch, sharing nothing with `trainer/`.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.seeds import prompt_order, trajectory_seed
from laminar.types import Prompt
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire
from rollout.tiny import reward

PROMPTS, GROUP, NEW_TOKENS, STOP = 8, 8, 8, [14]


@dataclass
class Step:
    token_ids: list[list[int]]
    mean_reward: float
    loss: float


def run_oracle(model_folder: Path, work: Path, num_steps: int, run_seed: int) -> list[Step]:
    """Train `num_steps` steps of the tiny recipe without filtering; what each step trained, and its loss."""
    rows = [json.loads(line) for line in (model_folder / "train.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    engine = TorchEngine(model_folder, "0.0")
    steps = []
    for step in range(num_steps):
        outputs, rewards, prompts = [], [], []
        for index in range(PROMPTS):
            admission = step * PROMPTS + index
            epoch, place = divmod(admission, len(rows))
            row = rows[prompt_order(0, epoch, len(rows), True)[place]]
            prompts.append(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"])
            for member in range(GROUP):
                name = f"{admission:08d}-{member:03d}"
                sampling = SamplingWire(NEW_TOKENS, stop_token_ids=STOP, sampling_seed=trajectory_seed(run_seed, name, 0))
                outputs.append(engine.add(GenerateWire(prompts[-1], name, sampling)))
        while engine.book.has_work:
            engine.step()
        for number, output in enumerate(outputs):
            admission = step * PROMPTS + number // GROUP
            row = rows[prompt_order(0, admission // len(rows), len(rows), True)[admission % len(rows)]]
            rewards.append(reward(Prompt("", row["prompt"], row), tokenizer.decode(output.ids, skip_special_tokens=True)))
        loss = train(model, adam, [(prompts[i // GROUP], output) for i, output in enumerate(outputs)], rewards)
        steps.append(Step([output.ids for output in outputs], statistics.mean(rewards), loss))
        folder = work / f"version-{step + 1}"
        model.save_pretrained(folder)
        save_file(dict(model.named_parameters()), folder / "model.safetensors")
        engine.book.update_weights(folder, f"0.{step + 1}", flush_cache=True)
    engine.close()
    return steps


def train(model, adam, rows, rewards) -> float:
    """One token-mean GRPO update, one row at a time."""
    num_tokens = sum(len(output.ids) for _, output in rows)
    adam.zero_grad()
    total = 0.0
    for number, (prompt, output) in enumerate(rows):
        siblings = rewards[number // GROUP * GROUP :][:GROUP]
        spread = statistics.stdev(siblings)
        advantage = (rewards[number] - statistics.mean(siblings)) / (spread + 1e-6) if spread > 1e-6 else 0.0
        logits = model(torch.tensor([prompt + output.ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(output.ids)[:, None])[:, 0]
        ratio = (logprobs - torch.tensor(output.logprobs)).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / num_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    return total
