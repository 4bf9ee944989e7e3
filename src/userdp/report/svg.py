"""Pictures as SVG text: horizontal bars, lines over two axes, and the parts of other plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#8a8f98", "#1f6f5c", "#b4472e", "#3b5b92")
INK = "#22262b"
FAINT = "#d9dcdf"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: its label, its length, and the text at its end."""

    label: str
    value: float
    text: str
    colour: str = COLOURS[0]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line through (x, y) points."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[1]
    dashed: bool = False


def bars(entries: Sequence[Bar], *, title: str, longest: float | None = None) -> str:
    """Horizontal bars from zero, one below the other."""
    longest = longest or max((entry.value for entry in entries), default=1.0) or 1.0
    left, width, height = 190, 380, 30
    parts = [
        f'<svg viewBox="0 0 700 {len(entries) * height + 8}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    for number, entry in enumerate(entries):
        top = number * height + 4
        length = max(1.5, width * entry.value / longest)
        middle = top + 16
        parts.append(
            f'<text x="{left - 10}" y="{middle}" text-anchor="end" fill="{INK}">'
            f"{escape(entry.label)}</text>"
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="22" rx="2" '
            f'fill="{entry.colour}"/>'
            f'<text x="{left + length + 8:.1f}" y="{middle}" fill="{INK}">'
            f"{escape(entry.text)}</text>"
        )
    return "".join([*parts, "</svg>"])


def lines(
    entries: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_max: float,
    y_max: float,
) -> str:
    """Lines over axes that start at zero, with a legend."""
    left, top, width, height = 64, 14, 430, 250

    def x(value: float) -> float:
        return left + width * value / x_max

    def y(value: float) -> float:
        return top + height * (1 - value / y_max)

    parts = [f'<svg viewBox="0 0 700 320" role="img" aria-label="{escape(title)}">']
    for tick in range(6):
        x_value, y_value = x_max * tick / 5, y_max * tick / 5
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(y_value):.1f}" y2="{y(y_value):.1f}" '
            f'stroke="{FAINT}"/>'
            f'<text x="{left - 8}" y="{y(y_value) + 4:.1f}" text-anchor="end" fill="{INK}">'
            f"{y_value:g}</text>"
            f'<text x="{x(x_value):.1f}" y="{top + height + 18}" text-anchor="middle" '
            f'fill="{INK}">{x_value:g}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle" fill="{INK}">'
        f"{escape(x_label)}</text>"
        f'<text transform="translate(16 {top + height / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="{INK}">{escape(y_label)}</text>'
    )
    for number, entry in enumerate(entries):
        dash = ' stroke-dasharray="5 4"' if entry.dashed else ""
        legend = top + 14 + 22 * number
        parts.append(
            polyline(
                [(x(px), y(py)) for px, py in entry.points],
                colour=entry.colour,
                width=2.2,
                dash=dash,
            )
            + f'<line x1="{left + width + 16}" x2="{left + width + 40}" y1="{legend - 4}" '
            f'y2="{legend - 4}" stroke="{entry.colour}" stroke-width="2.2"{dash}/>'
            f'<text x="{left + width + 46}" y="{legend}" fill="{INK}">{escape(entry.label)}</text>'
        )
    return "".join([*parts, "</svg>"])


def scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Map the smallest of `values` to `start`, the largest to `end`, and others in between.

    >>> scale([2.0, 4.0], 10.0, 20.0)(3.0)
    15.0
    """
    low, high = min(values), max(values)
    span = high - low or 1.0
    return lambda value: start + (end - start) * (value - low) / span


def polyline(
    points: Sequence[tuple[float, float]], *, colour: str, width: float, dash: str = ""
) -> str:
    """A line through points of the picture."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def text(
    x: float, y: float, text: str, size: int = 10, *, anchor: str = "start", colour: str = "#222"
) -> str:
    """Words at a point of the picture."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{text}</text>\n"
    )
