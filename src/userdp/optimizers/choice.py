"""The optimizer and the schedule that `train` is given: objects of torch, or the words of a file.

The words are keys of [training] and are read as in a configuration, so both make the same run.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from userdp.config.problems import first_problem
from userdp.config.sections import TrainingSettings
from userdp.errors import InputError
from userdp.optimizers.by_name import check_optimizer, check_schedule, optimizer_of, schedule_of

# Words that describe an optimizer, and words that describe a schedule, beside their names.
OF_OPTIMIZER = ("learning_rate", "weight_decay", "optimizer_options")
OF_SCHEDULE = ("schedule", "warmup_steps", "schedule_hold")


def optimizer_and_schedule(
    model: nn.Module,
    steps: int,
    *,
    optimizer: torch.optim.Optimizer | str | None,
    scheduler: Any,
    **words: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the schedule of a run of so many `steps`.

    `words` are keys of [training] with their values; None leaves a key out. What is said twice is
    refused. An optimizer object has no schedule unless one is given or named.
    """
    given = {key: value for key, value in words.items() if value is not None}
    if isinstance(scheduler, str):
        raise InputError(f"scheduler={scheduler!r}: name it as schedule={scheduler!r}.")
    own = None if isinstance(optimizer, str) else optimizer
    if own is not None:
        check_optimizer(own)
        _refuse_beside(own, "optimizer", given, OF_OPTIMIZER)
    if scheduler is not None:
        _refuse_beside(scheduler, "scheduler", given, OF_SCHEDULE)
        check_schedule(scheduler, own)
        if own is None:
            raise InputError(
                f"scheduler is a {type(scheduler).__name__} of an optimizer that is not given: "
                "give that one as optimizer, or name a schedule instead."
            )
    if own is not None and given and "schedule" not in given:
        raise InputError(
            f"{' and '.join(given)} beside an optimizer of your own: name the schedule, too, such "
            "as schedule='linear'."
        )
    named = {"optimizer": optimizer} if isinstance(optimizer, str) else {}
    settings = _checked(given | named | {"steps": steps})
    made = optimizer_of(model, settings) if own is None else own
    if scheduler is None and (own is None or given):
        scheduler = schedule_of(made, settings)
    return made, scheduler


def _refuse_beside(value: object, name: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    """Refuse words that the object `value` has decided already."""
    twice = [word for word in words if word in given]
    if twice:
        raise InputError(
            f"{' and '.join(twice)} beside {name}=<{type(value).__name__}>, which has its own: "
            "leave out one of the two."
        )


def _checked(given: dict[str, Any]) -> TrainingSettings:
    try:
        return TrainingSettings.model_validate(given)
    except ValidationError as error:
        raise InputError(first_problem(error, given, TrainingSettings)) from None
