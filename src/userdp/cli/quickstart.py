"""`userdp quickstart`: why user-level privacy, seen in a few minutes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.report.bars import bar
from userdp.statement import epsilon_text
from userdp.training.progress import training_progress


class Base(StrEnum):
    """What the demo fine-tunes."""

    TINY = "tiny"
    SMOLLM2 = "smollm2"


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory for everything the demo makes.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the synthetic messages (not of the noise).")
    ] = 1,
    model: Annotated[
        Base, typer.Option(help="A small model made on the spot, or the real SmolLM2-135M.")
    ] = Base.TINY,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default a GPU for SmolLM2 if there is one."),
    ] = None,
    json: common.Json = False,
) -> None:
    """Fine-tune one model twice, with and without privacy, and see what each has learned."""
    _clear_earlier_demo(out)
    # Import torch only now, so that --help need not wait for it.
    common.quiet_transformers()
    import torch

    from userdp import quickstart as story
    from userdp.models.smollm2 import find_smollm2

    base = find_smollm2() if model is Base.SMOLLM2 else None
    scenario = story.LLM_SCENARIO if base else story.Scenario()
    if device is None:
        device = "cuda" if base and torch.cuda.is_available() else "cpu"
    outcome = story.run(
        out, seed=seed, progress=_stage, scenario=scenario, base=base, device=device
    )
    common.emit(json, asdict(outcome), _picture(outcome))


def _picture(outcome: object) -> str:
    values = asdict(outcome)  # pyright: ignore[reportArgumentType]
    planted = values["secrets_planted"]
    losses = [
        ("before", values["loss_before"]),
        ("private", values["loss_private"]),
        ("ordinary", values["loss_non_private"]),
    ]
    leaks = [
        ("before", values["secrets_leaked_before"]),
        ("private", values["secrets_leaked_private"]),
        ("ordinary", values["secrets_leaked_non_private"]),
    ]
    longest = max(loss for _, loss in losses)
    return "\n".join(
        [
            "loss on other people's messages (less is better)",
            *(f"  {name:>8} | {bar(loss / longest, 40)} {loss:.3f}" for name, loss in losses),
            "",
            "secrets given away (none is right)",
            *(f"  {name:>8} | {bar(n / planted, 40)} {n} of {planted}" for name, n in leaks),
            "",
            f"the private model closes {values['gap_closed']:.0%} of the loss gap with "
            f"(epsilon={epsilon_text(values['epsilon'])}, delta={values['delta']:g}) "
            "user-level differential privacy",
            f"report: {values['report']}",
        ]
    )


@contextmanager
def _stage(title: str, work: Plan | int | None) -> Iterator[Callable[[int], None]]:
    if isinstance(work, Plan):
        with training_progress(work, title) as progress:
            yield progress.on_step
    else:
        with common.stage_progress(title, work) as on_step:
            yield on_step


def _clear_earlier_demo(out: Path) -> None:
    """Start afresh over an earlier demo; refuse to touch anything else."""
    if not out.exists() or not any(out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
    elif (out / "outcome.json").exists() or (out / "pseudonyms.key").exists():
        shutil.rmtree(out)
        out.mkdir(parents=True)
    else:
        raise InputError(f"{out} holds something else than an earlier demo: choose another --out.")
