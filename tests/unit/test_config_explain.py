"""What `laminar explain` says, against numbers worked out by hand."""

import struct
import sys
import tomllib
from pathlib import Path

import pytest

from laminar.cli.explain import explain as explain_command
from laminar.config.explain import explain, staleness_in_words
from laminar.config.load import load_config
from laminar.config.sizes import ModelSize, most_micro_batches, read_model_size, shares

D27 = """
rollout.group_size = 4
rollout.max_new_tokens = 28
data.max_prompt_tokens = 100
data.path = "b"
trainer.prompts_per_step = 6
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_and_load(text: str, model: str = "a"):
        file = tmp_path / "run.toml"
        file.write_text(f'model.path = "{model}"\n' + D27 + text)
        return load_config(file)

    return write_and_load


def line_of(text: str, label: str) -> str:
    """The line that starts with a label, blanks squeezed."""
    return next(" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(label))


@pytest.mark.parametrize(
    ("total", "parts", "expected"),
    [(24, 4, [6, 6, 6, 6]), (24, 5, [5, 5, 5, 5, 4]), (6, 4, [2, 2, 1, 1]), (2, 3, [1, 1, 0])],
)
def test_shares_are_as_even_as_whole_numbers_allow(total, parts, expected):
    assert shares(total, parts) == expected


@pytest.mark.parametrize(
    ("rows_that_fit", "micro_batches"),
    [(3, 2), (5, 2), (6, 1), (1, 6)],
)
def test_six_trajectories_a_rank_need_as_many_micro_batches_as_their_longest_form(load, rows_that_fit, micro_batches):
    config = load(f"trainer.num_ranks = 4\ntrainer.max_tokens_per_micro_batch = {rows_that_fit * 128 + 5}")
    assert most_micro_batches(config, 6) == micro_batches
    assert line_of(explain(config), "micro-batches").startswith(f"micro-batches <= {micro_batches} ")


def test_ranks_that_share_rows_take_their_micro_batches_together(load):
    sizes = "trainer.num_ranks = 4\ntrainer.sequence_parallel_size = 2\ntrainer.max_tokens_per_micro_batch = 128"
    text = explain(load(sizes))
    assert line_of(text, "trainer ranks").endswith("a mini-batch and 2 ranks that share each row: 12")
    assert line_of(text, "micro-batches").startswith("micro-batches <= 6 2 ranks that share each row and mini-batch: 256")


@pytest.mark.parametrize(("max_steps", "every_steps", "count"), [(40, 10, 4), (41, 10, 5), (5, 10, 1)])
def test_as_many_checkpoints_are_told_as_the_trainer_saves(load, max_steps, every_steps, count):
    text = explain(load(f"run.max_steps = {max_steps}\ncheckpoint.every_steps = {every_steps}"))
    assert line_of(text, "checkpoints").startswith(f"checkpoints {count} ")


def test_five_ranks_share_twenty_four_trajectories_unevenly_and_it_is_said(load):
    text = explain(load("trainer.num_ranks = 5"))
    assert line_of(text, "trajectories") == "trajectories 24 x 4 (rollout.group_size)"
    assert line_of(text, "trainer ranks") == "trainer ranks 5 trajectories a mini-batch: 4 x 5 + 1 x 4 (uneven, as planned)"


def test_mini_batches_become_optimizer_steps_of_the_step_and_of_the_run(load):
    text = explain(load("trainer.mini_batches = 4\nrun.max_steps = 10"))
    assert line_of(text, "mini-batches") == "mini-batches 4 of 2 x 2 + 2 x 1 groups (uneven, as planned)"
    assert line_of(text, "optimizer steps").startswith("optimizer steps 4 ")
    assert "optimizer steps 40" in " ".join(text.split())
    assert "trajectories 240 from 60 prompts" in " ".join(text.split())


def test_epochs_multiply_the_optimizer_steps(load):
    text = explain(load("trainer.mini_batches = 4\ntrainer.epochs = 3\nrun.max_steps = 10"))
    assert line_of(text, "optimizer steps").startswith("optimizer steps 12 one a mini-batch and epoch (3 trainer.epochs)")
    assert "optimizer steps 120" in " ".join(text.split())
    assert "the last of a step's 12 updates" in " ".join(text.split())


def test_peak_bytes_are_those_of_the_admitted_groups(load):
    text = explain(load("staleness.max_staleness = 2"))  # 4 x (128 x 8 + 2048) = 12,288 bytes; 3 x 6 = 18 groups
    assert "bytes a group 12.3 kB" in line_of(text, "bytes a group")
    assert line_of(text, "admitted groups") == "admitted groups <= 18 limited by the staleness bound"
    assert "peak 221.2 kB" in line_of(text, "peak")


def test_a_small_buffer_limits_before_the_staleness_bound_does(load):
    text = explain(load("staleness.max_staleness = 2\nexperience.max_bytes = 100000"))
    assert line_of(text, "admitted groups") == "admitted groups <= 8 limited by experience.max_bytes"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("0", ["On-policy", "6 groups are played, trained and published before the next 6 begin"]),
        ("1", ["at most 1 version older", "trained on version n + 1", "(1 + 1) x 6 = 12 groups", 'Policy "wait"', "600 s"]),
        ("4", ["at most 4 versions older", "(4 + 1) x 6 = 30 groups"]),
        ('"unbounded"', ["any number of versions older", "349525 groups, or 58254.2 steps' worth"]),
    ],
)
def test_the_worst_staleness_is_said_in_words(load, setting, words):
    text = " ".join(staleness_in_words(load(f"staleness.max_staleness = {setting}")))
    assert [word for word in words if word not in text] == []


def test_masking_says_what_becomes_of_old_tokens_and_their_rewards(load):
    text = " ".join(staleness_in_words(load('staleness.policy = "mask"')))
    assert 'Policy "mask": nobody waits' in text
    assert "leave the loss" in text


def test_dropping_names_what_it_costs(load):
    text = " ".join(staleness_in_words(load('staleness.policy = "drop"')))
    assert "long answers are trained less often than short ones" in text


def write_safetensors(file: Path, header: str, num_bytes: int) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(num_bytes))


def test_weights_in_shared_memory_follow_from_the_model_files(load, tmp_path):
    (tmp_path / "policy").mkdir()
    for name in ("one", "two"):
        header = (
            '{"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [500, 1000], "data_offsets": [0, 1000000]}}'
        )
        write_safetensors(tmp_path / "policy" / f"{name}.safetensors", header, 1_000_000)
    assert read_model_size(tmp_path / "policy") == ModelSize(1_000_000, 2_000_000)
    text = explain(load('model.dtype = "float32"\nrollout.num_workers = 2', "policy"))  # 1 kept + 1 written + 2 that map
    assert line_of(text, "bytes a version").startswith("bytes a version 4.0 MB")
    # 977 pages of 4096 bytes, and 4 MiB for the manifest, four times
    assert line_of(text, "shared memory").startswith("shared memory 32.8 MB")


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**63), struct.pack("<Q", 4) + b"oops"])
def test_a_damaged_model_file_has_no_size(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read_model_size(tmp_path) is None


def test_an_unread_model_is_said_to_be_unknown(load):
    assert "The size of Qwen/Qwen2.5-7B is unknown" in explain(load("", "Qwen/Qwen2.5-7B"))


def test_the_text_fits_a_hundred_columns(load):
    text = explain(load("trainer.num_ranks = 1000\ntrainer.mini_batches = 4\nrun.max_steps = 1000000\ndata.max_epochs = 3"))
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_command_prints_a_config_that_loads_again(load, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "b").mkdir()
    config = load('rewards = [{kind = "exact_match"}]')
    explain_command(tmp_path / "run.toml", [], toml=True)
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "again.toml") == config


def test_the_whole_config_is_printed_as_toml_with_its_secrets_starred(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("laminar.cli.explain.check_config", lambda config: [])
    file = tmp_path / "run.toml"
    file.write_text(f'model.path = "a"\nexperience.redis_url = "redis://me:hunter2@host:1"\n{D27}')
    explain_command(file, toml=True)
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert tomllib.loads(printed)["experience"]["redis_url"] == "redis://me:***@host:1"
    assert tomllib.loads(printed)["rollout"]["group_size"] == 4
