"""The plan of a trainer: what was given, and for the rest the library's defaults.

An argument counts as given if it differs from the default of its class (`TrainingArguments`,
`SFTConfig`). Where it does not, `userdp.defaults` chooses users a step and the learning rate from
public numbers, and the log says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from userdp import defaults
from userdp.errors import InputError
from userdp.models.checks import trainable_parameters
from userdp.optimizers.by_name import check_optimizer, check_schedule, default_rate
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.ranks import Ranks
from userdp.trainer.arguments import library_class
from userdp.trainer.settings import cohort_of, optimizer_of, schedule_of, steps_of
from userdp.units import SamplingUnit

_LOG = logging.getLogger(__name__)

BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")
LENGTHS = ("max_steps", "num_train_epochs")
# The optimizers whose usual rate is known. Others keep the rate of the arguments.
WITH_USUAL_RATE = ("adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a trainer was told about the guarantee; None for what was left out."""

    epsilon: float | None = None
    num_users: int | None = None
    delta: float | None = None
    group_size: int | None = None
    clip_norm: float | None = None
    expected_cohort_size: float | None = None


def plan_of(
    args: Any,
    given: Mapping[str, Any],
    privacy: Privacy,
    plan: Plan | None,
    *,
    paid: Sequence[Paid],
    earlier: Sequence[Earlier],
) -> Plan:
    """The plan that is given, if nothing contradicts it, or the one of the arguments.

    `given` are the arguments that differ from their defaults, here and below.
    """
    if plan is not None:
        _refuse_beside(plan, privacy, args, given)
        return plan
    for name in ("epsilon", "num_users"):
        if getattr(privacy, name) is None:
            raise InputError(f"{name} is missing: give epsilon and num_users, or a whole plan=.")
    assert privacy.num_users is not None
    cohort = _cohort(args, given, privacy)
    if cohort < defaults.SMALLEST_COHORT:
        _tell(
            "%g users are expected in a step: below %d a mean varies much, and the noise weighs "
            "more. Raise expected_cohort_size, or per_device_train_batch_size.",
            cohort,
            defaults.SMALLEST_COHORT,
        )
    return Plan.sample_users(
        num_users=privacy.num_users,
        expected_cohort_size=cohort,
        group_size=defaults.GROUP_SIZE if privacy.group_size is None else privacy.group_size,
        steps=steps_of(args, privacy.num_users, cohort),
        clip_norm=privacy.clip_norm,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        paid=paid,
        earlier=earlier,
    )


def optimizer_and_schedule(
    args: Any,
    given: Mapping[str, Any],
    model: nn.Module,
    pair: tuple[torch.optim.Optimizer | None, Any],
    kind_and_options: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None,
    steps: int,
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the schedule: those given, or those that the arguments name."""
    optimizer, schedule = pair
    if kind_and_options is not None:
        if optimizer is not None:
            raise InputError(
                "optimizers and optimizer_cls_and_kwargs both say the optimizer: leave one out."
            )
        kind, options = kind_and_options
        optimizer = kind(trainable_parameters(model).values(), **options)
    if optimizer is None:
        optimizer = optimizer_of(args, model, rate_of(args, given, model))
    check_optimizer(optimizer)
    check_schedule(schedule, optimizer)
    return optimizer, schedule or schedule_of(args, optimizer, steps)


def rate_of(args: Any, given: Mapping[str, Any], model: nn.Module) -> float:
    """The learning rate that is given, or the default for this model."""
    if not 0 <= args.learning_rate < math.inf:
        raise InputError(f"learning_rate={args.learning_rate}: give a finite rate.")
    name = str(getattr(args.optim, "value", args.optim))
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if "learning_rate" in given or name not in WITH_USUAL_RATE or width is None:
        return args.learning_rate
    rate = default_rate(model, "adamw")
    _say(args, "learning_rate", args.learning_rate, f"{rate:g}")
    return rate


def epochs_a_step(plan: Plan) -> float:
    """The share of users, or of records where these are drawn, that a step takes on average."""
    if plan.sampler.unit is SamplingUnit.RECORD:
        return getattr(plan.sampler, "record_sampling_prob", plan.divisor / plan.num_users)
    return plan.divisor / plan.num_users


def _cohort(args: Any, given: Mapping[str, Any], privacy: Privacy) -> float:
    asked = privacy.expected_cohort_size
    if asked is not None or not given.keys().isdisjoint(BATCHES):
        return cohort_of(args, asked)
    assert privacy.num_users is not None
    found = defaults.expected_cohort_size(privacy.num_users)
    _say(args, BATCHES[0], args.per_device_train_batch_size, f"{found:g} users a step")
    return found


def _say(args: Any, name: str, usual: Any, chosen: str) -> None:
    _tell(
        "%s has the default of %s (%s), so it was chosen from public numbers: %s. To have another, "
        "give one that differs from that default%s.",
        name,
        library_class(args).__name__,
        usual,
        chosen,
        ", or expected_cohort_size" if name in BATCHES else ", or an optimizer",
    )


def _tell(message: str, *values: Any) -> None:
    """Write a line into the log, from the first of several processes."""
    if Ranks.found().is_first:
        _LOG.warning(message, *values)


def _refuse_beside(plan: Plan, privacy: Privacy, args: Any, given: Mapping[str, Any]) -> None:
    """Refuse what says the same as a plan, or something else."""
    for name, value in vars(privacy).items():
        if value is not None:
            raise InputError(
                f"{name}={value!r} beside plan=: the plan says it already. Leave one of them out."
            )
    for name in (*BATCHES, *LENGTHS):
        if name in given and not (name == "max_steps" and given[name] == plan.steps):
            said = f"{plan.steps:,} steps" if name in LENGTHS else f"{plan.divisor:g} groups a step"
            raise InputError(
                f"{library_class(args).__name__}({name}={given[name]!r}) beside plan=, which has "
                f"{said}: leave the argument out."
            )
