"""`laminar eval`: how good is a checkpoint, a relay's version or any Hugging Face folder, on the held-out prompts?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.errors import ConfigError
from laminar.plugins import load_attribute
from laminar.scores import Estimate, EvaluationReport

EVALUATOR = "rollout.offline_evaluation:evaluate_folder"
ORIGIN = "trainer.export:find_origin"
"""Live above this floor, so they are named, not imported."""


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT|FOLDER", help="A run, a checkpoint, or any Hugging Face folder of weights"),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, such as eval.samples_per_prompt=8 eval.temperature=1")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Config file; that of the run, if there is one")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint of this step of a run; 0: before training")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Answer the held-out prompts with an engine of the run's kind: mean reward, pass@k, and 95 % intervals."""
    weights, number, config = _find(source, step, config)
    settings = load_config(config, overrides or [])
    check_config(settings)
    weights = Path(settings.model.path) if weights is None else weights
    report: EvaluationReport = load_attribute(EVALUATOR)(settings, weights.resolve(), number)
    if as_json:
        typer.echo(json.dumps({"weights": str(weights), **report.as_json()}))
    else:
        Console().print(_table(report, weights))


def _find(source: Path, step: int | None, config: Path | None) -> tuple[Path | None, int, Path]:
    """The folder of weights (None: the model that the run began with), their number, and the config to use."""
    is_run = (source / "checkpoints").is_dir()
    if is_run and step == 0:
        return None, 0, config or source / "config.toml"
    if not is_run and not (source / "model").is_dir():
        if config is None:
            raise ConfigError(f"{source} is no run and no checkpoint of one: say with --config what to ask it, and how")
        if step is not None:
            raise ConfigError(f"--step {step}: {source} is no run, so it has no steps; leave it out, or name a run")
        return source, 0, config
    origin: Any = load_attribute(ORIGIN)(source, step)
    config = config or origin.config
    if config is None:
        raise ConfigError(f"{source} has no config.toml beside its checkpoints: name one with --config")
    return origin.checkpoint / "model", origin.step, config


def _table(report: EvaluationReport, weights: Path) -> Table:
    title = f"{weights}: {report.num_prompts} prompts, {report.num_samples} answers, {report.num_failed} failed"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "mean", "95 % interval", "prompts"):
        table.add_column(name, justify="right" if name else "left")
    figures = {f"reward, mean@{report.samples_per_prompt}": report.mean}
    figures |= {f"pass@{k}": estimate for k, estimate in report.pass_at.items()}
    for name, estimate in figures.items():
        table.add_row(name, f"{estimate.value:.4f}", _interval(estimate), str(estimate.num_prompts))
    return table


def _interval(estimate: Estimate) -> str:
    return "" if estimate.low is None or estimate.high is None else f"{estimate.low:.4f} to {estimate.high:.4f}"
