"""Recorded trajectories trained again: bit for bit from the spool, to four digits of log-prob from the records."""

import gzip
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.experience.answers import Frontier
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder
from laminar.telemetry.files import MetricsFile
from laminar.trajectories import append_step
from laminar.types import (
    Chain,
    Failure,
    FailureKind,
    FinishReason,
    Purpose,
    SamplingParameters,
    Trajectory,
    WeightVersion,
    given,
    sampled,
)
from rollout.scripted import CodePointTokenizer
from rollout.trajectory_log import TrajectoryLog
from trainer import checkpoint
from trainer.engine import TrainerEngine
from trainer.offline import replay_recording, train_recorded
from trainer.progress import Progress
from trainer.recorded import Recording
from trainer.session import build_algorithm
from trainer.spool import ReplaySpool
from trainer.spool_file import SpooledGroup, SpooledStep
from trainer.step import train_step

pytestmark = pytest.mark.heavy

STEPS = 4


def make_groups(step):
    """Two groups of three; one answer has a second segment behind a given one."""
    random, groups = np.random.default_rng(step), []
    for place in range(2):
        members = []
        for member in range(3):
            length = 3 + member
            segments = [
                given(random.integers(1, 40, 3)),
                sampled(random.integers(1, 40, length), random.normal(-3.7, 0.3, length), WeightVersion(0, step - 1)),
            ]
            if member == 2:
                segments += [given([7, 8]), sampled([9, 10], random.normal(-3.7, 0.3, 2), WeightVersion(0, step - 1), 1)]
            members.append(
                Trajectory(
                    f"{step}{place}-{member:03d}", f"{step}{place}", "p", member, 1, Purpose.TRAIN,
                    SamplingParameters(0.8, 8, 0), (Chain(tuple(segments)),), FinishReason.STOP,
                    float(random.integers(0, 5)),
                )
            )  # fmt: skip
        groups.append(tuple(members))
    return tuple(groups)


def make_config(model, folder, **trainer):
    return LaminarConfig.model_validate(
        {
            "run": {"directory": str(folder), "name": "test"},
            "model": {"path": str(model)},
            "data": {"path": "-"},
            "rollout": {"max_new_tokens": 8},
            "trainer": {"learning_rate": 1e-2, "prompts_per_step": 2} | trainer,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def recorded(model, ranks, tmp_path_factory):
    """A run of four steps that recorded everything, with a checkpoint after step 2: its folder, and its last weights."""
    root = tmp_path_factory.mktemp("runs")
    config, folder = make_config(model, root), RunFolder.create(root, "recorded")
    folder.config.write_text(dump_toml(config))
    algorithm = build_algorithm(config)
    engine, spool, metrics = TrainerEngine(config, ranks), ReplaySpool(folder.checkpoints), MetricsFile(folder.metrics)
    log = TrajectoryLog(folder.trajectories, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    for step in range(1, STEPS + 1):
        groups = make_groups(step)
        report = train_step(engine, algorithm, groups, step)
        spooled = tuple(SpooledGroup(group[0].group_id, (0, place, 0)) for place, group in enumerate(groups))
        spool.commit(SpooledStep(Progress(step=step), Frontier(number=step), "", spooled, oldest_trained=0), groups)
        metrics.append("step", step, report.metrics)
        append_step(folder.trajectories, step, {group[0].group_id: len(group) for group in groups})
        for trajectory in (t for group in groups for t in group):
            log.add(trajectory)
        if step == 2:
            checkpoint.save(folder.checkpoints, step, engine, {}, keep=1)
    log.write()
    return folder, {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}


def replay(recording, model, ranks, tmp_path, **trainer):
    said = []
    path = replay_recording(make_config(model, tmp_path, **trainer), recording, ranks, said.append)
    losses = {line["step"]: line["train/loss"] for line in read_lines(RunFolder(path).metrics)}
    return RunFolder.open(path), losses, said


def losses_of(folder):
    return {line["step"]: line["train/loss"] for line in read_lines(folder.metrics)}


def test_the_spool_gives_the_recorded_losses_and_weights_to_the_last_bit(recorded, model, ranks, tmp_path):
    folder, expected = recorded
    recording = Recording(folder.path, make_config(model, tmp_path))
    assert (recording.is_exact, len(recording)) == (True, STEPS)
    again, losses, said = replay(recording, model, ranks, tmp_path)
    assert losses == losses_of(folder)
    weights = load_file(again.checkpoints / "step_000004" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert said[-1] == "4 recorded steps trained; train/loss differs from the recorded run's by at most 0"
    assert again.read_state().status == "finished"


@pytest.mark.slow
def test_a_pruned_spool_goes_on_from_the_checkpoint_before_it(recorded, model, ranks, tmp_path):
    folder, _ = recorded
    spool = ReplaySpool(folder.checkpoints)
    hidden = {step: spool.path(step).read_bytes() for step in (1, 2)}
    try:
        for step in hidden:
            spool.path(step).unlink()
        _, losses, said = replay(
            Recording(folder.checkpoints / "replay", make_config(model, tmp_path)), model, ranks, tmp_path
        )
    finally:
        for step, data in hidden.items():
            spool.path(step).write_bytes(data)
    assert losses == {step: loss for step, loss in losses_of(folder).items() if step > 2}
    assert "step_000002" in said[0]


@pytest.mark.slow
def test_the_records_give_the_recorded_losses_within_their_digits(recorded, model, ranks, tmp_path):
    """Log-probs are kept to 5e-5: ratios, and so losses, of advantages up to 1.2 are right to about 1e-4."""
    folder, _ = recorded
    recording = Recording(folder.trajectories, make_config(model, tmp_path))
    assert not recording.is_exact
    originals = {t.trajectory_id: t for step in range(1, STEPS + 1) for group in make_groups(step) for t in group}
    for step in recording.steps():
        for trajectory in (t for group in step.groups for t in group):
            original = originals[trajectory.trajectory_id]
            assert (trajectory.reward, trajectory.member) == (original.reward, original.member)
            for chain, other in zip(trajectory.chains, original.chains, strict=True):
                assert (chain.token_ids() == other.token_ids()).all()
                assert (chain.mask() == other.mask()).all()
    _, losses, _ = replay(recording, model, ranks, tmp_path)
    assert losses == pytest.approx(losses_of(folder), abs=2e-4)


@pytest.mark.slow
def test_another_algorithm_is_tried_on_the_same_data(recorded, model, ranks, tmp_path):
    folder, _ = recorded
    recording = Recording(folder.path, make_config(model, tmp_path))
    _, losses, _ = replay(recording, model, ranks, tmp_path, algorithm={"kind": "rloo"})
    assert losses.keys() == losses_of(folder).keys()
    assert losses != losses_of(folder)


def test_groups_that_were_not_recorded_are_counted(recorded, model, tmp_path):
    folder, _ = recorded
    steps = folder.trajectories / "steps.jsonl"
    text = steps.read_text()
    try:
        steps.write_text(text.replace('"30"', '"not-sampled"'))
        found = {step.step: step for step in Recording(folder.trajectories, make_config(model, tmp_path)).steps()}
    finally:
        steps.write_text(text)
    assert [(len(found[n].groups), found[n].missing_groups) for n in (1, 3)] == [(2, 0), (1, 1)]


def test_a_group_that_lost_a_record_counts_as_missing(recorded, model, tmp_path):
    """Its other members would have other advantages among themselves."""
    folder, _ = recorded
    shutil.copytree(folder.trajectories, tmp_path / "trajectories")
    (file,) = (tmp_path / "trajectories").glob("*.jsonl.gz")
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join(line for line in lines if b'"30-001"' not in line)))
    found = {step.step: step for step in Recording(tmp_path / "trajectories", make_config(model, tmp_path)).steps()}
    assert [(len(found[n].groups), found[n].missing_groups) for n in (2, 3)] == [(2, 0), (1, 1)]
    assert found[3].groups[0][0].group_id == "31"


def test_of_two_records_of_a_trajectory_the_last_attempt_counts(model, tmp_path):
    """A worker that lost its group to another may write after it."""
    (first, *others), folder = make_groups(1)[0], tmp_path / "trajectories"
    for worker, members in {
        "rollout-0": [replace(first, attempt=3, reward=7.0), *others],
        "rollout-1": [replace(first, attempt=2, reward=0.0)],
    }.items():
        log = TrajectoryLog(folder, worker, CodePointTokenizer(), rate=1.0, max_bytes=10**6)
        for member in members:
            log.add(member)
        log.write()
    append_step(folder, 1, {"10": 3})
    (step,) = Recording(folder, make_config(model, tmp_path)).steps()
    assert (step.groups[0][0].attempt, step.groups[0][0].reward) == (3, 7.0)


def test_steps_without_the_sizes_of_their_groups_are_refused_with_the_remedy(model, tmp_path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "steps.jsonl").write_text(json.dumps({"step": 1, "groups": ["a"]}) + "\n")
    with pytest.raises(ConfigError, match=r"how many members a group had, .* replay the step with that one"):
        Recording(tmp_path, make_config(model, tmp_path))


@pytest.fixture
def pruned(recorded, tmp_path):
    """The run's folder when no kept checkpoint needs a spooled step any more: its records are left."""
    copy = tmp_path / "pruned"
    shutil.copytree(recorded[0].path, copy)
    for file in (copy / "checkpoints" / "replay").glob("step_*"):
        file.unlink()
    return copy


def test_a_pruned_spool_leaves_the_records_and_says_so_and_what_of_them_was_trained(pruned, model, ranks, tmp_path):
    """Of step 1 nothing is recorded, of step 2 one group; step 3 has a line of an older Laminar; 4 is whole."""
    steps = pruned / "trajectories" / "steps.jsonl"
    text = steps.read_text().replace('"10"', '"no"').replace('"11"', '"nor"').replace('"20"', '"neither"')
    steps.write_text(text.replace('{"30": 3, "31": 3}', '["30", "31"]'))
    again, losses, said = replay(Recording(pruned, make_config(model, tmp_path)), model, ranks, tmp_path)
    assert losses.keys() == {2, 4}
    assert said[0].startswith("the trajectory records, log-probs to four digits")
    assert f"{pruned / 'checkpoints' / 'replay'} holds no step" in said[0]
    assert said[1].startswith("step 1 left out: none of its 2 groups is there: not recorded")
    assert said[2].startswith("step 2 without 1 groups (not recorded")
    assert said[3].startswith("step 3 left out: none of its 2 groups is there: steps.jsonl does not say how many members")
    told = "2 of 4 recorded steps trained, 1 of these without all groups, 2 left out, without a group to train; train/loss"
    assert said[-1].startswith(told)
    assert again.read_state().reason == said[-1]


def test_records_without_a_whole_group_are_refused_with_the_reason(pruned, model, tmp_path):
    for file in (pruned / "trajectories").glob("*.gz"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no group of its 4 recorded steps that can be trained again: not recorded"):
        Recording(pruned, make_config(model, tmp_path))


def test_a_record_of_another_shape_costs_itself(pruned, model, tmp_path):
    (file,) = (pruned / "trajectories").glob("*.jsonl.gz")
    strange = [b"[]", b'"text"', b'{"failure": null}', b'{"trajectory_id": 1}', b'{"failure": null, "trajec']
    file.write_bytes(gzip.compress(b"\n".join(strange) + b"\n") + file.read_bytes())
    with (pruned / "trajectories" / "steps.jsonl").open("a") as steps:
        steps.write('{"groups": {"10": 3}}\n{"step": 5}\n{"step": 6, "groups": 1}\n')
    found = [(step.step, len(step.groups)) for step in Recording(pruned, make_config(model, tmp_path)).steps()]
    assert found == [(step, 2) for step in range(1, STEPS + 1)]


def test_a_group_that_was_trained_without_its_failed_member_is_whole(model, tmp_path):
    """Sizes are those of what was trained; the failed attempt's record counts for nothing."""
    (first, *others), folder = make_groups(1)[0], tmp_path / "trajectories"
    log = TrajectoryLog(folder, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    for member in [replace(first, reward=None, failure=Failure(FailureKind.ENGINE, "gone")), *others]:
        log.add(member)
    log.write()
    append_step(folder, 1, {"10": 2})
    (step,) = Recording(folder, make_config(model, tmp_path)).steps()
    assert [member.member for member in step.groups[0]] == [1, 2]
    assert step.missing_groups == 0


def test_the_settings_of_one_process_are_those_of_no_sequence_group(recorded, model, tmp_path, monkeypatch):
    """What two ranks took of a row together, one takes alone."""
    folder, _ = recorded
    settings = {"num_ranks": 2, "sequence_parallel_size": 2, "max_tokens_per_micro_batch": 512, "share_prompts": False}
    seen = []
    monkeypatch.setattr("trainer.offline.join_ranks", lambda *_, **__: SimpleNamespace(leave=lambda: None))
    monkeypatch.setattr("trainer.offline.replay_recording", lambda config, *_: seen.append(config.trainer))
    train_recorded(make_config(model, tmp_path, **settings), folder.path, lambda text: None)
    (trainer,) = seen
    assert (trainer.num_ranks, trainer.sequence_parallel_size, trainer.max_tokens_per_micro_batch) == (1, 1, 1024)


def test_torn_lines_cost_no_recorded_step(recorded, model, tmp_path):
    folder, _ = recorded
    copy = tmp_path / "run"
    shutil.copytree(folder.path, copy)
    torn = '{"format_version": 1, "ste' + json.dumps({"kind": "step", "step": 9}) + "\n"  # a line glued to half of another
    for file in (copy / "metrics.jsonl", copy / "trajectories" / "steps.jsonl"):
        file.write_text(torn + file.read_text())
    config = make_config(model, tmp_path)
    assert Recording(copy, config).recorded_losses() == losses_of(folder)
    steps = Recording(copy / "trajectories", config).steps()
    assert [step.step for step in steps] == list(range(1, STEPS + 1))


def test_a_folder_without_recorded_steps_is_refused(tmp_path, model):
    (tmp_path / "trajectories").mkdir()
    with pytest.raises(ConfigError, match="holds no recorded step"):
        Recording(tmp_path, make_config(model, tmp_path))
    (tmp_path / "trajectories" / "steps.jsonl").write_text(json.dumps({"step": 1, "groups": {"a": 3}}) + "\n")
    with pytest.raises(ConfigError, match="holds no group of its 1 recorded steps"):
        Recording(tmp_path, make_config(model, tmp_path))
