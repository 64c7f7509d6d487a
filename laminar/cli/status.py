"""`laminar status`: what a run is doing, from outside."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.dashboard.history import History
from laminar.errors import LaminarError
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.store import ExperienceStore
from laminar.run_folder import RunFolder, RunState

RECENT_STEPS = 20
"""Over which tokens a second are told: one step alone says little."""


def status(
    folder: Annotated[Path, typer.Argument(help="The run folder")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Say how a run stands: alive or not, step, reward, staleness, buffer."""
    facts = collect(RunFolder.open(folder))
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:>22}  {value}")


def collect(folder: RunFolder) -> dict[str, Any]:
    """The facts, from the folder and, if the run is alive, from its data module."""
    state = folder.read_state()
    alive = folder.is_alive()
    words = state.status if alive or state.status in ("finished", "stopped", "failed") else f"dead while {state.status}"
    facts: dict[str, Any] = {"run": state.run_id, "status": words, "reason": state.reason, "lives": state.lives}
    history = History(folder.metrics)
    history.refresh()
    if alive and state.dashboard_url:
        facts["dashboard"] = state.dashboard_url
    if history.steps:
        last, recent = history.latest(), history.recent(RECENT_STEPS)
        facts |= {
            "step": history.steps[-1],
            "reward": round(last.get("reward/mean", float("nan")), 4),
            "staleness_max": last.get("staleness/versions_max"),
            "trained_tokens_per_s": round(recent.get("throughput/trained_tokens_per_second", 0)),
            "generated_tokens_per_s": round(recent.get("throughput/generated_tokens_per_second", 0)),
        }
    if alive and state.redis_url:
        facts |= asyncio.run(_from_buffer(state))
    return facts


async def _from_buffer(state: RunState) -> dict[str, Any]:
    try:
        client = await connect(state.redis_url)
        snapshot = await ExperienceBuffer(ExperienceStore(client, state.run_id)).peek()
        await client.aclose()
    except LaminarError as error:
        return {"data module": f"not reachable: {error}"}
    return {
        "published": str(snapshot.published),
        "rollouts": "paused" if snapshot.is_paused else "admitting",
        "max_staleness": "unbounded" if snapshot.max_staleness is None else snapshot.max_staleness,
        "outstanding_groups": len(snapshot.headers),
        "trajectories": ", ".join(f"{name} {value}" for name, value in asdict(snapshot.counters).items()),
    }
