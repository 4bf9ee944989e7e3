"""Whether a trainer may start its run: as it was made, and where the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.errors import InputError
from userdp.models.checks import trainable_parameters
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.runs.continuing import charged_ledger


def goes_on(asked: str | bool | None, args: Any, run: Path) -> bool:
    """Whether the run goes on where it was stopped, as `resume_from_checkpoint` asks."""
    asked = args.resume_from_checkpoint if asked is None else asked
    known = {Path(args.output_dir).resolve(), run.resolve()}
    if isinstance(asked, str) and Path(asked).resolve() not in known:
        raise InputError(
            f"resume_from_checkpoint={asked!r}: a private run goes on from its own last "
            "checkpoint. Say True, with the output_dir of the run."
        )
    return bool(asked)


def has_steps(run: Path, plan: Plan) -> bool:
    """Whether the run that shall go on has steps. Refused if it has taken all, or is not there."""
    if not run.is_dir():
        raise InputError(
            f"resume_from_checkpoint: {run} is not there, so there is nothing to go on with. Leave "
            "it out, or give the output_dir of the run."
        )
    charged = charged_ledger(run)
    if charged is not None and charged.is_finished and plan.steps > charged.plan.steps:
        raise InputError(
            f"{run} has taken all of its {charged.plan.steps:,} steps, and {plan.steps:,} are "
            "planned: train on with another output_dir and model= the output_dir of this run. "
            "epsilon is then that of both together."
        )
    return charged is not None


def check_unchanged(before: Sequence[Earlier], earlier: Sequence[Earlier]) -> None:
    """Refuse a model that was trained privately after its plan was made (`before`)."""
    if list(before) != list(earlier):
        raise InputError(
            "the model was trained privately since this trainer was made, and its plan does not "
            "count that: make the trainer anew, with the model as it is, or as it was if a run "
            "that was stopped shall go on."
        )


def check_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to pay for parameters that the optimizer does not train."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in trainable_parameters(model).items() if id(p) not in held]
    if left:
        raise InputError(
            f"the optimizer does not train {len(left):,} of the model's trainable parameters, such "
            f"as {left[0]!r}: they would cost the same and stay as they are. Set requires_grad to "
            "False for them, or make the trainer with the model as it shall be trained."
        )
