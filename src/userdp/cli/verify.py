"""`userdp verify`: does one user move the configured model's sum by at most the clip norm?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from userdp.cli import common
from userdp.config.file import load_config
from userdp.units import SamplingUnit

if TYPE_CHECKING:
    from userdp.probe.seen import Probe

# Where in its cohort the user of a probe was.
PLACES = (", first", ", in the middle", ", last")


def verify(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    json: common.Json = False,
) -> None:
    """Probe the configured model with made-up users; the data is not read. Exit code 1: unsafe."""
    settings = load_config(config)
    common.quiet_transformers()
    from userdp.losses import causal_lm_loss
    from userdp.models.checks import trainable_parameters
    from userdp.models.load import classes_of
    from userdp.optimizers.by_name import optimizer_of
    from userdp.optimizers.scaled_momentum import update_of_run
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
    optimizer = optimizer_of(model, settings.training)
    parameters = list(trainable_parameters(model).values())
    privacy = settings.privacy
    length = settings.data.sequence_length
    probe.check_positions(model, length)
    with common.stage_progress("probing the model with made-up users", None):
        found = probe.verify(
            model,
            None if record_loss is causal_lm_loss else task.example(tokenizer),
            record_loss=record_loss,
            update=update_of_run(settings.update_rule(), optimizer, parameters),
            sequence_length=length,
            group_size=1 if privacy.unit is SamplingUnit.RECORD else privacy.group_size or 2,
            clip=settings.clip_rule(),
            path=settings.training.path,
            settings=step_settings(settings),
        )
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
        f"{verdict}\n\n{_table(found.probes)}",
    )
    if not found.safe:
        raise typer.Exit(1)


def _table(probes: Sequence[Probe]) -> str:
    """A line for each kind of made-up user, wherever in the cohort; unsafe probes by themselves."""
    rows: dict[str, list[Probe]] = {}
    for probe in probes:
        kind = probe.name
        for place in PLACES:
            kind = kind.removesuffix(place)
        rows.setdefault(kind if probe.safe else f"UNSAFE {probe.name}", []).append(probe)
    width = max(map(len, rows), default=0)
    lines = [f"{'in clip norms':{width}}  moved by at most  not the user's own  probes"]
    for kind, own in rows.items():
        moved, coupled = _worst(p.movement for p in own), _worst(p.coupling for p in own)
        lines.append(f"{kind:{width}}  {moved:16.6f}  {coupled:18.1e}  {len(own):6}")
    return "\n".join(lines)


def _worst(numbers: Iterable[float]) -> float:
    """The largest; what is no number is larger than any."""
    return max(numbers, key=lambda number: (math.isnan(number), number))
