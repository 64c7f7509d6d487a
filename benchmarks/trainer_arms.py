"""The sides of `benchmarks.trainer`: our step, a plain PyTorch loop of the same arithmetic, and TRL's step.

All train the same trajectories with the same loss (GRPO, token mean, clip 0.2 and 0.28), float32, one thread; none
generates. Ours is the whole `train_step`: advantages, plan, rows, updates, metrics. The plain loop is given our
micro-batches, as tensors, and does what they need and no more: forward, log-probs and entropy at answers, loss, backward,
clip, AdamW. TRL is its `GRPOTrainer.training_step` on what its own generation would have put into its buffer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from laminar.config.root import LaminarConfig
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer.batches import Layout
from trainer.engine import TrainerEngine
from trainer.packing import PackedRows, pack_rows
from trainer.plan import build_rows, plan_step
from trainer.ranks import Ranks
from trainer.session import build_algorithm
from trainer.step import train_step

Group = tuple[Trajectory, ...]
LEARNING_RATE, MAX_NORM, BETAS = 1e-4, 1.0, (0.9, 0.99)
PROMPT_TOKENS, LONGEST = 48, 384


def write_model(folder: Path, *, vocabulary: int, hidden: int, layers: int) -> Path:
    """A random Llama and a tokenizer of as many words."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder


def make_groups(vocabulary: int, *, prompts: int, group_size: int, seed: int = 0) -> list[Group]:
    """Groups whose answers have long-tailed lengths: log-normal with median 40 and sigma 1, from 4 to `LONGEST` tokens."""
    random, groups = np.random.default_rng(seed), []
    for place in range(prompts):
        prompt, members = given(random.integers(2, vocabulary, PROMPT_TOKENS)), []
        for member in range(group_size):
            length = int(np.clip(random.lognormal(np.log(40), 1.0), 4, LONGEST))
            logprobs = random.normal(-np.log(vocabulary), 0.1, length)
            answer = sampled(random.integers(2, vocabulary, length), logprobs, WeightVersion(0, 0))
            members.append(
                Trajectory(
                    f"{place:08d}-{member:03d}", f"{place:08d}", "p", member, 0, Purpose.TRAIN,
                    SamplingParameters(1.0, LONGEST, 0), (Chain((prompt, answer)),), FinishReason.STOP,
                    float(random.integers(0, 4)),
                )
            )  # fmt: skip
        groups.append(tuple(members))
    return groups


def make_config(folder: Path, *, max_tokens: int, share_prompts: bool) -> LaminarConfig:
    """Settings of our side."""
    return LaminarConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"path": "-"},
            "staleness": {"max_staleness": "unbounded"},
            "trainer": {
                "learning_rate": LEARNING_RATE,
                "max_grad_norm": MAX_NORM,
                "max_tokens_per_micro_batch": max_tokens,
                "share_prompts": share_prompts,
            },
        }
    )


class Ours:
    """`train_step`."""

    def __init__(self, config: LaminarConfig, ranks: Ranks, groups: Sequence[Group]) -> None:
        self._algorithm, self._groups, self._step = build_algorithm(config), groups, 0
        self._engine = TrainerEngine(config, ranks, self._algorithm.needs)

    def step(self) -> float:
        """Train once; the loss."""
        self._step += 1
        report = train_step(self._engine, self._algorithm, self._groups, self._step)
        assert report.skipped_reason is None, report.skipped_reason
        return report.metrics["train/loss"]


class Plain:
    """A loop over the micro-batches that our plan makes."""

    def __init__(self, config: LaminarConfig, groups: Sequence[Group]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
        algorithm, trainer = build_algorithm(config), config.trainer
        plan = plan_step(
            groups,
            algorithm,
            mini_batches=1,
            max_tokens=trainer.max_tokens_per_micro_batch,
            num_ranks=1,
            layout=Layout.PADDED,
        )
        rows = build_rows(plan.rows, [t for group in groups for t in group], 0)
        (mini_batch,) = plan.mini_batches
        self._denominator = mini_batch.denominator
        self._batches: list[PackedRows] = [
            pack_rows([rows[i] for i in part], share_prompts=False, device=torch.device("cpu"))
            for part in mini_batch.ranks[0]
        ]

    def step(self) -> float:
        """Train once; the loss."""
        total = 0.0
        for batch in self._batches:
            loss = self._loss(batch) / self._denominator
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._adam.step()
        self._adam.zero_grad()
        return total

    def _loss(self, batch: PackedRows) -> Tensor:
        hidden = self._model.model(input_ids=batch.token_ids[:, :-1], use_cache=False).last_hidden_state
        mask = batch.mask[:, 1:]
        table = self._model.lm_head(hidden[mask]).log_softmax(-1)
        with torch.no_grad():
            float(-(table.exp() * table).sum(-1).mean())
        logprobs = table.gather(1, batch.token_ids[:, 1:][mask][:, None])[:, 0]
        advantages = batch.advantage[:, None].expand_as(mask)[mask]
        ratio = (logprobs - batch.rollout_logprobs[:, 1:][mask]).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)).sum()


class Trl:
    """`GRPOTrainer.training_step` and its optimizer, with a full buffer."""

    def __init__(self, folder: Path, work: Path, groups: Sequence[Group], rows: int) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self._count = sum(map(len, groups)) // rows
        arguments = GRPOConfig(
            output_dir=str(work), per_device_train_batch_size=rows, gradient_accumulation_steps=self._count,
            num_generations=len(groups[0]), max_completion_length=LONGEST, learning_rate=LEARNING_RATE, beta=0.0,
            loss_type="dapo", epsilon=0.2, epsilon_high=0.28, num_iterations=1_000_000, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to=[], adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=0.0,
        )  # fmt: skip
        self._trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * len(groups)),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        )
        self._model: Any = self._trainer.model
        self._adam = self._trainer.create_optimizer()
        self._trainer.current_gradient_accumulation_steps = self._count
        self._fill(groups)

    def step(self) -> float:
        """Train once; the loss."""
        trainer, total = self._trainer, 0.0
        for _ in range(self._count):
            total += float(trainer.training_step(self._model, {}, None))
        trainer.accelerator.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._adam.step()
        self._model.zero_grad()
        return total

    def _fill(self, groups: Sequence[Group]) -> None:
        """The buffer as `_prepare_inputs` would have left it after the first generation."""
        from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

        members = [trajectory for group in groups for trajectory in group]
        lengths = [trajectory.num_sampled_tokens for trajectory in members]
        width = max(lengths)
        ids, old = torch.zeros(len(members), width, dtype=torch.long), torch.zeros(len(members), width)
        for row, trajectory in enumerate(members):
            answer = trajectory.chains[0].segments[1]
            ids[row, : lengths[row]] = torch.from_numpy(answer.token_ids.astype(np.int64))
            old[row, : lengths[row]] = torch.from_numpy(np.array(answer.logprobs))
        advantages = build_algorithm(
            LaminarConfig.model_validate({"model": {"path": "-"}, "data": {"path": "-"}})
        ).advantages(groups)
        prompts = torch.stack([torch.from_numpy(t.chains[0].segments[0].token_ids.astype(np.int64)) for t in members])
        batch = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": ids,
            "completion_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
            "advantages": torch.tensor([advantages[t.trajectory_id] for t in members], dtype=torch.float32),
            "old_per_token_logps": old,
            "num_items_in_batch": torch.tensor(sum(lengths)),
        }
        self._trainer._buffered_inputs = split_tensor_dict(shuffle_sequence_dict(batch), self._count)
        self._trainer._step = self._count  # past the first generation; the next one is a million rounds away
