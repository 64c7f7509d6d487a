"""`laminar simulate`: from a config to a table, JSON, plots and advice; and what it refuses."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from laminar.cli.main import app
from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder, RunState
from laminar.simulate.calibrate import calibrated, observe
from laminar.simulate.from_config import setting_of
from laminar.simulate.mapping import all_splits, best_bound
from laminar.simulate.simulation import simulate

SETTINGS = {
    "model": {"path": "m"},
    "data": {"path": "d", "max_prompt_tokens": 20},
    "rewards": [{"kind": "exact"}],
    "rollout": {
        "num_workers": 2, "group_size": 2, "max_new_tokens": 400, "max_in_flight_groups": 8, "weight_update": "trajectory",
        "engine": {"kind": "sglang", "num_gpus": 1, "max_running": 16, "max_cached_tokens": 20_000},
    },
    "trainer": {"num_ranks": 2, "prompts_per_step": 4, "max_tokens_per_micro_batch": 1024},
    "simulate": {
        "length_quantiles": {"p0": 20, "p50": 50, "p100": 400}, "latency": "7B_TP1", "model_parameters": 1e9,
        "train_flops": 12e12, "mini_batch_seconds": 0.1, "num_steps": 6, "overhead_milliseconds": 0,
        "request_overhead_microseconds": 0,
    },
}  # fmt: skip


@pytest.fixture
def config():
    return LaminarConfig.model_validate(SETTINGS)


@pytest.fixture
def file(tmp_path, monkeypatch, config):
    monkeypatch.setattr("laminar.cli.simulate.check_config", lambda _: [])  # the model and the data are not here
    path = tmp_path / "a.toml"
    path.write_text(dump_toml(config))
    return path


def run_command(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.mark.slow
def test_a_sweep_gives_a_row_a_value_and_advice_with_a_reason(file, tmp_path):
    report = tmp_path / "report.html"
    result = run_command(file, "--sweep", "staleness.max_staleness=0,1", "--json", "--html", report)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    zero, one = answer["rows"]
    assert (zero["setting"], one["setting"]) == ("staleness.max_staleness=0", "staleness.max_staleness=1")
    assert zero["staleness"] == {"0": 1.0}
    assert one["tokens_per_second"] > zero["tokens_per_second"]
    [advice] = answer["advice"]
    assert advice["train_gpus"] + advice["num_replicas"] == advice["num_gpus"] == 4
    assert "sets the pace" in advice["reason"]
    text = report.read_text()
    assert text.count("<svg") == 4
    assert "Recommended" in text


def test_the_table_names_settings_and_the_split_of_each_total(file):
    result = run_command(file, "--gpus", "3,4", "--no-advice", "simulate.num_steps=3")
    assert result.exit_code == 0, result.output
    assert "as configured" in result.output
    assert "tokens/s" in result.output


@pytest.mark.slow  # importing matplotlib
def test_plots_become_a_picture(file, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    assert run_command(file, "--no-advice", "--png", picture, "simulate.num_steps=3").exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sweep", "staleness"], "write it as section.key=a,b,c"),
        (["--sweep", "trainer.prompts_per_step=" + ",".join(map(str, range(1, 300)))], "299 settings"),
        (["--gpus", "some"], "whole numbers"),
        (["--gpus", "1"], "whole numbers"),
        (["--gpus", "64,999999999"], "from 2 to"),
        (["simulate.speed=3"], "unknown key"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(file, arguments, text):
    result = run_command(file, "--no-advice", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert text in str(result.exception)


def test_a_split_is_rated_by_the_slower_of_its_two_sides(config):
    """1e9 parameters at 12e12 operations: 2,000 tokens/s a GPU; a step of 8 answers has about 8 x (mean + 10) tokens."""
    setting = setting_of(config)
    splits = all_splits(setting, 4)
    assert {(split.train_gpus, split.num_replicas) for split in splits} == {(3, 1), (2, 2), (1, 3)}
    assert [split.seconds for split in splits] == sorted(split.seconds for split in splits)
    one = next(split for split in splits if split.train_gpus == 1)
    assert one.train_seconds == pytest.approx(
        8 * (setting.workload.mean_sampled_tokens + 10) / 2000
        + 0.1
        + 2e9 / setting.cluster.transfers.publish_bytes_per_second
    )
    assert one.generate_seconds < next(split for split in splits if split.train_gpus == 3).generate_seconds


def test_the_smallest_bound_that_costs_little_is_recommended():
    assert best_bound({0: 60.0, 1: 97.5, 2: 100.0, None: 99.0}) == 1
    assert best_bound({0: 60.0, 1: 96.0, 2: 100.0}) == 2


def record(number, sampled, seconds):
    segments = [{"version": None, "token_ids": [1] * 12}, {"version": "0.0", "token_ids": [2] * sampled}]
    return {
        "trajectory_id": f"t{number}", "group_id": f"g{number}", "prompt_id": "p", "attempt": 0, "worker": "w",
        "purpose": "train", "time": float(number), "reward": 1.0, "failure": None, "finish_reason": "stop",
        "num_sampled_tokens": sampled, "oldest": 0, "newest": 0, "turns": [[0, 12, 12 + sampled, "stop"]],
        "timings": {"generate": seconds, "environment": 0.0, "reward": 0.0, "total": seconds},
        "chains": [[{**segment, "tokens": []} for segment in segments]],
    }  # fmt: skip


def test_a_run_gives_lengths_and_both_paces(tmp_path, config):
    """Answers of 100 tokens at 20 ms a token, steps of 3 s without their waits."""
    folder = RunFolder.create(tmp_path, "a")
    folder.config.write_text(dump_toml(config))
    folder.write_state(RunState("a", "token", 1, "finished"))
    lines = "".join(json.dumps(record(number, 100, 2.0)) + "\n" for number in range(10))
    (folder.trajectories / "w-00000.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    step = {"kind": "step", "step": 1, "time/step_seconds": 5.0, "time/sample_wait_seconds": 2.0}
    folder.metrics.write_text(json.dumps({**step, "format_version": 1}) + "\n")
    observed = observe(folder.trajectories, folder.metrics)
    assert (observed.prompt_tokens, observed.num_turns) == (12.0, 1)
    assert (observed.seconds_per_token, observed.step_seconds) == (pytest.approx(0.02), (3.0,))
    setting = calibrated(setting_of(config), observed)
    assert setting.workload.mean_sampled_tokens == 100
    outcome = simulate(setting.workload, setting.cluster, setting.system, num_steps=6)
    assert outcome.latency_mean_seconds == pytest.approx(2.0, rel=0.05)
    assert setting.cluster.trainer.seconds(8 * 112, 0) == pytest.approx(3.0)


def test_too_few_records_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="fewer than 8"):
        observe(tmp_path, tmp_path / "metrics.jsonl")
