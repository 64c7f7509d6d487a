"""`laminar report`, `show` and `doctor`: what they write, and how they refuse."""

import json
import re
import resource
import time
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from laminar import doctor
from laminar.cli.main import app
from laminar.cli.show import describe
from laminar.cli.status import as_text, role_text
from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, EnvironmentSetupError, RunNotAliveError
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.svg import Line, nice_ticks, plot
from rollout.scripted import CodePointTokenizer
from rollout.trajectory_log import TrajectoryLog


def config(**sections):
    return LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.fixture
def folder(tmp_path, trajectory_maker):
    run = RunFolder.create(tmp_path, "a")
    run.config.write_text(dump_toml(config(experience={"redis_url": "redis://me:hunter2@host"})))
    run.write_state(RunState("run-<a>", "token", 1, "finished", reason="max_steps"))
    metrics = MetricsFile(run.metrics)
    for step in (1, 2):
        metrics.append(
            "step", step, {"train/loss": 0.5, "reward/mean": 0.25 * step, "time/step_seconds": 2.0, "train/tokens": 100,
                           "staleness/histogram_0": 3.0, f"staleness/histogram_{step}": 1.0},
        )  # fmt: skip
    metrics.append("mark", 1, {"time": 0.0, "what": "control", "text": "bound <3>"})
    log = TrajectoryLog(run.trajectories, "w", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    log.add(trajectory_maker.play("00000003", 0, "0.0", reward=0.25))
    log.write()
    return run


def run_command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_report_is_one_file_that_needs_no_other_and_tells_no_secret(folder):
    result = run_command("report", folder.path)
    text = folder.report.read_text()
    assert result.stdout.strip() == str(folder.report)
    assert "50.0 tokens/s" in text  # 200 tokens in 4 s
    rows = [("0", "6", "75.0 %"), ("1", "1", "12.5 %"), ("2", "1", "12.5 %")]
    assert all(f'<th scope="row">{k}</th><td>{count}</td><td>{share}</td>' in text for k, count, share in rows)
    assert "run-&lt;a&gt;" in text
    assert "bound &lt;3&gt;" in text
    assert "hunter2" not in text
    assert not re.search(r"<(script|link|img|iframe)|src=|url\(|https?://(?!me:)", text)


def test_a_run_of_another_version_of_laminar_is_reported_with_its_bound_and_what_lines_have_a_shape(folder):
    with folder.config.open("a") as file:
        file.write("\n[zebra]\nplumage = 3\n")
    with folder.metrics.open("a") as file:
        file.write('12\n{}\n{"kind": "step"}\n')
    assert run_command("report", folder.path).exit_code == 0
    text = folder.report.read_text()
    assert "plumage = 3" in text
    assert ">bound<" in text
    assert "2, in 4" in text


def test_a_run_whose_staleness_is_no_table_is_reported_without_a_bound(folder):
    folder.config.write_text("staleness = 3\n")
    assert run_command("report", folder.path).exit_code == 0
    assert ">bound<" not in folder.report.read_text()


def test_a_report_that_cannot_be_written_is_refused(folder):
    assert isinstance(run_command("report", folder.path, "--output", folder.path / "none" / "r.html").exception, ConfigError)


def test_a_kept_trajectory_is_shown_by_the_beginning_of_its_id(folder):
    result = run_command("show", folder.path, "00000003")
    assert "reward 0.25; not trained" in result.stdout
    record = json.loads(run_command("show", folder.path, "00000003-000", "--json").stdout)
    assert record["chains"][0][1]["token_ids"] == [7, 8, 9]


def test_without_colours_what_was_sampled_stands_in_brackets_after_its_version(folder):
    record = json.loads(run_command("show", folder.path, "00000003", "--json").stdout)
    record["chains"] = [
        [{"version": None, "tokens": ["2 + ", "2 ="]}, {"version": "0.3", "tokens": [" 4", "!"]},
         {"version": "0.4", "tokens": ["?"]}, {"version": None, "tokens": ["\nright"]}]
    ]  # fmt: skip
    plain = [line.plain for line in describe(record, has_colours=False)]
    assert plain[-2:] == [
        "sampled is what stands in [[VERSION|...]], all else was given",
        "2 + 2 =[[0.3| 4!]][[0.4|?]]\nright",
    ]
    assert describe(record, has_colours=True)[-1].plain == "2 + 2 = 4!?\nright"
    assert "[[0.0|" in run_command("show", folder.path, "00000003").stdout


def test_facts_are_told_in_words():
    assert (
        as_text({"trained": 8, "failed": {"tool": 2, "engine": 1}, "evicted": {}})
        == "trained 8, failed 3 (tool 2, engine 1), evicted 0"
    )
    assert (as_text([]), as_text(["one", "two"]), as_text({}), as_text(0.5)) == ("none", "one; two", "none", "0.5")
    assert (as_text(None), as_text(2.0), as_text(0.0001)) == ("unknown", "2", "0.0001")


def test_a_step_without_a_reward_has_none_in_the_status(folder):
    MetricsFile(folder.metrics).append("step", 3, {"train/loss": 0.5, "time/step_seconds": 2.0})
    told = run_command("status", folder.path).stdout
    assert re.search(r"reward +unknown", told), told
    facts = json.loads(run_command("status", folder.path, "--json").stdout)
    assert (facts["step"], facts["reward"], facts["staleness_max"]) == (3, None, None)


def test_kept_trajectories_are_listed_where_none_is_named(folder):
    result = run_command("show", folder.path)
    assert re.search(r"00000003-000 +0\.25 +3 +0 +- +- +", result.stdout), result.stdout
    assert "1 of 1 kept" in " ".join(result.stdout.split())
    (summary,) = json.loads(run_command("show", folder.path, "--json").stdout)
    assert (summary["trajectory_id"], summary["num_sampled_tokens"]) == ("00000003-000", 3)
    assert "'newest', 'reward_low'" in str(run_command("show", folder.path, "--order", "odd").exception)


def test_a_run_that_keeps_no_trajectories_says_so_and_which_setting_keeps_them(folder):
    for file in folder.trajectories.iterdir():
        file.unlink()
    told = run_command("show", folder.path).stdout.strip()
    assert told == f"run {folder.path.name} keeps no trajectories; metrics.trajectory_rate says what share of groups is kept"
    assert json.loads(run_command("show", folder.path, "--json").stdout) == []


def test_a_trajectory_that_is_not_kept_is_refused_with_the_setting_to_change(folder):
    error = run_command("show", folder.path, "9").exception
    assert isinstance(error, ConfigError)
    assert "(1 are kept; metrics.trajectory_rate" in str(error)


@pytest.mark.parametrize(
    "command", [["stop"], ["pause"], ["unpause"], ["set", "staleness.max_staleness=2"], ["scale", "--rollouts", "+1"]]
)
def test_control_of_a_run_that_has_ended_is_refused_with_its_own_exit_code(folder, command):
    error = run_command(command[0], folder.path, *command[1:]).exception
    assert isinstance(error, RunNotAliveError)
    assert error.exit_code == 5


def test_a_setting_without_a_value_is_refused(folder):
    assert isinstance(run_command("set", folder.path, "staleness.max_staleness").exception, ConfigError)


def test_a_plot_is_well_formed_and_its_points_lie_where_the_values_say():
    text = plot(
        "A & B", "s", [0.0, 5.0, 10.0], [Line("x", [0.0, None, 1.0]), Line("y", [1.0, 1.0, 1.0], is_dashed=True)], [5.0]
    )
    figure = ElementTree.fromstring(text)
    first, second = [path.get("d") for path in figure.iter("path")]
    assert first == "M58.0 190.0M548.0 10.0"  # the gap lifts the pen; 220 - 30 is y = 0, 10 is y = 1
    assert second == "M58.0 10.0L303.0 10.0L548.0 10.0"


def test_a_plot_of_nothing_says_so():
    assert "Nothing was recorded" in plot("t", "", [], [Line("x", [])])
    assert "Nothing was recorded" in plot("t", "", [1.0], [Line("x", [float("nan")])])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (3, 3, [2.7, 2.8, 2.9, 3.0, 3.1, 3.2, 3.3]), (-7, 90, [-25, 0, 25, 50, 75, 100])],
)
def test_ticks_are_round_numbers_around_the_values(low, high, ticks):
    found = nice_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    if low != high:
        assert found == ticks


def test_a_fit_machine_is_told_so():
    levels = {finding.name: finding.level for finding in doctor.examine(None)}
    assert levels["python"] == levels["torch"] == levels["loopback"] == "good"


def test_too_few_open_files_and_a_missing_engine_are_found_with_remedies(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    settings = config(
        rollout={"engine": {"python": str(tmp_path / "no-python"), "kind": "sglang", "num_gpus": 1}},
        experience={"redis_url": "redis://127.0.0.1:1"},
        run={"directory": str(tmp_path / "new" / "runs")},
        relay={"root": str(tmp_path / "none")},
    )
    bad = {finding.name: finding.text for finding in doctor.examine(settings) if finding.level == "bad"}
    assert "ulimit -n 4096" in bad["open files"]
    assert "correct rollout.engine.python" in bad["engine"]
    assert "start one there" in bad["redis"]
    assert "set relay.root" in bad["shared memory"]


def test_shared_memory_is_needed_for_whole_pages_and_what_goes_with_each_slot(tmp_path):
    header = b'{"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4000))
    settings = config().model_copy(update={"model": config().model.model_copy(update={"path": str(tmp_path)})})
    (found,) = (finding.text for finding in doctor.examine(settings) if finding.name == "shared memory")
    assert "12.6 MB needed for 3 slots" in found  # 3 x (4096 + 4 MiB)


@pytest.mark.parametrize("below", ["", "/runs"])
def test_a_run_folder_that_would_lie_in_a_file_is_found(tmp_path, below):
    (tmp_path / "file").write_text("")
    settings = config(run={"directory": f"{tmp_path}/file{below}"})
    disk = next(finding for finding in doctor.examine(settings) if finding.name == "disk")
    assert (disk.level, disk.text) == ("bad", f"{tmp_path}/file is a file; set run.directory to a folder")


def test_an_unfit_machine_ends_with_the_exit_code_for_it(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    error = run_command("doctor").exception
    assert isinstance(error, EnvironmentSetupError)
    assert "open files" in str(error)


def test_a_silent_role_is_shown_with_since_when_and_its_last_error():
    role = {"state": "decode", "is_silent": True, "silent_seconds": 90.0, "last_error": "2026-01-01 10:00:00,000 E: x"}
    since = time.strftime("%H:%M:%S", time.localtime(1000.0))
    assert role_text(role, 1090.0) == f"silent for 90 s (since {since}; last error: 2026-01-01 10:00:00,000 E: x)"
    assert role_text({**role, "last_error": ""}, 1090.0) == f"silent for 90 s (since {since}; last error: none in its log)"
    assert role_text({**role, "is_silent": False}, 1090.0) == "decode"
