"""Pictures of a guarantee: the epsilon spent, and the best attack that remains possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.report import svg
from userdp.runs.validation_curve import Point

POINTS = 10
PROFILE_POINTS = 40
# A larger epsilon bounds nothing that can be seen, but for attacks that accuse nobody wrongly.
LARGEST_DRAWN = 40.0


def epsilon_spent(
    plan: Plan, steps: int, *, paid: Sequence[Paid] = (), earlier: Sequence[Earlier] = ()
) -> str:
    """Epsilon after a growing number of steps.

    The first step costs more than any later one, so the line begins there, and not at zero. If
    something was paid before the first step, it begins with that.
    """
    doubled = {2**power for power in range(steps.bit_length()) if 2**power <= steps / POINTS}
    counts = doubled | {max(1, round(steps * part / POINTS)) for part in range(1, POINTS + 1)}
    if paid or earlier:
        counts.add(0)
    points = [
        (float(count), plan.epsilon(count, paid=paid, earlier=earlier)) for count in sorted(counts)
    ]
    return svg.lines(
        [svg.Line(label="epsilon spent", points=points)],
        title="epsilon spent by step",
        x_label="steps",
        y_label=f"epsilon at delta = {plan.delta:g}",
        x_max=float(steps),
        y_max=_round_axis(points[-1][1]),
        whole_x=True,
    )


def validation_curve(curve: Sequence[Point], unit: str) -> str:
    """The loss a `unit` on other people's records by step, and the loss of their worst tenth."""
    lines = [
        svg.Line(
            label=f"loss a {unit}",
            points=[(float(p.step), p.loss) for p in curve if p.loss is not None],
        ),
        svg.Line(
            label="worst tenth of users",
            points=[
                (float(p.step), p.worst_decile_loss)
                for p in curve
                if p.worst_decile_loss is not None
            ],
            colour=svg.COLOURS[2],
            dashed=True,
        ),
    ]
    heights = [height for line in lines for _, height in line.points]
    low, high = min(heights), max(heights)
    room = 0.05 * (high - low) or 0.1
    return svg.lines(
        lines,
        title="loss on other people's records by step",
        x_label="steps",
        y_label="loss on other people's records",
        x_max=float(max(p.step for p in curve)) or 1.0,
        y_min=low - room,
        y_max=high + room,
        whole_x=True,
    )


def best_attack(
    plan: Plan, steps: int, *, paid: Sequence[Paid] = (), earlier: Sequence[Earlier] = ()
) -> str:
    """The most that any test for one user's presence can achieve, whatever the attacker knows.

    Let x be the rate of false positives. Each (epsilon, delta) that the run satisfies bounds the
    rate of true positives by min(e^epsilon x + delta, 1 - e^-epsilon (1 - delta - x)) (Kairouz et
    al. 2015). The picture shows the least of these bounds over the whole curve delta(epsilon).
    """
    top = plan.epsilon(steps, paid=paid, earlier=earlier)
    within = min(top, LARGEST_DRAWN)
    epsilons = [within * part / PROFILE_POINTS for part in range(PROFILE_POINTS + 1)]
    epsilons += [top] * (top > within)
    profile = list(
        zip(epsilons, plan.deltas(epsilons, steps, paid=paid, earlier=earlier), strict=True)
    )

    def bound(x: float) -> float:
        return max(
            0.0,
            min(
                min(1.0, math.exp(min(e, 700.0)) * x + d, 1 - math.exp(-e) * (1 - d - x))
                for e, d in profile
            ),
        )

    grid = [(part / 200) ** 2 for part in range(201)]
    return svg.lines(
        [
            svg.Line(
                label="best possible attack",
                points=[(100 * x, 100 * bound(x)) for x in grid],
                colour=svg.COLOURS[2],
            ),
            svg.Line(
                label="guessing", points=[(0, 0), (100, 100)], colour=svg.COLOURS[0], dashed=True
            ),
        ],
        title="upper bound on membership attacks",
        x_label="wrongly accused, % of users not in the data",
        y_label="found, % of users in the data",
        x_max=100.0,
        y_max=100.0,
    )


def _round_axis(value: float) -> float:
    """The next round number: one of a few digits times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    scale = 10 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 2.5, 4, 5, 8, 10) if value <= step * scale)
