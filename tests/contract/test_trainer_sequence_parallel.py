"""A row over two ranks: the losses, gradients and weights of one rank that computes whole rows.

The file is its own rank program: the tests of two ranks start it twice.
"""

import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from laminar.errors import ConfigError
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions, PpoOptions
from trainer.engine import TrainerEngine
from trainer.ranks import join_ranks
from trainer.sequence_parallel import split_attention, stretch_of
from trainer.step import train_step

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

CASES = {
    "zero0": {},
    "zero3": {"deepspeed": {"zero_stage": 3, "max_whole_parameter": 40}},
    "split": {"max_tokens_per_micro_batch": 12, "deepspeed": {"zero_stage": 1}},
    "checkpointing": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 20},
}
"""`max_tokens_per_micro_batch` is of one rank: two of them hold twice as much."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return oracle.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks_did(model_path, tmp_path_factory, run_two_ranks):
    folder = tmp_path_factory.mktemp("two")
    save_with_one_key_head(model_path, folder / "one_key_head")
    run_two_ranks(__file__, model_path, folder, 400)
    return folder


def save_with_one_key_head(model_path, folder):
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(model_path)
    config.num_key_value_heads = 1
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_a_row_over_two_ranks_trains_as_a_plain_loop(case, two_ranks_did, model_path):
    reference = oracle.plain_loop(model_path)
    for rank in range(2):
        reports = json.loads((two_ranks_did / f"rank{rank}.json").read_text())[case]
        oracle.assert_same_training(load_file(two_ranks_did / f"{case}-rank{rank}.safetensors"), reports, reference)


def test_fewer_key_heads_than_ranks_are_taken_along(two_ranks_did):
    reference = oracle.plain_loop(two_ranks_did / "one_key_head")
    reports = json.loads((two_ranks_did / "rank0.json").read_text())["one_key_head"]
    oracle.assert_same_training(load_file(two_ranks_did / "one_key_head-rank0.safetensors"), reports, reference)


@pytest.mark.parametrize("case", ["ppo", "corrected"])
def test_scores_critics_and_corrections_count_each_row_once(case, two_ranks_did, model_path, ranks):
    expected = everything(case, model_path, ranks)
    for rank in range(2):
        told = json.loads((two_ranks_did / f"rank{rank}.json").read_text())[case]
        assert told == pytest.approx(expected, rel=1e-4, abs=1e-6)


def everything(case, model, ranks):
    """A step with critic, reference and whitening, or with proximal log-probs and a correction: its metrics but times."""
    size = 1 if ranks.sequence is None else ranks.sequence.size
    settings = {"mini_batches": 2, "epochs": 2, "max_tokens_per_micro_batch": 40 // size, "sequence_parallel_size": size}
    algorithm = PolicyGradient(PpoOptions())
    if case == "corrected":
        settings["correction"] = {"weight": "sequence_tis", "geometric_max": 1.05}
        algorithm = PolicyGradient(GrpoOptions(whiten=True, ratio_to="proximal", aggregation="sequence_mean", kl_coef=0.1))
    engine = TrainerEngine(oracle.make_config(model, share_prompts=False, **settings), ranks, algorithm.needs)
    report = one_step(engine, algorithm)
    metrics = {name: value for name, value in report.metrics.items() if not name.startswith("time/")}
    return metrics | {"weights": sum(float(tensor.double().abs().sum()) for _, tensor in engine.state_tensors())}


def one_step(engine, algorithm):
    groups = {group[0].group_id: group for group in oracle.make_groups(1)}
    own = list(groups.values()) if engine.ranks.is_first else None
    return train_step(engine, algorithm, own, 1, fetch=lambda ids: [groups[name] for name in ids])


class Group:
    size, place = 3, 2


def test_stretches_are_equal_and_the_last_is_padded():
    assert stretch_of(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), Group).tolist() == [[7, 0, 0]]


def test_heads_that_cannot_be_shared_out_are_refused_with_the_number(model_path):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ConfigError, match="is 3, which does not divide the model's 4 attention heads"):
        split_attention(AutoModelForCausalLM.from_pretrained(model_path), Group)


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the tests above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ranks = join_ranks(rank, 2, store, collective_seconds=60, sequence_size=2)
    result = {}
    for case, settings in {**CASES, "one_key_head": {}}.items():
        path = folder / case if case == "one_key_head" else model
        engine, reports = oracle.train(oracle.make_config(path, sequence_parallel_size=2, **settings), ranks)
        result[case] = [report.metrics for report in reports]
        save_file(oracle.weights(engine), folder / f"{case}-rank{rank}.safetensors")
    for case in ("ppo", "corrected"):
        result[case] = everything(case, model, ranks)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # all is written and left; how the libraries' threads end with a process is not tested
