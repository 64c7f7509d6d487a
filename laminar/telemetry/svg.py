"""Line plots as SVG text (pure), for files that show themselves without a script; their style sheet gives the colours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 30
MAX_POINTS = 800


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a label, its y values (None: a gap), and whether it is dashed."""

    label: str
    values: Sequence[float | None]
    is_dashed: bool = False


def plot(title: str, unit: str, xs: Sequence[float], lines: Sequence[Line], marks: Sequence[float] = ()) -> str:
    """A figure with a caption and a legend.

    Args:
        title: of the figure.
        unit: of y.
        xs: ascending.
        lines: each as long as `xs`.
        marks: places on the x axis that get a dotted line.
    """
    known = [value for line in lines for value in line.values if value is not None and math.isfinite(value)]
    heading = f"{title} ({unit})" if unit else title
    if not xs or not known:
        return f"<figure><figcaption>{escape(heading)}</figcaption><p>Nothing was recorded.</p></figure>"
    ticks = nice_ticks(min(known), max(known))
    low, high = min(ticks[0], min(known)), max(ticks[-1], max(known))
    x_span, y_span = max(xs[-1] - xs[0], 1e-12), max(high - low, 1e-12)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - xs[0]) / x_span, (y - low) / y_span
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_tick(place(xs[0], tick)[1], tick) for tick in ticks]
    parts += [_x_label(place(x, low)[0], x) for x in nice_ticks(xs[0], xs[-1]) if xs[0] <= x <= xs[-1]]
    for mark in marks:
        if xs[0] <= mark <= xs[-1]:
            x = place(mark, low)[0]
            parts.append(f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
    for number, line in enumerate(lines):
        parts.append(_path(number, line, xs, place))
    legend = "".join(f'<span class="key k{number}">{escape(line.label)}</span>' for number, line in enumerate(lines))
    return (
        f"<figure><figcaption>{escape(heading)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(heading)}">{"".join(parts)}</svg>'
        f'<p class="legend">{legend}</p></figure>'
    )


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that lie in or around an interval, ascending."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step)
    return [round(number * step, 12) for number in range(first, math.ceil(high / step) + 1)]


def _tick(y: float, value: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
    return line + f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _x_label(x: float, value: float) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'


def _path(number: int, line: Line, xs: Sequence[float], place: Callable[[float, float], tuple[float, float]]) -> str:
    stride = max(1, math.ceil(len(xs) / MAX_POINTS))
    commands, pen_is_down = [], False
    for start in range(0, len(xs), stride):
        known = [value for value in line.values[start : start + stride] if value is not None and math.isfinite(value)]
        if not known:
            pen_is_down = False
            continue
        x, y = place(xs[min(start + stride, len(xs)) - 1], sum(known) / len(known))
        commands.append(f"{'L' if pen_is_down else 'M'}{x:.1f} {y:.1f}")
        pen_is_down = True
    dash = ' stroke-dasharray="7 5"' if line.is_dashed else ""
    return f'<path class="k{number}" d="{"".join(commands)}"{dash}/>'
