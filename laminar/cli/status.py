"""`laminar status`: what a run is doing, from outside."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from laminar.dashboard.source import RunSource
from laminar.run_folder import RunFolder
from laminar.telemetry.report import reward_of

RECENT_STEPS = 20
"""Over which trained tokens a second are told: one step alone says little."""

COUNTS = ("admitted", "running", "buffered", "taken", "trained", "filtered", "evicted", "failed", "reissued", "refilled")


def status(
    folder: Annotated[Path, typer.Argument(help="The run folder")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Say how a run stands: alive or not, step, reward, staleness, buffer, and who waits for what."""
    facts = collect(RunFolder.open(folder))
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name.replace('_', ' '):>22}  {as_text(value)}")


def as_text(value: Any) -> str:
    """A fact for people: sentences one after the other, counts by name, counts by reason as their sum."""
    if isinstance(value, list):
        return "; ".join(value) or "none"
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, dict):
        return str(value)
    parts = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            reasons = f" ({as_text(inner)})" if inner else ""
            parts.append(f"{name} {sum(inner.values())}{reasons}")
        else:
            parts.append(f"{name} {inner}")
    return ", ".join(parts) or "none"


def collect(folder: RunFolder) -> dict[str, Any]:
    """The facts, from the folder and, if the run is alive, from its data module."""
    state = folder.read_state()
    alive = folder.is_alive()
    words = state.status if alive or state.status in ("finished", "stopped", "failed") else f"dead while {state.status}"
    facts: dict[str, Any] = {"run": state.run_id, "status": words, "reason": state.reason, "lives": state.lives}
    source = RunSource(folder)
    source.history.refresh()
    if alive and state.dashboard_url:
        facts["dashboard"] = state.dashboard_url
    if source.history.steps:
        last, recent = source.history.latest(), source.history.recent(RECENT_STEPS)
        facts |= {
            "step": source.history.steps[-1],
            "reward": None if (reward := reward_of(last)) is None else round(reward, 4),
            "staleness_max": last.get("staleness/versions_max"),
            "trained_tokens_per_s": round(recent.get("throughput/trained_tokens_per_second", 0)),
            "generated_tokens_per_s": round(last.get("throughput/generated_tokens_per_second", 0)),
        }
    if alive and state.redis_url:
        facts |= asyncio.run(_from_run(source))
    return facts


async def _from_run(source: RunSource) -> dict[str, Any]:
    """What the living run says of itself: where its groups stand, what its roles do, and what limits it."""
    trouble = await source.feed.look_once()
    view = source.feed.view
    if trouble or view.snapshot is None:
        return {"data module": f"not reachable: {trouble or 'it is not up yet'}"}
    snapshot, state = view.snapshot, source.state()
    return {
        "published": str(snapshot.published),
        "rollouts": "paused" if snapshot.is_paused else "admitting",
        "max_staleness": "unbounded" if snapshot.max_staleness is None else snapshot.max_staleness,
        "outstanding_groups": len(snapshot.headers),
        "trajectories": {name: value for name, value in asdict(snapshot.counters).items() if name in COUNTS},
        "refused_claims": snapshot.counters.refused_claims,
        "rollout_workers": state["run"]["workers"],
        "roles": {name: role_text(role, state["now"]) for name, role in state["roles"].items()},
        "trainer_waits_for": view.trainer_wait or "nothing in particular",
        "limited_by": state["bottleneck"],
        "alerts": [alert["text"] for alert in state["alerts"]],
    }


def role_text(role: Mapping[str, Any], now: float) -> str:
    """What a role does; of one that is silent since when, and the last error that it wrote down."""
    if not role["is_silent"]:
        return str(role["state"])
    since = time.strftime("%H:%M:%S", time.localtime(now - role["silent_seconds"]))
    error = role["last_error"] or "none in its log"
    return f"silent for {role['silent_seconds']:.0f} s (since {since}; last error: {error})"
