"""Draw docs/speed.svg from the measured rows of benchmarks/results.

Run: python docs/speed_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "h200_2026-11-16.json"

SETTINGS = (
    ("gpt2", "full", "GPT-2 small, all weights"),
    ("gpt2", "lora", "GPT-2 small, LoRA"),
    ("smollm2-135m", "full", "SmolLM2-135M, all weights"),
    ("smollm2-135m", "lora", "SmolLM2-135M, LoRA"),
)
METHODS = (
    ("ordinary", "ordinary step, compiled and captured: not private", "#b9bec5"),
    ("userdp", "userdp: one clipped update a record", "#1f6f5c"),
    ("eager", "ordinary transformers, eager: not private", "#3b5b92"),
    ("opacus", "Opacus 1.6: one clipped update a record", "#b4472e"),
)
WIDTH, LEFT, LONGEST, BAR, GAP = 760, 200, 460, 15, 18


def draw(rows: list[dict[str, Any]]) -> str:
    """Four bars a setting, of milliseconds a step."""
    found = {
        (row["model"], row["finetune"], row["method"]): row["milliseconds"]
        for row in rows
        if row["sequence_length"] == 128 and row["group_size"] == 1
    }
    shown = [found[model, tuned, each[0]] for model, tuned, _ in SETTINGS for each in METHODS]
    scale = LONGEST / max(shown)
    parts: list[str] = []
    y = 44
    for number, (_, meaning, colour) in enumerate(METHODS):
        x, line = 20 + 360 * (number % 2), y + 20 * (number // 2)
        parts.append(f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{line}">{meaning}</text>')
    y += 42
    for model, tuned, label in SETTINGS:
        middle = y + 2 * BAR + 5
        parts.append(f'<text x="{LEFT - 12}" y="{middle}" text-anchor="end">{label}</text>')
        for method, _, colour in METHODS:
            value = found[model, tuned, method]
            length = value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" '
                f'fill="{colour}"/>'
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 11}">{value:.0f} ms</text>'
            )
            y += BAR
        y += GAP
    title = "Time of one training step of 16,384 tokens (128 a record), bfloat16, NVIDIA H200"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="{title}" font-family="Helvetica, Arial, sans-serif" font-size="12" '
        f'fill="#22262b">\n<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>\n'
        f'<text x="20" y="22" font-size="14" font-weight="bold">{title}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write the picture."""
    (HERE / "speed.svg").write_text(draw(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
