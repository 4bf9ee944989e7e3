"""Pictures and bars: right sizes, escaped text, bounds that bound."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from userdp.plan import Plan
from userdp.report import pictures, svg
from userdp.report.bars import bar, log2_histogram

PLAN = Plan.sample_users(
    num_users=1000,
    expected_cohort_size=20,
    group_size=4,
    steps=50,
    clip_norm=0.5,
    noise_multiplier=1.5,
    delta=1e-5,
)


@pytest.mark.parametrize(
    ("fraction", "length"), [(0.0, 0), (1.0, 10), (0.5, 5), (2.0, 10), (-1.0, 0)]
)
def test_bar_fills_its_fraction(fraction: float, length: int) -> None:
    assert len(bar(fraction, 10)) == length


def test_histogram_counts_everybody_once() -> None:
    counts = np.array([1, 1, 2, 3, 3, 8, 100])
    totals = [int(line.split()[-1]) for line in log2_histogram(counts).splitlines()]
    assert sum(totals) == 7
    assert totals == [2, 3, 0, 1, 0, 0, 1]


def test_svg_escapes_what_it_is_given() -> None:
    picture = svg.bars([svg.Bar(label="<script>", value=1.0, text="a & b")], title='"><script>')
    assert "<script>" not in picture
    assert "a &amp; b" in picture


def test_bars_are_as_long_as_their_values() -> None:
    picture = svg.bars(
        [svg.Bar(label="a", value=1.0, text=""), svg.Bar(label="b", value=4.0, text="")], title=""
    )
    short, long = (float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', picture))
    assert long == pytest.approx(4 * short)


def _points(picture: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in points.split()]  # type: ignore[misc]
        for points in re.findall(r'<polyline points="([^"]+)"', picture)
    ]


def test_epsilon_curve_rises_to_the_epsilon_of_the_plan() -> None:
    (curve,) = _points(pictures.epsilon_spent(PLAN, 50))
    heights = [-y for _, y in curve]
    assert heights == sorted(heights)
    assert [x for x, _ in curve] == sorted({x for x, _ in curve})


def test_best_attack_lies_between_guessing_and_certainty_and_rises() -> None:
    attack, guessing = _points(pictures.best_attack(PLAN, 50))
    (x0, y0), (x1, y1) = guessing
    for (ax, ay), (bx, by) in pairwise(attack):
        assert bx >= ax
        assert by <= ay + 0.11, "svg's y axis points down; coordinates have one decimal"
    for x, y in attack:
        line = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        assert y <= line + 0.11
        assert y >= y1 - 0.11
