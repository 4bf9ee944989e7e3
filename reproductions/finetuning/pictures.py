"""Bars and lines as SVG, for the tables of `table`."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

SHADES = ("#9ecae1", "#4292c6", "#08519c", "#252525", "#fdae6b", "#e6550d")
WIDTH, LEFT, RIGHT, BAR = 720, 250, 110, 16


@dataclass(frozen=True)
class Bar:
    """One bar: its length, what stands behind it, and from where to where the seeds reach."""

    value: float
    text: str
    shade: str
    reach: tuple[float, float] | None = None


def _begin(title: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{html.escape(title)}</text>',
    ]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def bars(
    title: str, groups: dict[str, list[Bar]], *, end: float | None = None, mark: str = ""
) -> str:
    """Groups of horizontal bars from zero, to the left where values are negative.

    A dashed line with the words `mark` stands at `end`.
    """
    values = [bar.value for own in groups.values() for bar in own] + [0.0]
    values += [reach for own in groups.values() for bar in own for reach in bar.reach or ()]
    low, high = min(values), max([*values, end or 0.0])
    scale = (WIDTH - LEFT - RIGHT) / ((high - low) or 1.0)
    zero = LEFT - low * scale
    top = 40.0
    body: list[str] = []
    for label, own in groups.items():
        body.append(_text(10, top + len(own) * (BAR + 2) / 2 + 5, label))
        for bar in own:
            at = zero + bar.value * scale
            body.append(
                f'<rect x="{min(zero, at):.1f}" y="{top:.1f}" width="{abs(at - zero):.1f}" '
                f'height="{BAR}" fill="{bar.shade}"/>'
            )
            behind = max(zero, at)
            if bar.reach:
                middle, (first, last) = top + BAR / 2, bar.reach
                body.append(
                    _line(zero + first * scale, middle, zero + last * scale, middle, "#d62728")
                )
                behind = max(behind, zero + last * scale)
            body.append(_text(behind + 6, top + 13, bar.text))
            top += BAR + 2
        top += 12
    body.append(_line(zero, 36, zero, top, "#444"))
    body.append(_text(zero, top + 18, "0", "middle"))
    if end is not None:
        at = zero + end * scale
        body.append(_line(at, 36, at, top, "#bbb", ' stroke-dasharray="4"'))
        body.append(_text(at, top + 18, mark, "middle"))
    return "\n".join([*_begin(title, top + 30), *body, "</svg>"]) + "\n"


def lines(title: str, across: str, series: dict[str, dict[float, list[float]]]) -> str:
    """Curves over a logarithmic axis: the means, and from the least to the largest value."""
    height, bottom, top, left, right = 380, 330, 40, 70, WIDTH - 230
    places = sorted({place for curve in series.values() for place in curve})
    values = [value for curve in series.values() for found in curve.values() for value in found]
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    low, high = low - 0.05 * spread, high + 0.05 * spread
    wide = math.log(places[-1] / places[0]) or 1.0

    def x(place: float) -> float:
        return left + (right - left) * math.log(place / places[0]) / wide

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    body = [_line(left, bottom, right, bottom, "#444"), _line(left, top, left, bottom, "#444")]
    body += [_text(x(place), bottom + 18, f"{place:g}", "middle") for place in places]
    body.append(_text((left + right) / 2, bottom + 38, across, "middle"))
    for value in (low + 0.05 * spread, (low + high) / 2, high - 0.05 * spread):
        body.append(_text(left - 8, y(value) + 4, f"{value:.2f}", "end"))
    for number, (label, curve) in enumerate(series.items()):
        shade = SHADES[number % len(SHADES)]
        means = {place: sum(found) / len(found) for place, found in sorted(curve.items())}
        points = " ".join(f"{x(place):.1f},{y(mean):.1f}" for place, mean in means.items())
        body.append(f'<polyline points="{points}" fill="none" stroke="{shade}" stroke-width="2"/>')
        body += [
            _line(x(place), y(min(found)), x(place), y(max(found)), shade)
            for place, found in curve.items()
        ]
        last = list(means.values())[-1]
        body.append(_text(right + 8, y(last) + 4, label))
    return "\n".join([*_begin(title, height), *body, "</svg>"]) + "\n"
