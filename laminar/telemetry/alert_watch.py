"""Which alerts are news, from what an observer hears: the dashboard's rules, judged where no dashboard runs too (pure).

An alert is news when it appears, and again each `repeat_seconds` while it lasts; one that was away for `FORGET_SECONDS` and
comes back is news as well.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laminar.dashboard.alerts import EARLIER_STEPS, RECENT_STEPS, Alert, Facts
from laminar.telemetry.sinks.base import Line, scalars
from laminar.telemetry.stream import Event

FORGET_SECONDS = 60.0


@dataclass(slots=True)
class AlertWatch:
    """Remembers which alerts were told.

    Attributes:
        repeat_seconds: between two tellings of an alert that lasts.
    """

    repeat_seconds: float
    _told: dict[tuple[str, str], float] = field(default_factory=dict)
    _seen: dict[tuple[str, str], float] = field(default_factory=dict)

    def news(self, found: Sequence[Alert], now: float) -> list[Alert]:
        """Of the alerts there are now, those to tell."""
        self._seen |= {(alert.name, alert.subject): now for alert in found}
        for key in [key for key, seen in self._seen.items() if now - seen > FORGET_SECONDS]:
            del self._seen[key]
            self._told.pop(key, None)
        news = [alert for alert in found if self._is_due((alert.name, alert.subject), now)]
        self._told |= {(alert.name, alert.subject): now for alert in news}
        return news

    def _is_due(self, key: tuple[str, str], now: float) -> bool:
        told = self._told.get(key)
        return told is None or now - told >= self.repeat_seconds


@dataclass(slots=True)
class Hearing:
    """What alerts are judged by, from events and lines; times in Unix seconds, those of hearing.

    Attributes:
        mismatch_alarm: `trainer.mismatch_alarm`.
    """

    mismatch_alarm: float
    heard: dict[str, float] = field(default_factory=dict)
    lines: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=EARLIER_STEPS))
    stepped_at: float | None = None
    trainer_wait: str = ""
    is_paused: bool = False

    def note(self, event: Event, now: float) -> None:
        """An event was heard."""
        match event.kind:
            case "worker" | "clock":
                self.heard[event.role] = now
            case "retired":
                self.heard.pop(str(event.fields.get("role")), None)
            case "waiting":
                self.trainer_wait = str(event.fields.get("text", ""))
            case "step":
                self.stepped_at, self.trainer_wait = now, ""
            case "control" if event.fields.get("verb") in ("pause", "unpause"):
                self.is_paused = event.fields["verb"] == "pause"

    def note_line(self, line: Line) -> None:
        """A step has its line."""
        if line["kind"] == "step":
            self.lines.append(scalars(line))

    def facts(self, now: float, free_disk_ratio: float, *, is_alive: bool) -> Facts:
        """What is true now."""
        seconds = [line["time/step_seconds"] for line in list(self.lines)[-RECENT_STEPS:] if "time/step_seconds" in line]
        return Facts(
            is_alive=is_alive,
            silent={role: now - heard for role, heard in self.heard.items()},
            latest=self.lines[-1] if self.lines else {},
            earlier=self.lines[0] if self.lines else {},
            seconds_since_step=None if self.stepped_at is None else now - self.stepped_at,
            mean_step_seconds=sum(seconds) / len(seconds) if seconds else None,
            free_disk_ratio=free_disk_ratio,
            mismatch_alarm=self.mismatch_alarm,
            trainer_wait=self.trainer_wait,
            is_paused=self.is_paused,
        )
