"""Pictures as SVG text: horizontal bars, lines over two axes, and the parts of other plots."""

from __future__ import annotations

import math
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
    """One line through (x, y) points. With `dots`, each point has one: nothing is known between."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[1]
    dashed: bool = False
    dots: bool = False


# Pictures are narrow, so that their text can be read on a telephone.
WIDTH = 480


def bars(entries: Sequence[Bar], *, title: str, longest: float | None = None) -> str:
    """Horizontal bars from zero, one below the other, each under its label."""
    longest = longest or max((entry.value for entry in entries), default=1.0) or 1.0
    width, height = 330, 48
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {len(entries) * height + 4}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    for number, entry in enumerate(entries):
        top = number * height
        length = max(1.5, width * entry.value / longest)
        parts.append(
            f'<text x="0" y="{top + 14}" fill="{INK}">{escape(entry.label)}</text>'
            f'<rect x="0" y="{top + 20}" width="{length:.1f}" height="20" rx="2" '
            f'fill="{entry.colour}"/>'
            f'<text x="{length + 8:.1f}" y="{top + 35}" fill="{INK}">{escape(entry.text)}</text>'
        )
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, three to seven of them; only whole ones if asked for.

    >>> ticks(0.0, 12.0, whole=True)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    >>> ticks(0.0, 3.0, whole=True)
    [0.0, 1.0, 2.0, 3.0]
    >>> ticks(2.9, 3.4)
    [2.9, 3.0, 3.1, 3.2, 3.3, 3.4]
    """
    span = high - low or 1.0
    scale = 10.0 ** math.floor(math.log10(span))
    sizes = [part * scale for part in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5)]
    if whole:
        sizes = [size for size in sizes if size >= 1 and size == round(size)] or [1.0]
    size = next((one for one in sizes if span / one <= 6), sizes[-1])
    # A tick that misses an end by rounding only counts as being there.
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(number * size, 10) for number in range(first, last + 1)]


def lines(
    entries: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_max: float,
    y_max: float,
    y_min: float = 0.0,
    whole_x: bool = False,
) -> str:
    """Lines over two axes, with a legend below; x begins at zero, y at `y_min`."""
    left, top, width, height = 62, 12, WIDTH - 62 - 14, 230
    bottom = top + height

    def x(value: float) -> float:
        return left + width * value / x_max

    def y(value: float) -> float:
        return top + height * (y_max - value) / (y_max - y_min)

    legend = bottom + 62
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {legend + 20 * (len(entries) - 1) + 8}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    for value in ticks(y_min, y_max):
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="{FAINT}"/>'
            f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="{INK}">'
            f"{value:g}</text>"
        )
    for value in ticks(0.0, x_max, whole=whole_x):
        parts.append(
            f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle" '
            f'fill="{INK}">{value:g}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{bottom + 38}" text-anchor="middle" fill="{INK}">'
        f"{escape(x_label)}</text>"
        f'<text transform="translate(14 {top + height / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="{INK}">{escape(y_label)}</text>'
    )
    for number, entry in enumerate(entries):
        dash = ' stroke-dasharray="5 4"' if entry.dashed else ""
        place = legend + 20 * number
        points = [(x(px), y(py)) for px, py in entry.points]
        parts += [
            # All stroke and no filling, so that dots have the line's colour on a dark page, too.
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="1.7" fill="none" stroke="{entry.colour}" '
            'stroke-width="3.4"/>'
            for px, py in points * entry.dots
        ]
        parts.append(
            polyline(points, colour=entry.colour, width=2.2, dash=dash)
            + f'<line x1="{left}" x2="{left + 24}" y1="{place - 4}" '
            f'y2="{place - 4}" stroke="{entry.colour}" stroke-width="2.2"{dash}/>'
            f'<text x="{left + 32}" y="{place}" fill="{INK}">{escape(entry.label)}</text>'
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
