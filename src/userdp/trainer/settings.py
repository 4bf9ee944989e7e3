"""From the arguments of a `Trainer` to a plan, an optimizer, a schedule and the step's settings."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from userdp.clipping.execute.models import most_positions
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.models.checks import trainable_parameters
from userdp.trainer.arguments import WHOLE_MODEL

# Schedules that follow from the number of the step alone.
SCHEDULES = frozenset(
    {
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant"),
        *("constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"),
        "cosine_warmup_with_min_lr",
    }
)
# What `StepSettings` and the arguments both say.
_SAID_TWICE = {
    "compute_dtype": "bf16",
    "checkpoint_blocks": "gradient_checkpointing",
    "deterministic": "full_determinism",
}
# Rows longer than this are cut if neither the arguments nor the model say how long rows may be.
USUAL_LENGTH = 1024


def cohort_of(args: Any, expected_cohort_size: float | None) -> float:
    """The expected users a step: a batch of records becomes a cohort of users."""
    if expected_cohort_size is not None:
        return expected_cohort_size
    return float(args.per_device_train_batch_size * args.gradient_accumulation_steps)


def steps_of(args: Any, num_users: int, cohort: float) -> int:
    """The steps that were asked for, or as many as draw each user `num_train_epochs` times.

    On average, that is: users are drawn at random. All three numbers are public.
    """
    if args.max_steps > 0:
        return args.max_steps
    if args.num_train_epochs <= 0:
        raise InputError(
            f"num_train_epochs={args.num_train_epochs:g} without max_steps: no step is planned. "
            "Give one of them."
        )
    return max(1, math.ceil(args.num_train_epochs * num_users / cohort))


def sequence_length_of(args: Any, model: nn.Module, tokenizer: Any) -> int:
    """The longest row: what the arguments say, and not more than model and tokenizer can take."""
    asked = getattr(args, "max_length", None) or USUAL_LENGTH
    most = (most_positions(model), getattr(tokenizer, "model_max_length", None))
    return min(asked, *(limit for limit in most if limit))


def optimizer_of(args: Any, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The optimizer that `optim` names. As in `transformers`, biases and norms do not decay."""
    parameters = list(trainable_parameters(model).values())
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": 0.0}]
    if args.weight_decay:
        groups = [
            {
                "params": [p for p in parameters if p.ndim > 1],
                "weight_decay": args.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
    name = str(getattr(args.optim, "value", args.optim))
    match name:
        case "adamw_torch" | "adamw_torch_fused":
            betas = (args.adam_beta1, args.adam_beta2)
            fused = all(parameter.is_cuda for parameter in parameters)
            return torch.optim.AdamW(
                groups, lr=rate, betas=betas, eps=args.adam_epsilon, fused=fused
            )
        case "adafactor":
            return transformers.Adafactor(
                groups, lr=rate, scale_parameter=False, relative_step=False
            )
        case "sgd":
            return torch.optim.SGD(groups, lr=rate)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=rate)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate)
    raise InputError(
        f"optim={name!r} is not offered here: use 'adamw_torch', 'adafactor', 'sgd', 'rmsprop' or "
        "'adagrad', or give optimizers=(optimizer, scheduler)."
    )


def schedule_of(args: Any, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The schedule that `lr_scheduler_type` names, over all planned steps."""
    name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if name not in SCHEDULES:
        raise InputError(
            f"lr_scheduler_type={name!r} is not offered here: use one of "
            f"{', '.join(sorted(SCHEDULES))}, or give optimizers=(optimizer, scheduler)."
        )
    warmup = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    return transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=math.ceil(steps * warmup) if warmup < 1 else int(warmup),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )


def step_settings_of(
    args: Any, given: Mapping[str, Any], settings: StepSettings | None
) -> StepSettings:
    """How sums are computed: the `settings`, or what the arguments say.

    `given` are the arguments that differ from their defaults.
    """
    said = StepSettings(
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        checkpoint_blocks=bool(args.gradient_checkpointing),
        deterministic=args.full_determinism,
    )
    if settings is None:
        return said
    if settings.shard:
        raise InputError(f"settings=StepSettings(shard=True): {WHOLE_MODEL}.")
    for name, argument in _SAID_TWICE.items():
        if argument in given and getattr(settings, name) != getattr(said, name):
            raise InputError(
                f"{argument}={given[argument]!r} beside settings= with {name}="
                f"{getattr(settings, name)}: leave one of them out."
            )
    return settings


def device_of(args: Any) -> torch.device:
    """The device of this process. Several processes on one machine have a GPU each."""
    if args.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or "0"))
