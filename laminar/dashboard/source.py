"""All that the dashboard shows of one run, as JSON values: put together from its folder, its history and its live feed.

Invariants: secrets of the config leave here only starred; nothing here changes the run.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from laminar.cli.logs import find_logs, last_error, last_lines
from laminar.config.load import load_config, read_toml
from laminar.config.redact import redact
from laminar.config.root import LaminarConfig
from laminar.config.toml_text import format_document
from laminar.dashboard.alerts import EARLIER_STEPS, RECENT_STEPS, Facts, find_alerts
from laminar.dashboard.bottleneck import Filtering, bottleneck
from laminar.dashboard.history import History
from laminar.dashboard.live import LiveFeed, describe_buffer
from laminar.dashboard.prometheus import Sample, render_metrics
from laminar.run_folder import RunFolder
from laminar.telemetry.clock import SILENT_SECONDS
from laminar.trajectories import TrajectoryFolder

WINDOW_SECONDS = 120.0
STATE_SECONDS = 0.5
TRAINER = "trainer-0"


class RunSource:
    """One run, for showing.

    Attributes:
        folder: of the run.
        history: its steps.
        feed: what it says now.
        trajectories: its records.
        is_read: set once the history has been read to its end for the first time.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.history = History(folder.metrics)
        self.feed = LiveFeed(folder)
        self.trajectories = TrajectoryFolder(folder.trajectories)
        self.is_read = asyncio.Event()
        self._state: dict[str, Any] = {}
        self._state_at = -STATE_SECONDS
        self._config: LaminarConfig | None = None
        self._config_changed = 0.0

    async def read(self) -> None:
        """Read the history, which may be long, beside everything else."""
        await asyncio.to_thread(self.history.refresh)
        self.is_read.set()

    @property
    def config(self) -> LaminarConfig:
        """The run's settings, read again when the file changes."""
        changed = self.folder.config.stat().st_mtime
        if self._config is None or changed != self._config_changed:
            self._config, self._config_changed = load_config(self.folder.config), changed
        return self._config

    def state(self) -> dict[str, Any]:
        """What is true now; put together at most every `STATE_SECONDS`, however many ask."""
        now = time.monotonic()
        if now - self._state_at >= STATE_SECONDS:
            self.history.refresh()
            self._state, self._state_at = self._make_state(), now
        return self._state

    def _make_state(self) -> dict[str, Any]:
        run, view, latest, now = self.feed.state, self.feed.view, self.history.latest(), time.time()
        config = self.config
        buffer = describe_buffer(view.snapshot)
        ended = run.status in ("finished", "stopped", "failed")
        status = run.status if self.feed.is_alive or ended else f"dead while {run.status}"
        roles = self._roles(now)
        return {
            "run": {
                "id": run.run_id,
                "status": status,
                "reason": run.reason,
                "is_alive": self.feed.is_alive,
                "lives": run.lives,
                "started_at": run.started_at,
                "max_steps": config.run.max_steps,
                "bound": config.staleness.bound,
                "policy": config.staleness.policy,
                "in_flight_limit": config.rollout.max_in_flight_groups,
                "workers": {"running": _num_running_workers(roles), "wanted": run.wanted_workers},
            },
            "step": self.history.steps[-1] if self.history.steps else 0,
            "num_marks": len(self.history.marks),
            "num_evaluations": len(self.history.evaluations),
            "latest": latest,
            "recent": self.history.recent(RECENT_STEPS),
            "roles": roles,
            "relays": self.feed.relays,
            "trainer_wait": view.trainer_wait,
            "buffer": buffer,
            "bottleneck": self._bottleneck(),
            "alerts": [asdict(alert) for alert in find_alerts(self._facts(latest, now))],
            "now": now,
        }

    def _roles(self, now: float) -> dict[str, dict[str, Any]]:
        """Every role that is shown; of one that is silent also the last error in its log, which may say why."""
        view, is_alive = self.feed.view, self.feed.is_alive
        missed = view.missed(self.feed.state.started_at) if is_alive else ()
        roles = {}
        for name in self._shown_roles():
            role = view.roles[name]
            seconds = round(max(0.0, now - role.heard_at), 1) if name in missed else None
            is_silent = (seconds or 0.0) > SILENT_SECONDS
            roles[name] = {
                "state": role.state,
                "silent_seconds": seconds,
                "is_silent": is_silent,
                "last_error": last_error(self.folder, name) if is_silent else "",
                "metrics": role.metrics,
                "shares": view.shares(name, WINDOW_SECONDS),
            }
        return roles

    def _shown_roles(self) -> list[str]:
        """In order of their names; of a living run without those of an earlier life, or that ended in order."""
        view = self.feed.view
        left = view.missed(self.feed.state.started_at)
        return sorted(left if self.feed.is_alive and left else view.roles)

    def _bottleneck(self) -> str:
        view, snapshot = self.feed.view, self.feed.view.snapshot
        recent = self.history.values("staleness/versions_mean", RECENT_STEPS)
        return bottleneck(
            view.shares(TRAINER, WINDOW_SECONDS),
            [view.shares(name, WINDOW_SECONDS) for name in self._shown_roles() if name.startswith("rollout-")],
            staleness_mean=sum(recent) / len(recent) if recent else None,
            bound=self.config.staleness.bound,
            is_alive=self.feed.is_alive,
            is_paused=bool(snapshot and snapshot.is_paused),
            filtering=self._filtering(),
        )

    def _filtering(self) -> Filtering:
        """Of what was played since some steps ago, also in the step that does not end for want of groups."""
        history, snapshot = self.history, self.feed.view.snapshot
        now = {name: history.value(f"experience/{name}") or 0.0 for name in ("trained", "filtered")}
        if snapshot is not None and snapshot.is_open:
            now = {"trained": snapshot.counters.trained, "filtered": snapshot.counters.filtered}
        since = {name: count - (history.value(f"experience/{name}", -RECENT_STEPS) or 0.0) for name, count in now.items()}
        total = sum(since.values())
        low, high = min(history.values("reward/min"), default=0.0), max(history.values("reward/max"), default=0.0)
        mean = history.value("reward/finished_mean")
        level = (mean - low) / (high - low) if mean is not None and high > low else None
        return Filtering(since["filtered"] / total if total > 0 else 0.0, level)

    def _facts(self, latest: dict[str, float], now: float) -> Facts:
        usage = shutil.disk_usage(self.folder.path)
        seconds = self.history.values("time/step_seconds", RECENT_STEPS)
        view, began = self.feed.view, self.feed.state.started_at
        return Facts(
            is_alive=self.feed.is_alive,
            silent={name: now - view.roles[name].heard_at for name in view.missed(began)},
            latest=latest,
            earlier={name: self.history.value(name, -EARLIER_STEPS) or 0.0 for name in latest},
            seconds_since_step=now - latest["time"] if "time" in latest and latest["time"] >= began else None,
            mean_step_seconds=sum(seconds) / len(seconds) if seconds else None,
            free_disk_ratio=usage.free / usage.total,
            mismatch_alarm=self.config.trainer.mismatch_alarm,
            trainer_wait=view.trainer_wait,
            is_paused=bool(view.snapshot and view.snapshot.is_paused),
        )

    def timeline(self, seconds: float, max_spans: int = 500) -> dict[str, Any]:
        """Every role's states over the last `seconds` that are known; too short ones are drawn with the one before."""
        spans = self.feed.view.spans
        end = max((known[-1][2] for known in spans.values() if known), default=time.time())
        begin = end - seconds
        return {
            "begin": begin,
            "end": end,
            "roles": {name: _drawable(known, begin, seconds / max_spans) for name, known in sorted(spans.items())},
        }

    def replicas(self) -> dict[str, Any]:
        """Each role's metrics over the last minutes, in columns."""
        names = (
            "engine/kv_use_ratio",
            "engine/running",
            "engine/waiting",
            "worker/version_number",
            "worker/open_trajectories",
        )
        return {
            role: {"times": [round(at, 2) for at, _ in window], **{n: [m.get(n) for _, m in window] for n in names}}
            for role in self._shown_roles()
            if role.startswith("rollout-") and (window := self.feed.view.windows.get(role))
        }

    def config_text(self) -> str:
        """The run's settings as TOML, secrets starred."""
        redacted: dict[str, Any] = redact(read_toml(self.folder.config))
        return format_document(redacted)

    def log_lines(self, role: str, count: int) -> list[tuple[str, str]]:
        """The last lines of one role's log, or of all.

        Raises:
            ConfigError: there is no such log.
        """
        return last_lines(find_logs(self.folder, role), count)

    def prometheus(self) -> str:
        """The text of `/metrics`."""
        state = self.state()
        run = {"run": state["run"]["id"]}
        samples: list[Sample] = [(name, run, value) for name, value in state["latest"].items()]
        for role, facts in state["roles"].items():
            samples += [(name, {**run, "role": role}, value) for name, value in facts["metrics"].items()]
        extra = [("laminar_up", "whether the run is alive", run, float(state["run"]["is_alive"]))]
        usage = shutil.disk_usage(self.folder.path)
        free = usage.free / usage.total
        extra.append(("laminar_free_disk_ratio", "share of the run folder's disk that is free", run, free))
        extra += [
            ("laminar_role_silent_seconds", "since a role was heard of", {**run, "role": role}, facts["silent_seconds"])
            for role, facts in state["roles"].items()
            if facts["silent_seconds"] is not None
        ]
        if (bound := state["run"]["bound"]) is not None:
            extra.append(("laminar_staleness_bound", "largest staleness allowed (versions)", run, float(bound)))
        alarm = self.config.trainer.mismatch_alarm
        extra.append(("laminar_mismatch_alarm", "KL of fresh tokens above which the run warns (nats)", run, alarm))
        for stage, ages in state["buffer"].get("ages", {}).items():
            extra += [
                ("laminar_outstanding_groups", "groups by stage and age in versions",
                 {**run, "stage": stage, "versions": str(age)}, float(count))
                for age, count in ages.items()
            ]  # fmt: skip
        extra += [
            (
                "laminar_alerts",
                "alerts that the dashboard shows",
                {**run, "name": alert["name"], "level": alert["level"]},
                1.0,
            )
            for alert in {a["name"]: a for a in state["alerts"]}.values()
        ]
        return render_metrics(samples, extra)


def _num_running_workers(roles: Mapping[str, Mapping[str, Any]]) -> int:
    """Rollout workers that are heard of and have started."""
    workers = [role for name, role in roles.items() if name.startswith("rollout-")]
    return sum(role["silent_seconds"] is not None and not role["is_silent"] and role["state"] != "start" for role in workers)


def _drawable(known: Any, begin: float, resolution: float) -> list[list[Any]]:
    drawn: list[list[Any]] = []
    for state, start, end in list(known):
        if end < begin:
            continue
        if drawn and (end - start < resolution or drawn[-1][0] == state) and start - drawn[-1][2] < resolution:
            drawn[-1][2] = round(end, 3)
        else:
            drawn.append([state, round(max(start, begin), 3), round(end, 3)])
    return drawn
