"""The live panel of `laminar run`: one screen that answers "is it learning, how stale is it, who waits for whom"."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laminar.telemetry.view import RunView

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], width: int = 50) -> str:
    """The last `width` values as a row of bars between their own minimum and maximum."""
    last = list(values)[-width:]
    if not last:
        return ""
    low, span = min(last), max(max(last) - min(last), 1e-9)
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in last)


def duration(seconds: float | None) -> str:
    """`1 h 02 min`, `3 min 20 s`, or `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def staleness_text(view: RunView) -> str:
    """Shares of trained trajectories by staleness."""
    total = sum(view.staleness.values())
    return "  ".join(f"{k}: {100 * n / total:.0f} %" for k, n in sorted(view.staleness.items())) if total else "-"


def render(view: RunView, title: str, bound: int | None) -> RenderableType:
    """The panel."""
    open_trajectories = sum(w.get("worker/open_trajectories", 0) for w in view.workers.values())
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column()
    rows = [
        ("step", f"{view.step} of {view.max_steps}   left: {duration(view.seconds_left())}"),
        ("reward", f"{shown(view, 'reward/finished_mean', '.3f')}   {sparkline(view.rewards)}"),
        ("loss", f"{shown(view, 'train/loss', '+.4f')}   mismatch KL {shown(view, 'mismatch/kl', '.2e')}"),
        ("staleness", f"{staleness_text(view)}   bound: {'none' if bound is None else bound}"),
        ("trained", f"{shown(view, 'throughput/trained_tokens_per_second', '.0f')} tokens/s"),
        ("generated", f"{_rate(view.generated_per_second())} tokens/s"),
        (
            "buffer",
            f"{shown(view, 'experience/ready_groups', '.0f')} groups ready, {open_trajectories:.0f} trajectories open",
        ),
        ("weights", f"trainer {shown(view, 'weights/trainer_version', '.0f')}   {versions_text(view)}"),
    ]
    for name, value in rows:
        facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if view.trainer_wait:
        parts.append(Text(f"trainer waits for {view.trainer_wait}", style="yellow"))
    parts += [Text(notice, style="red") for notice in view.notices[-3:]]
    return Panel(Group(*parts), title=title, title_align="left")


def shown(view: RunView, name: str, form: str) -> str:
    """The latest value of a metric, or `-` before there is one."""
    value = view.latest.get(name)
    return "-" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def versions_text(view: RunView) -> str:
    """Each worker's version."""
    texts = []
    for role, metrics in sorted(view.workers.items()):
        number = int(metrics.get("worker/version_number", -1))
        texts.append(f"{role} {'?' if number < 0 else number}")
    return "   ".join(texts)


def step_line(view: RunView) -> str:
    """One line a step, for logs and pipes."""
    return (
        f"step {view.step}/{view.max_steps}  reward {shown(view, 'reward/finished_mean', '.3f')}  "
        f"loss {shown(view, 'train/loss', '+.4f')}  "
        f"staleness {shown(view, 'staleness/versions_mean', '.2f')} (max {shown(view, 'staleness/versions_max', '.0f')})  "
        f"trained {shown(view, 'throughput/trained_tokens_per_second', '.0f')} tok/s  "
        f"generated {_rate(view.generated_per_second())} tok/s  "
        f"ready {shown(view, 'experience/ready_groups', '.0f')}  step {shown(view, 'time/step_seconds', '.2f')} s  "
        f"left {duration(view.seconds_left())}"
    )
