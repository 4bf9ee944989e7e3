"""The results of `compare` as a table, and how much of the gap each epsilon closes as a picture.

The gap is the loss before training less that without privacy, in the same steps. Where there are
several seeds, the table gives their mean, and half of their range.

Run: python -m reproductions.finetuning.table results/epsilon.jsonl [--svg FILE]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

EPSILONS = (1.0, 3.0, 8.0)
SHADES = ("#9ecae1", "#4292c6", "#08519c")
Losses = dict[tuple[str, str, float | None], list[float]]


def losses_of(rows: list[dict[str, Any]], tune_on: str) -> tuple[Losses, dict[str, float]]:
    """The losses by set, method and epsilon, and the loss of each set before training."""
    losses: Losses = defaultdict(list)
    before: dict[str, float] = {}
    for row in rows:
        if row["data"] != tune_on and not row["hypothetical"]:
            losses[row["data"], row["method"], row["epsilon"]].append(row["loss"])
            before[row["data"]] = row["loss_before"]
    return losses, before


def mean(values: list[float]) -> float:
    """The mean; of nothing it is not a number."""
    return sum(values) / len(values) if values else float("nan")


def told(values: list[float]) -> str:
    """The mean, and half of the range if there are several values."""
    if not values:
        return "-"
    spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def closed(losses: Losses, before: dict[str, float], name: str, epsilon: float) -> float:
    """Which share of the gap a private run closes."""
    gap = before[name] - mean(losses[name, "uls", None])
    return (before[name] - mean(losses[name, "uls", epsilon])) / gap


def table(losses: Losses, before: dict[str, float]) -> str:
    """Markdown: one line a set."""
    lines = [
        "| set | before | ε = 1 | ε = 3 | ε = 8 | no privacy | gap closed at 8 "
        "| ELS, ε = 1 | ELS, ε = 3 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(before):
        private = [told(losses[name, "uls", epsilon]) for epsilon in EPSILONS]
        els = [told(losses[name, "els", epsilon]) for epsilon in EPSILONS[:2]]
        share = f"{closed(losses, before, name, 8.0):.0%}"
        free = told(losses[name, "uls", None])
        lines.append(
            f"| {' | '.join([name, f'{before[name]:.3f}', *private, free, share, *els])} |"
        )
    return "\n".join(lines)


def picture(losses: Losses, before: dict[str, float]) -> str:
    """Bars: the share of the gap that each epsilon closes, by set."""
    names = sorted(before)
    width, left, bar, row = 720, 230, 16, 66
    height = 40 + row * len(names) + 30
    scale = (width - left - 60) / 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-size="15">Share of the gap to non-private training that is '
        "closed</text>",
    ]
    for number, name in enumerate(names):
        top = 40 + row * number
        parts.append(f'<text x="10" y="{top + 30}">{name.replace("_", " ")}</text>')
        for place, (epsilon, shade) in enumerate(zip(EPSILONS, SHADES, strict=True)):
            share = max(0.0, closed(losses, before, name, epsilon))
            y = top + place * (bar + 2)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{scale * share:.1f}" height="{bar}" '
                f'fill="{shade}"/><text x="{left + scale * share + 6:.1f}" y="{y + 13}">'
                f"{share:.0%} (ε = {epsilon:g})</text>"
            )
    parts.append(
        f'<line x1="{left}" x2="{left}" y1="36" y2="{height - 30}" stroke="#444"/>'
        f'<line x1="{left + scale}" x2="{left + scale}" y1="36" y2="{height - 30}" '
        'stroke="#bbb" stroke-dasharray="4"/>'
        f'<text x="{left}" y="{height - 10}" text-anchor="middle">0</text>'
        f'<text x="{left + scale}" y="{height - 10}" text-anchor="middle">100%</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print the table; draw the picture if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("results", type=Path)
    parser.add_argument("--tune-on", default="stackexchange_history_meta_posts")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    losses, before = losses_of(rows, options.tune_on)
    print(table(losses, before))
    if options.svg:
        options.svg.write_text(picture(losses, before))


if __name__ == "__main__":
    main()
