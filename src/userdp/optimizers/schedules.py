"""The learning rate of every step, as a share of the full rate. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from userdp.errors import InputError

_FALLS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda left: 1.0,
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1 - math.cos(math.pi * left)),
}


def share_of_rate(
    name: str, steps: int, *, warmup_steps: int = 0, hold: float = 0.0
) -> Callable[[int], float]:
    """The share of the full rate at each step of a run.

    The rate rises over `warmup_steps` steps, stays until the share `hold` of the run is over, and
    falls to zero: along a line (`linear`) or half a wave (`cosine`). `constant` does not fall. No
    step is taken at a rate of zero, because every step is paid for.

    >>> [share_of_rate("linear", 4)(step) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= warmup_steps < steps:
        raise InputError(
            f"warmup_steps={warmup_steps} of {steps} steps: warm up for 0 or more, and for fewer "
            "than there are."
        )
    if not 0 <= hold < 1:
        raise InputError(f"schedule_hold={hold:g}: a share of the run, from 0 up to below 1.")
    if name == "constant" and hold:
        raise InputError("schedule_hold has no meaning with schedule = 'constant': remove it.")
    if name not in _FALLS:
        raise InputError(f"schedule = {name!r} is not known; there are {', '.join(_FALLS)}.")
    begin = max(warmup_steps, hold * steps)
    fall = _FALLS[name]

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return fall(min(1.0, max(0, steps - step) / (steps - begin)))

    return share
