"""`laminar train --replay`: the recorded steps of a run, trained again in this process, without engines, Redis or Ray.

The same steps with the same settings give the same losses: for debugging, profiling, and for trying other losses on the same
data. It knows the trainer's engine and algorithms, not where trajectories came from.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError
from laminar.experience.answers import Frontier
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.files import MetricsFile
from trainer import checkpoint
from trainer.algorithms.base import Algorithm
from trainer.checkpoint_folder import checkpoint_path, read_extra
from trainer.engine import TrainerEngine
from trainer.loop import batch_digest
from trainer.progress import Progress
from trainer.ranks import Ranks, join_ranks
from trainer.recorded import RecordedStep, Recording
from trainer.session import build_algorithm
from trainer.step import StepReport, train_step

Say = Callable[[str], None]


def train_recorded(config: LaminarConfig, source: Path, say: Say) -> Path:
    """Train what is recorded, in a process of its own.

    Args:
        config: settings of this training; `trainer.num_ranks` counts as 1, which changes no update.
        source: a run folder, its `checkpoints/replay`, or its `trajectories`.
        say: hears one line a step.

    Returns:
        A new run folder: metrics of every step, and a checkpoint after the last one.

    Raises:
        ConfigError: nothing is recorded there, or the settings cannot train it.
        SpoolError: a file of the spool is damaged.
    """
    if config.trainer.kind == "emulated":
        raise ConfigError('trainer.kind is "emulated", which trains nothing: set it to "deepspeed"')
    if config.trainer.num_ranks > 1:
        say(f"one process instead of trainer.num_ranks = {config.trainer.num_ranks}: the updates are the same")
        config = config.model_copy(update={"trainer": _on_one_rank(config.trainer)})
    recording = Recording(source, config)
    ranks = join_ranks(0, 1, use_gpu=config.trainer.num_gpus_per_rank > 0)
    try:
        return replay_recording(config, recording, ranks, say)
    finally:
        ranks.leave()


def _on_one_rank(trainer: TrainerConfig) -> TrainerConfig:
    """The same updates in one process; it takes the rows whole that ranks of a sequence shared."""
    tokens = trainer.max_tokens_per_micro_batch * trainer.sequence_parallel_size
    ranks = {"num_ranks": 1, "sequence_parallel_size": 1}
    return trainer.model_copy(update={**ranks, "max_tokens_per_micro_batch": tokens})


def replay_recording(config: LaminarConfig, recording: Recording, ranks: Ranks, say: Say) -> Path:
    """Train a recording on one rank: from the run's checkpoint before its first step, else from the model; see above."""
    folder, started = RunFolder.create(Path(config.run.directory), f"{config.run.name}-replay"), time.time()
    folder.write_config(dump_toml(config))
    state = RunState(folder.path.name, secrets.token_hex(16), os.getpid(), "running", started_at=started)
    folder.write_state(state)
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    say(f"{recording}; {_restore(engine, algorithm, recording)}")
    metrics, recorded, progress, told = MetricsFile(folder.metrics), recording.recorded_losses(), Progress(), _Told()
    for batch in recording.steps():
        began = time.perf_counter()
        if not batch.groups:
            told.num_left_out += 1
            say(f"step {batch.step} left out: none of its {batch.missing_groups} groups is there: {batch.missing_reason}")
            continue
        report = train_step(engine, algorithm, batch.groups, batch.step, oldest_trained=batch.oldest_trained)
        progress = _advance(progress, report, time.perf_counter() - began)
        _write(metrics, batch, report, progress)
        told.add(batch, report, recorded)
        say(_line(batch, report, recorded.get(batch.step)))
    extra = {
        "progress": asdict(progress),
        "frontier": Frontier(number=progress.step).to_json(),
        "algorithm": algorithm.state(),
        "spikes": engine.spikes.state(),
    }
    checkpoint.save(folder.checkpoints, progress.step, engine, extra, keep=1)
    folder.write_state(replace(state, status="finished", reason=str(told)))
    say(str(told))
    return folder.path


@dataclass(slots=True)
class _Told:
    """How the recorded steps fared; as text, a sentence.

    Attributes:
        num_trained: steps that were updated by; of `num_partly` of them groups were missing.
        num_skipped: steps that the trainer skipped.
        num_left_out: steps without a group to train.
        differences: of `train/loss` from what the recorded run logged.
    """

    num_trained: int = 0
    num_partly: int = 0
    num_skipped: int = 0
    num_left_out: int = 0
    differences: list[float] = field(default_factory=list)

    def add(self, batch: RecordedStep, report: StepReport, recorded: dict[int, float]) -> None:
        """Count a step that had groups."""
        self.num_skipped += bool(report.skipped_reason)
        self.num_trained += not report.skipped_reason
        self.num_partly += bool(batch.missing_groups) and not report.skipped_reason
        if report.step in recorded and "train/loss" in report.metrics:
            self.differences.append(abs(report.metrics["train/loss"] - recorded[report.step]))

    def __str__(self) -> str:
        num_steps = self.num_trained + self.num_skipped + self.num_left_out
        words = f"{self.num_trained}{'' if self.num_trained == num_steps else f' of {num_steps}'} recorded steps trained"
        parts = [
            (self.num_partly, "of these without all groups"),
            (self.num_skipped, "skipped by the trainer"),
            (self.num_left_out, "left out, without a group to train"),
        ]
        words += "".join(f", {number} {what}" for number, what in parts if number)
        if self.differences:
            words += f"; train/loss differs from the recorded run's by at most {max(self.differences):.3g}"
        return words


def _restore(engine: TrainerEngine, algorithm: Algorithm, recording: Recording) -> str:
    """Load what training began with; says what it is."""
    before = recording.first - 1
    saved = None if recording.run is None else checkpoint_path(recording.run / "checkpoints", before)
    if before and saved is not None and saved.is_dir():
        checkpoint.load(saved, engine)
        extra = read_extra(saved)
        algorithm.load_state(extra.get("algorithm", {}))
        engine.spikes.load_state(extra.get("spikes", {}))
        return f"from {saved}"
    note = f", although the first recorded step is {recording.first}: its checkpoint is not there" if before else ""
    return f"from {engine.config.model.path}{note}"


def _advance(progress: Progress, report: StepReport, seconds: float) -> Progress:
    return replace(
        progress,
        step=report.step,
        step_seconds=progress.step_seconds + seconds,
        trained_tokens=progress.trained_tokens + report.trained_tokens,
        skipped_steps=progress.skipped_steps + bool(report.skipped_reason),
        skipped_in_a_row=progress.skipped_in_a_row + 1 if report.skipped_reason else 0,
    )


def _write(metrics: MetricsFile, batch: RecordedStep, report: StepReport, progress: Progress) -> None:
    values = report.metrics | {"train/step": report.step, "train/skipped_steps": progress.skipped_steps}
    metrics.append("step", report.step, {"time": time.time(), "batch": batch_digest(batch.groups), **values})


def _line(batch: RecordedStep, report: StepReport, recorded: float | None) -> str:
    missing = f" without {batch.missing_groups} groups ({batch.missing_reason})" if batch.missing_groups else ""
    if report.skipped_reason:
        return f"step {report.step}{missing} skipped: {report.skipped_reason}"
    then = "" if recorded is None else f" (recorded {recorded:.6f})"
    return (
        f"step {report.step}{missing}: loss {report.metrics['train/loss']:.6f}{then}, "
        f"reward {report.metrics.get('reward/mean', 0.0):.3f}, {report.trained_tokens} tokens"
    )
