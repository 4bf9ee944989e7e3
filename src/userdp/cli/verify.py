"""`userdp verify`: does one user move the configured model's sum by at most the clip norm?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.config.file import load_config
from userdp.units import SamplingUnit


def verify(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    json: common.Json = False,
) -> None:
    """Probe the configured model with made-up users; the data is not read. Exit code 1: unsafe."""
    settings = load_config(config)
    common.quiet_transformers()
    from userdp.losses import causal_lm_loss
    from userdp.models.load import classes_of
    from userdp.probe import verify as probe
    from userdp.tasks import task_named
    from userdp.training.configured import configured_loss, load_configured_model
    from userdp.training.from_config import step_settings

    own_loss = configured_loss(settings)
    model, tokenizer = load_configured_model(settings)
    # The store is not opened. Of chats and of texts the same is computed.
    task = task_named(settings.data.task or "causal", tokenizer, classes=classes_of(model))
    record_loss = own_loss or task.record_loss
    model.eval()
    privacy = settings.privacy
    length = settings.data.sequence_length
    probe.check_positions(model, length)
    with common.stage_progress("probing the model with made-up users", None):
        found = probe.verify(
            model,
            None if record_loss is causal_lm_loss else task.example(tokenizer),
            record_loss=record_loss,
            sequence_length=length,
            group_size=1 if privacy.unit is SamplingUnit.RECORD else privacy.group_size or 2,
            clip=settings.clip_rule(),
            path=settings.training.path,
            settings=step_settings(settings),
        )
    lines = [
        f"{p.name}: {p.movement:.6f} clip norms, {p.coupling:.1e} of it not the user's own"
        for p in found.probes
    ]
    verdict = (
        f"safe: one user moves the clipped sum by at most {found.largest_movement:.6f} clip norms "
        f"in {len(found.probes)} probes"
        if found.safe
        else f"unsafe: {found.cause}"
    )
    common.emit(
        json,
        {
            # JSON has no infinity: null means that the sum moves without bound.
            "largest_movement": found.largest_movement
            if math.isfinite(found.largest_movement)
            else None,
            "safe": found.safe,
            "cause": found.cause or None,
            "probes": len(found.probes),
            "details": [
                {"name": p.name, "movement": p.movement, "coupling": p.coupling}
                for p in found.probes
            ],
        },
        "\n".join([*lines, verdict]),
    )
    if not found.safe:
        raise typer.Exit(1)
