"""Pictures and bars: right sizes, escaped text, bounds that bound."""

from __future__ import annotations

import re
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from recorded_run import write_run
from userdp.plan import Plan
from userdp.plans.words import promise_in_words
from userdp.report import pictures, svg
from userdp.report.bars import bar, log2_histogram
from userdp.report.write import Strength, strength, write_report
from userdp.runs.validation_curve import Point
from userdp.units import Adjacency

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


def test_epsilon_curve_begins_with_the_first_step_and_not_at_zero() -> None:
    picture = pictures.epsilon_spent(PLAN, 50)
    ((first_x, first_y), *_), (last_x, last_y) = (curve := _points(picture)[0]), curve[-1]
    (zero,) = re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>0<', picture)
    height = float(zero) - 4 - last_y
    assert (float(zero) - 4 - first_y) / height == pytest.approx(
        PLAN.epsilon(1) / PLAN.epsilon(50), abs=2e-3
    )
    left = last_x - (last_x - first_x) / 49 * 50
    assert left == pytest.approx(62, abs=0.2), "the first point is one step right of the axis"


def test_steps_have_whole_ticks() -> None:
    for steps in (1, 2, 3, 7, 12, 50, 333, 5000):
        found = svg.ticks(0.0, float(steps), whole=True)
        assert all(tick == int(tick) <= steps for tick in found)
        assert 2 <= len(found) <= 7


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.31, 2.32), (0.0, 8.0), (3.0, 11.7)])
def test_ticks_are_round_few_and_inside(low: float, high: float) -> None:
    found = svg.ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert all(len(f"{tick:g}") <= 6 for tick in found)


def test_the_validation_curve_shows_every_point_and_falls_with_the_loss() -> None:
    curve = [
        Point(
            step=step,
            data="x",
            loss=3.0 - step / 100,
            perplexity=1.0,
            accuracy_top1=0.1,
            mean_user_loss=3.0,
            worst_decile_loss=None if step == 50 else 4.0,
            tokens=10,
            users=2,
        )
        for step in (0, 50, 100)
    ]
    loss, worst = _points(pictures.validation_curve(curve, "token"))
    assert len(loss) == 3
    assert [y for _, y in loss] == sorted(y for _, y in loss), "svg's y axis points down"
    assert len(worst) == 2


def test_the_bar_of_a_large_epsilon_has_another_colour_than_that_of_a_small_one() -> None:
    def told(epsilon: float, *, guarantee: bool = True) -> Strength:
        stated = types.SimpleNamespace(epsilon=epsilon, guarantee=guarantee)
        return strength(stated)  # type: ignore[arg-type]

    epsilons = (0.5, 1.2, 8.0, 20.0)
    colours = [told(epsilon).colour for epsilon in epsilons]
    assert len({*colours, told(0.5, guarantee=False).colour}) == 5
    # The promise in words says the same.
    assert "weak" in told(8.0).words
    assert "weak" in promise_in_words(Adjacency.ADD_REMOVE, 8.0)
    assert "moderate" in told(1.2).words
    assert "moderate" in promise_in_words(Adjacency.ADD_REMOVE, 1.2)


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


@pytest.mark.parametrize("noise_multiplier", [0.03, 1e-3, 1e7])
def test_an_attack_on_a_run_with_hardly_any_noise_or_much_is_drawn(noise_multiplier: float) -> None:
    plan = Plan.sample_users(
        num_users=300, expected_cohort_size=20, steps=3, clip_norm=1.0,
        noise_multiplier=noise_multiplier,
    )  # fmt: skip
    attack, _ = _points(pictures.best_attack(plan, 3))
    assert len(attack) == 201
    # Without noise, whoever took part is found, and nobody else is accused.
    lowest, first = max(y for _, y in _points(pictures.best_attack(PLAN, 50))[0]), attack[0][1]
    assert (first < lowest) == (noise_multiplier < 1)


def test_a_report_is_written_though_a_picture_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")

    def overflows(*_: object, **__: object) -> str:
        raise OverflowError("numbers of these sizes have no picture")

    monkeypatch.setattr(pictures, "best_attack", overflows)
    page = write_report(run).html.read_text()
    assert "No picture: its numbers cannot be computed." in page
    assert "epsilon spent" in page
