"""A picture of which mechanism leaves the least noise in the model, where.

Across: epsilon. Up: how often all users come round in the run. Each field names the winner and says
how much less noise it leaves than Poisson sampling with independent noise.

Run: python -m reproductions.mechanisms.which_wins --out docs/mechanisms.svg
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from userdp.planner.mechanisms import MechanismChoice, MechanismSetting, compare

USERS, STEPS, DELTA, MEMORY = 10_000, 512, 1e-6, 31
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ROUNDS = (1, 2, 4, 8, 16, 32, 64)
COLOURS = {
    "poisson": "#d9dcdf",
    "allocation": "#a7c7d9",
    "balanced-iteration": "#7fa8c9",
    "balls-in-bins": "#c9b07f",
    "cyclic-poisson": "#e0a38f",
}
CELL, LEFT, TOP = 92, 64, 60


def winner(epsilon: float, rounds: int) -> tuple[MechanismChoice, float]:
    """The best mechanism, and its error over that of Poisson sampling with independent noise."""
    choices = compare(
        MechanismSetting(
            num_users=USERS,
            cohort_size=USERS * rounds / STEPS,
            steps=STEPS,
            epsilon=epsilon,
            delta=DELTA,
            memory=MEMORY,
        )
    )
    poisson = next(choice for choice in choices if choice.sampler == "poisson")
    return choices[0], choices[0].error / poisson.error


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> str:
    """A line of text."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="#22262b">{escape(words)}</text>'
    )


def picture() -> str:
    """The whole field as SVG."""
    width, height = LEFT + CELL * len(EPSILONS) + 8, TOP + CELL * len(ROUNDS) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
        text(LEFT, 20, "The mechanism that leaves the least noise in the models", 15, "start"),
        text(
            LEFT,
            40,
            f"{USERS:,} users, {STEPS} steps, delta = {DELTA:g}, at most {MEMORY} vectors; below: "
            "its noise over that of Poisson sampling",
            12,
            "start",
        ),
    ]
    for row, rounds in enumerate(reversed(ROUNDS)):
        top = TOP + CELL * row
        parts.append(text(LEFT - 8, top + CELL / 2 + 4, f"{rounds}", 12, "end"))
        for column, epsilon in enumerate(EPSILONS):
            best, ratio = winner(epsilon, rounds)
            left = LEFT + CELL * column
            words = [best.sampler.replace("-", " "), f"{ratio:.2f}"]
            if best.vectors:
                words.insert(1, f"{best.bands} bands")
            parts.append(
                f'<rect x="{left}" y="{top}" width="{CELL - 2}" height="{CELL - 2}" rx="3" '
                f'fill="{COLOURS[best.sampler]}"/>'
            )
            for number, word in enumerate(words):
                y = top + CELL / 2 + 4 + 16 * (number - (len(words) - 1) / 2)
                parts.append(text(left + CELL / 2 - 1, y, word, 11 if not number else 12))
    for column, epsilon in enumerate(EPSILONS):
        x = LEFT + CELL * column + CELL / 2
        parts.append(text(x, TOP + CELL * len(ROUNDS) + 16, f"{epsilon:g}"))
    bottom = TOP + CELL * len(ROUNDS) + 34
    parts.append(text(LEFT + CELL * len(EPSILONS) / 2, bottom, "epsilon"))
    parts.append(
        f'<text transform="translate(16 {TOP + CELL * len(ROUNDS) / 2}) rotate(-90)" '
        'font-size="12" '
        'text-anchor="middle" fill="#22262b">times that all users come round</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
