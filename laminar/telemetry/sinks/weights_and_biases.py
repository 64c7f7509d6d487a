"""Weights & Biases: one W&B run a run of ours, gone on with by each resume under the same id.

Offline it writes into the run folder (`wandb sync` uploads that later) and asks nobody; online it needs an account, known to
`wandb` by its own means. W&B takes no point back: after a resume below the last step, which replay makes rare, the points
above it stand beside the new ones.
"""

from pathlib import Path
from typing import Any, Literal

import wandb

from laminar.telemetry.sinks.base import Line, scalars

STEP = "train/step"


class WandbWriter:
    """Writes lines into one W&B run.

    Args:
        folder: of the run; W&B makes `wandb/` in it.
        run_id: of the run, and of W&B's.
        mode: `offline` or `online`.
        project: in which it appears.
        settings: of the run, secrets starred.
    """

    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, wandb.Error)

    def __init__(
        self, folder: Path, run_id: str, mode: Literal["offline", "online"], project: str, settings: dict[str, Any]
    ) -> None:
        try:
            self._run: Any = wandb.init(
                dir=str(folder),
                id=run_id,
                name=run_id,
                project=project,
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=settings,
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
            )
        except wandb.Error as error:
            raise RuntimeError(f"W&B begins no run ({error}); log in, or set metrics.wandb to offline") from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, line: Line) -> None:
        """The metrics of a step or an evaluation; a mark as a text."""
        values: dict[str, Any] = {"mark": line["text"]} if line["kind"] == "mark" else scalars(line)
        self._run.log({**values, STEP: line["step"]})

    def rewind(self, step: int) -> None:
        """Points cannot be taken back."""

    def flush(self) -> None:
        """It does so itself."""

    def close(self) -> None:
        """Write out and end."""
        self._run.finish()
