"""`userdp plan --gpus N`: what the recommended run takes on 1 to N GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from userdp.errors import InputError
from userdp.planner import scale
from userdp.planner import search as planner
from userdp.planner.scale import Machine, Prediction, Work
from userdp.planner.search import Candidate
from userdp.report import svg


class Size(StrEnum):
    """Shapes of models that the model of scale knows."""

    GPT2 = "gpt2"
    LLAMA_1B = "llama-1b"
    LLAMA_3B = "llama-3b"
    LLAMA_8B = "llama-8b"
    LLAMA_70B = "llama-70b"


def machine_of(path: Path | None) -> Machine:
    """The machine that a JSON file describes: an H200, with the numbers that the file gives."""
    if path is None:
        return Machine()
    try:
        given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Machine)}
        if unknown := sorted(set(given) - known):
            raise InputError(
                f"{path}: {unknown[0]!r} is no number of a machine. Known: "
                f"{', '.join(sorted(known))}."
            )
        if "activation_bytes" in given:
            half, full = given["activation_bytes"]
            given["activation_bytes"] = (float(half), float(full))
        return Machine(**given)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, AttributeError):
        raise InputError(
            f'{path}: expected a JSON object like {{"matrix_flops": 7.7e14, "share": 0.67}}.'
        ) from None


def predicted(
    best: Candidate, *, gpus: int, size: Size, rank: int, length: int, machine: Machine
) -> list[Prediction]:
    """A prediction for each number of GPUs up to `gpus`."""
    if rank < 0:
        raise InputError(f"--lora-rank {rank}: give 0 for all weights, or the rank of adapters.")
    model = replace(scale.MODELS[size.value], rank=rank)
    # Example-level sampling clips every record: groups of one record.
    group_size = best.group_size if best.method == planner.ULS else 1
    work = Work(
        cohort_size=best.cohort_size, group_size=group_size, length=length, steps=best.steps
    )
    return list(scale.predictions(machine, model, work, gpus))


def in_words(found: Sequence[Prediction], size: Size, rank: int, machine: Machine) -> list[str]:
    """A table, one line for each number of GPUs."""
    what = f"LoRA of rank {rank}" if rank else "all weights"
    lines = [
        "",
        f"predicted for {size.value}, {what}, on {machine.name} (docs/scale.md says how)",
        f"{'GPUs':>6}{'step s':>10}{'wait s':>9}{'GiB':>7}{'hours':>9}{'GPU hours':>11}"
        f"{'of linear':>11}  layout",
    ]
    for one in found:
        layout = one.layout + (", checkpointed" if one.checkpointed else "")
        layout += "" if one.fits else ", DOES NOT FIT"
        lines.append(
            f"{one.gpus:>6}{one.step_seconds:>10.3g}{one.communication_seconds:>9.2g}"
            f"{one.memory_bytes / 2**30:>7.0f}{one.hours:>9.3g}{one.gpus * one.hours:>11.4g}"
            f"{one.efficiency:>11.0%}  {layout}"
        )
    return lines


def picture(series: Mapping[str, Sequence[Prediction]], title: str) -> str:
    """Hours against GPUs, both in powers of two, as an SVG, where the model fits.

    Dashed: if every GPU helped the first line as much as its first one does.
    """
    drawn = {
        label: [(math.log2(one.gpus), math.log2(one.hours)) for one in found if one.fits]
        for label, found in series.items()
    }
    drawn = {label: points for label, points in drawn.items() if points}
    if not drawn:
        raise InputError("--plot: the model fits on none of these numbers of GPUs. Give more.")
    begin, hours = next(iter(drawn.values()))[0]
    every = [point for points in drawn.values() for point in points]
    last = max(x for x, _ in every)
    drawn["if every GPU helped as much as the first"] = [
        (begin, hours),
        (last, hours + begin - last),
    ]
    every += drawn["if every GPU helped as much as the first"]
    left, top, width, height = 70, 40, 380, 240
    bottom, below = top + height, 56 + 16 * len(drawn)
    x = svg.scale([0, last + 1e-9], left, left + width)
    low, high = math.floor(min(y for _, y in every)), math.ceil(max(y for _, y in every))
    y = svg.scale([low, high], bottom, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {bottom + below}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{title}">\n'
        f'<rect width="{svg.WIDTH}" height="{bottom + below}" fill="white"/>\n',
        svg.text(left, 22, title, 12),
    ]
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        parts.append(svg.text(left - 8, y(power) + 4, _hours(2.0**power), anchor="end"))
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(power):.1f}" y2="{y(power):.1f}" '
            f'stroke="{svg.FAINT}"/>\n'
        )
    for one in next(iter(series.values())):
        place = x(math.log2(one.gpus))
        parts.append(svg.text(place, bottom + 18, f"{one.gpus:,}", anchor="middle"))
    parts.append(svg.text(left + width / 2, bottom + 36, "GPUs", 11, anchor="middle"))
    for number, (label, points) in enumerate(drawn.items()):
        is_last = number == len(drawn) - 1
        colour = svg.COLOURS[0] if is_last else svg.COLOURS[1 + number]
        dash = ' stroke-dasharray="5 4"' if is_last else ""
        places = [(x(a), y(b)) for a, b in points]
        parts.append(svg.polyline(places, colour=colour, width=2.2, dash=dash) + "\n")
        if not is_last:
            dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
            parts.append("".join(dots) + "\n")
        parts.append(svg.text(left, bottom + 56 + 16 * number, label, 11, colour=colour))
    return "".join([*parts, "</svg>\n"])


def _hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.2g} days"
    return f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.2g} min"
