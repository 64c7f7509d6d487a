"""Replaying spooled steps after a checkpoint, on real DeepSpeed: bit for bit the weights that a kill took away.

The file is its own rank program: the test of two ranks starts it twice.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from laminar.config.root import LaminarConfig
from laminar.experience.answers import Frontier
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.progress import Progress
from trainer.ranks import join_ranks
from trainer.replay import replay
from trainer.spool import ReplaySpool
from trainer.spool_file import SpooledGroup, SpooledStep
from trainer.step import train_step

pytestmark = pytest.mark.heavy


def make_groups(step):
    random = np.random.default_rng(step)
    groups = []
    for place in range(3):
        prompt, members = given(random.integers(1, 40, 2 + place)), []
        for member in range(3):
            length = 2 + int(random.integers(0, 5))
            answer = sampled(random.integers(1, 40, length), random.normal(-3.7, 0.3, length), WeightVersion(0, 0))
            members.append(
                Trajectory(
                    f"{step}-{place}-{member}", f"{step}-{place}", "p", member, 1, Purpose.TRAIN,
                    SamplingParameters(0.8, 8, 0), (Chain((prompt, answer)),), FinishReason.STOP,
                    float(random.integers(0, 3)),
                )
            )  # fmt: skip
        groups.append(tuple(members))
    return tuple(groups)


def make_header(step, groups):
    spooled = tuple(SpooledGroup(group[0].group_id, (0, 3 * step + place, 0)) for place, group in enumerate(groups))
    return SpooledStep(Progress(step=step), Frontier(number=step), f"digest-{step}", spooled)


def make_config(model, **trainer):
    return LaminarConfig.model_validate(
        {"model": {"path": str(model)}, "data": {"path": "-"}, "trainer": {"learning_rate": 1e-2} | trainer}
    )


def first_life(config, ranks, root, algorithm, steps=4, saved=2):
    """Train, spool each step, save a checkpoint on the way: the weights at the end."""
    engine, spool = TrainerEngine(config, ranks), ReplaySpool(root)
    for step in range(1, steps + 1):
        groups = make_groups(step)
        by_id = {group[0].group_id: group for group in groups}
        train_step(
            engine, algorithm, groups if ranks.is_first else None, step,
            fetch=lambda ids, by_id=by_id: [by_id[i] for i in ids],
        )  # fmt: skip
        if ranks.is_first:
            spool.commit(make_header(step, groups), groups)
        if step == saved:
            checkpoint.save(root, step, engine, {}, keep=1)
    return {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}


def second_life(config, ranks, root, algorithm):
    """Load the checkpoint and replay: the engine, and the steps that were told."""
    engine, told = TrainerEngine(config, ranks), []
    after, _ = checkpoint.load(checkpoint.agree_on_latest(root, ranks), engine)
    replay(engine, algorithm, ReplaySpool(root), after, lambda header, report: told.append((header.batch, report.step)))
    return engine, told


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.mark.parametrize("settings", [{}, {"mini_batches": 2, "max_tokens_per_micro_batch": 24}], ids=["whole", "split"])
def test_replayed_steps_give_bit_identical_weights_and_optimizer(settings, model_path, ranks, tmp_path):
    config, algorithm = make_config(model_path, **settings), PolicyGradient(GrpoOptions())
    expected = first_life(config, ranks, tmp_path, algorithm)
    engine, told = second_life(config, ranks, tmp_path, algorithm)
    assert told == [("digest-3", 3), ("digest-4", 4)]
    for name, tensor in engine.state_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_a_damaged_step_ends_the_replay_and_what_lies_above_it_is_removed(model_path, ranks, tmp_path):
    config, algorithm = make_config(model_path), PolicyGradient(GrpoOptions())
    first_life(config, ranks, tmp_path, algorithm, steps=5)
    spool = ReplaySpool(tmp_path)
    spool.path(4).write_bytes(spool.path(4).read_bytes()[:-10])
    _, told = second_life(config, ranks, tmp_path, algorithm)
    assert told == [("digest-3", 3)]
    assert spool.steps() == [1, 2, 3]


@pytest.mark.slow
def test_two_ranks_replay_together_from_the_same_files(model_path, tmp_path, run_two_ranks):
    run_two_ranks(__file__, model_path, tmp_path)
    for rank in range(2):
        before = load_file(tmp_path / f"before-{rank}.safetensors")
        after = load_file(tmp_path / f"after-{rank}.safetensors")
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the test above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ranks = join_ranks(rank, 2, store, collective_seconds=60)
    config, algorithm = make_config(model, deepspeed={"zero_stage": 1}), PolicyGradient(GrpoOptions())
    before = first_life(config, ranks, folder / "checkpoints", algorithm)
    save_file(before, folder / f"before-{rank}.safetensors")
    engine, told = second_life(config, ranks, folder / "checkpoints", algorithm)
    assert told == ([("digest-3", 3), ("digest-4", 4)] if ranks.is_first else [])
    after = {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}
    save_file(after, folder / f"after-{rank}.safetensors")
    ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # all is written and left; how the libraries' threads end with a process is not tested
