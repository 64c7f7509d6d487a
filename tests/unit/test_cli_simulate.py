"""`laminar simulate`: from a config to a table, JSON, plots and advice; and what it refuses."""

import gzip
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from laminar.cli.main import app
from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder, RunState
from laminar.simulate.calibrate import MAX_RECORDS, Observed, adapted, calibrate, observe
from laminar.simulate.from_config import setting_of
from laminar.simulate.mapping import FEW, Estimates, Played, Split, all_splits, best_bound, best_split, play, search
from laminar.simulate.simulation import simulate
from laminar.simulate.sweep import advise, percent

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


def with_settings(config, **sections):
    tree = config.model_dump()
    return LaminarConfig.model_validate({**tree, **{name: tree[name] | values for name, values in sections.items()}})


@pytest.fixture
def file(tmp_path, monkeypatch, config):
    monkeypatch.setattr("laminar.cli.simulate.check_config", lambda _: [])  # the model and the data are not here
    path = tmp_path / "a.toml"
    path.write_text(dump_toml(config))
    return path


def run_command(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_what_is_played_is_said_once_on_the_error_stream_and_json_stays_json(file):
    result = run_command(file, "--gpus", "3", "--json")
    said = result.stderr.splitlines()
    assert said[:2] == [f"playing 3 GPUs: {n} replicas, {3 - n} GPUs train" for n in (1, 2)]
    assert len(said) == len(set(said)) == 6  # two splits, once for row and advice; bounds 0, 2, 4, 8 besides the config's 1
    assert json.loads(result.stdout)


@pytest.mark.slow
def test_a_sweep_gives_a_row_a_value_and_advice_with_a_reason(file, tmp_path):
    report = tmp_path / "report.html"
    result = run_command(file, "--sweep", "staleness.max_staleness=0,1", "--json", "--html", report)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
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


STANDSTILL = ["staleness.max_staleness=0", "run.no_progress_seconds=20"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sweep", "staleness"], "write it as section.key=a,b,c"),
        (["--sweep", "rollout.num_workers=1,2", "--sweep", "rollout.num_workers=3"], "is swept already"),
        (["--sweep", "trainer.prompts_per_step=" + ",".join(map(str, range(1, 300)))], "299 settings"),
        (["--gpus", "some"], "whole numbers"),
        (["--gpus", "1"], "whole numbers"),
        (["--gpus", "64,999999999"], "from 2 to"),
        (["simulate.speed=3"], "unknown key"),
        (["--sweep", "staleness.max_wait_seconds=0.1", *STANDSTILL], "=0.1: simulated, no step ends"),
        (["rollout.engine.num_gpus=0.4"], "not simulated"),
        (['simulate.decode_milliseconds={"1"=9.0, "01"=9.0}'], 'has the key "01"'),
        (['simulate.decode_milliseconds={"1"=9.0, "0"=9.0}'], 'has the key "0"'),
        (['simulate.decode_milliseconds={"1"=9.0, "-5"=9.0}'], 'has the key "-5"'),
        (['simulate.turn_seconds_quantiles={"pnan"=9.0}'], 'has the key "pnan"'),
        (['simulate.turn_seconds_quantiles={"p101"=9.0}'], 'has the key "p101"'),
        (['simulate.turn_seconds_quantiles={"p50"=9.0, "p50.0"=9.0}'], "a quantile twice (p50, p50.0)"),
        (['simulate.turn_seconds_quantiles={"p50"=9.0, "p90"=8.0}'], "higher quantiles are larger"),
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


SLOW_TURNS = {"num_turns": 4, "turn_seconds_quantiles": {"p0": 2.0, "p50": 5.0, "p100": 9.0}, "observation_tokens": 20}


def test_a_trajectory_in_its_environment_counts_as_in_flight_and_holds_no_place_in_the_engine(config):
    """3 gaps of 5.25 s on average, against 0.7 s of decoding: hardly one of ten open trajectories runs."""
    setting = setting_of(with_settings(config, simulate=SLOW_TURNS))
    assert setting.workload.mean_away_seconds == pytest.approx(3 * 5.25)
    quick = setting_of(with_settings(config, simulate=SLOW_TURNS | {"turn_seconds_quantiles": {}}))
    seconds = [Estimates(each).generate_seconds(1) for each in (setting, quick)]
    assert seconds[0] == pytest.approx(8 / 16 * (3 * 5.25 + 0.6), rel=0.1)
    assert seconds[1] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2, 4])
@pytest.mark.parametrize(("num_gpus", "turns"), [(8, {}), (8, SLOW_TURNS), (24, SLOW_TURNS)])
def test_the_recommended_split_is_as_good_as_any(config, num_gpus, turns, bound):
    enough = {"trainer": {"prompts_per_step": 32}, "staleness": {"max_staleness": bound}}
    setting = setting_of(with_settings(config, simulate={"num_steps": 20} | turns, **enough))
    _, outcome, played = best_split(setting, num_gpus)
    splits = all_splits(setting, num_gpus)
    every = [play(setting.with_split(s.train_gpus, s.num_replicas).with_even_shares()) for s in splits]
    assert outcome.tokens_per_second >= 0.95 * max(each.tokens_per_second for each in every)
    assert len(played) == len(splits) if len(splits) <= FEW else len(played) < len(splits)


@pytest.mark.parametrize("best", [1, 7, 40, 93, 100])
def test_splits_are_played_until_the_best_lies_between_two_that_are_worse(config, best):
    template = play(setting_of(config))

    def play_number(number):
        outcome = replace(template, tokens_per_second=1000.0 - abs(number - best))
        return Played(Split(101 - number, number, 0.0, 0.0), outcome)

    played = search(list(range(1, 101)), [30], play_number)
    found = max(played, key=lambda entry: entry.tokens_per_second).split.num_replicas
    assert abs(found - best) <= 0.1 * best
    assert len(played) < 30


def test_over_provisioning_and_a_greedy_baseline_are_simulated_as_set(config):
    setting = setting_of(
        with_settings(config, rollout={"over_provision": 1.5}, trainer={"algorithm": {"kind": "remax"}}, simulate=SLOW_TURNS)
    )
    assert (setting.system.over_provision, setting.workload.group_size, setting.workload.members_per_group) == (1.5, 2, 3)


def test_bounds_that_check_refuses_or_that_stand_still_are_not_recommended(config):
    def load(overrides):
        bound = int(overrides[0].rpartition("=")[2]) if overrides else 2
        if bound == 1:
            raise ConfigError("1 is refused")
        wait = 0.1 if bound == 0 else 600.0
        limits = {"max_staleness": bound, "max_wait_seconds": wait}
        return with_settings(config, staleness=limits, run={"no_progress_seconds": 20.0})

    advice = advise(load, 4, lambda setting: setting)
    assert "0: 0.0 %, 2: " in advice.reason
    assert advice.bound in (2, 4, 8)


def test_a_share_is_not_shown_as_one_that_it_falls_short_of():
    assert [percent(share) for share in (0.9699, 0.97, 1.0, 0.0)] == ["96.9 %", "97.0 %", "100.0 %", "0.0 %"]


def test_the_reason_tells_what_was_played(config):
    """A trainer a hundred times too fast waits nearly always: generating sets the pace, whatever the estimates say."""
    fast = with_settings(config, simulate={"train_flops": 12e14, "mini_batch_seconds": 0.0})
    advice = advise(lambda _: fast, 4, lambda setting: setting)
    assert "generating sets the pace" in advice.reason
    assert f"the trainer waits {100 * advice.outcome.trainer_idle_share:.0f} %" in advice.reason


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


def test_a_run_gives_lengths_and_both_paces(tmp_path, config, file):
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
    found = calibrate(setting_of(config), observed)
    setting = adapted(setting_of(config), found)
    assert setting.workload.mean_sampled_tokens == 100
    outcome = simulate(setting.workload, setting.cluster, setting.system, num_steps=6)
    assert outcome.latency_mean_seconds == pytest.approx(2.0, rel=0.05)
    assert setting.cluster.trainer.seconds(8 * 112, 0) == pytest.approx(3.0)
    result = run_command(file, "--from", folder.path, "--no-advice", "--json", "trainer.num_ranks=1")
    [row] = json.loads(result.stdout)["rows"]
    assert row["step_seconds"] == pytest.approx([6.0] * 5, rel=0.01)


def test_a_runs_paces_are_those_of_its_own_config_whatever_else_is_simulated(config):
    """Records of a played config, told as if decoding had taken twice as long; then three quarters of the work in flight."""
    own = setting_of(config)
    outcome = play(own)
    slow = Observed(
        sampled_tokens=tuple(own.workload.lengths.quantiles(np.linspace(0.0, 1.0, 400))),
        prompt_tokens=10.0,
        observation_tokens=0.0,
        num_turns=1,
        turn_seconds=(),
        seconds_per_token=2 * outcome.latency_mean_seconds / own.workload.mean_sampled_tokens,
        step_seconds=(4.0,),
    )
    found = calibrate(own, slow)
    assert found.decode_factor == pytest.approx(2.0, rel=0.02)
    other = adapted(setting_of(with_settings(config, rollout={"max_in_flight_groups": 1})), found)
    assert other.cluster.engine.times.seconds == pytest.approx(found.decode_factor * own.cluster.engine.times.seconds)
    tokens = 8 * (other.workload.mean_sampled_tokens + 10)
    larger = adapted(own.with_split(4, 2), found).cluster.trainer
    assert (other.cluster.trainer.seconds(tokens, 0), larger.seconds(tokens, 0)) == pytest.approx((4.0, 2.0))
    assert other.cluster.trainer.seconds(3 * tokens, 0) == pytest.approx(12.0)


def test_assumed_times_that_are_far_too_slow_are_calibrated_too(config):
    """As played, answers would take 2 s and more, be given up after 0.1 s, and the run stop; recorded, they take 50 ms."""
    own = setting_of(
        with_settings(config, staleness={"max_staleness": 0, "max_wait_seconds": 0.1}, run={"no_progress_seconds": 2.0})
    )
    found = calibrate(own, Observed((100.0,) * 50, 10.0, 0.0, 1, (), 0.0005, (1.0,)))
    outcome = play(adapted(own, found))
    assert outcome.latency_mean_seconds == pytest.approx(0.05, rel=0.05)


def test_of_many_records_the_newest_are_read(tmp_path):
    for number, sampled, count in ((0, 9, 50), (1, 3, MAX_RECORDS + 4)):
        path = tmp_path / f"w-{number:05d}.jsonl.gz"
        lines = [json.dumps(record(1000 * number + i, sampled, 1.0)) + "\n" for i in range(count)]
        path.write_bytes(b"".join(gzip.compress("".join(lines[at : at + 99]).encode()) for at in range(0, count, 99)))
        os.utime(path, (number, number))
    assert observe(tmp_path, tmp_path / "metrics.jsonl").sampled_tokens == (3.0,) * MAX_RECORDS


def test_too_few_records_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="fewer than 8"):
        observe(tmp_path, tmp_path / "metrics.jsonl")
