"""Tables, bars and plots of planning, in the terminal and as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from userdp.planner.search import ELS, Candidate, Recommendation
from userdp.report import svg

_COLOURS = {"ELS": "#c1440e", "ULS": "#1f6f8b"}
_WIDTH, _HEIGHT, _MARGIN = 420, 300, 56


def candidate_table(candidates: Sequence[Candidate], best: Candidate | None) -> str:
    """One line for each candidate. The best is marked, and so are hypothetical ones."""
    lines = [
        f"{'':2}{'method':8}{'group':>6}{'cohort':>8}{'rate':>11}{'steps':>8}{'multiplier':>12}"
        f"{'noise':>11}{'of run':>11}"
    ]
    for one in candidates:
        lines.append(
            f"{'* ' if one == best else '  '}{one.method:8}{one.group_size:>6}{one.cohort_size:>8}"
            f"{one.rate:>11.3g}{one.steps:>8}{one.noise_multiplier:>12.4f}{one.noise_stddev:>11.4g}"
            f"{one.noise_of_run:>11.3g}{'  hypothetical' if one.hypothetical else ''}"
        )
    return "\n".join(lines)


def candidate_bars(candidates: Sequence[Candidate], width: int = 48) -> str:
    """One bar for each candidate, as long as its noise."""
    most = max(one.noise_stddev for one in candidates)
    return "\n".join(
        f"{one.method} G={one.group_size:<4} M={one.cohort_size:<6} "
        f"{'#' * max(1, round(width * one.noise_stddev / most))} {one.noise_stddev:.3g}"
        for one in candidates
    )


def plan_svg(by_compute: Sequence[tuple[int, Sequence[Candidate]]], found: Recommendation) -> str:
    """Noise against compute for both methods, and a heatmap of noise over group and cohort size."""
    body = _lines(by_compute, found) + _heatmap(by_compute, found)
    note = "hypothetical numbers of users" if found.best.hypothetical else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="white"/>\n'
        + body
        + f'<text x="8" y="{_HEIGHT - 6}" fill="#900">{note}</text>\n</svg>\n'
    )


def _lines(by_compute: Sequence[tuple[int, Sequence[Candidate]]], found: Recommendation) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for compute, candidates in by_compute:
        for one in candidates:
            points.setdefault(one.method, []).append(
                (math.log2(compute), math.log10(one.noise_stddev))
            )
    every = [point for series in points.values() for point in series]
    if not every:
        return ""
    across = svg.scale([x for x, _ in every], _MARGIN, _WIDTH - 20)
    up = svg.scale([y for _, y in every], _HEIGHT - _MARGIN, 36)
    parts = [svg.text(_MARGIN, 20, "noise on the mean gradient against gradients a step", 12)]
    for compute, _ in by_compute:
        x = across(math.log2(compute))
        parts.append(svg.text(x, _HEIGHT - _MARGIN + 16, f"{compute:,}", anchor="middle"))
    low, high = min(y for _, y in every), max(y for _, y in every)
    for y in (low, (low + high) / 2, high):
        parts.append(svg.text(_MARGIN - 6, up(y) + 4, f"{10**y:.2g}", anchor="end"))
    for number, (method, series) in enumerate(sorted(points.items())):
        colour = _COLOURS[method]
        places = [(across(x), up(y)) for x, y in series]
        parts.append(svg.polyline(places, colour=colour, width=2) + "\n")
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>\n' for x, y in places]
        parts.append(svg.text(_WIDTH - 60, 40 + 16 * number, method, colour=colour))
    return "".join(parts)


def _heatmap(by_compute: Sequence[tuple[int, Sequence[Candidate]]], found: Recommendation) -> str:
    cells = {
        (one.group_size, one.cohort_size): one.noise_stddev
        for one in found.candidates
        if one.method != ELS
    }
    for _, candidates in by_compute:
        for one in candidates:
            if one.method != ELS:
                cells[(one.group_size, one.cohort_size)] = one.noise_stddev
    if not cells:
        return ""
    groups, cohorts = sorted({g for g, _ in cells}), sorted({m for _, m in cells})
    low, high = math.log(min(cells.values())), math.log(max(cells.values()))
    wide = (_WIDTH - _MARGIN - 20) / len(cohorts)
    tall = (_HEIGHT - _MARGIN - 40) / len(groups)
    parts = [svg.text(_WIDTH + _MARGIN, 20, "noise of ULS over cohort size M and group size G", 12)]
    for (group, cohort), value in cells.items():
        share = (math.log(value) - low) / (high - low) if high > low else 0.0
        x = _WIDTH + _MARGIN + wide * cohorts.index(cohort)
        y = _HEIGHT - _MARGIN - tall * (groups.index(group) + 1)
        shade = (
            f"rgb({round(31 + 200 * share)},{round(111 + 110 * share)},{round(139 + 90 * share)})"
        )
        chosen = (found.best.group_size, found.best.cohort_size) == (group, cohort)
        edge = "black" if chosen and found.best.method != ELS else "white"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{shade}" '
            f'stroke="{edge}"><title>G={group}, M={cohort}: {value:.4g}</title></rect>\n'
        )
    for number, cohort in enumerate(cohorts):
        x = _WIDTH + _MARGIN + wide * (number + 0.5)
        parts.append(svg.text(x, _HEIGHT - _MARGIN + 16, str(cohort), anchor="middle"))
    for number, group in enumerate(groups):
        y = _HEIGHT - _MARGIN - tall * (number + 0.4)
        parts.append(svg.text(_WIDTH + _MARGIN - 6, y, str(group), anchor="end"))
    return "".join(parts)
