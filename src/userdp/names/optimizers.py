"""The names of optimizers, and why some of torch's cannot be used. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from userdp.errors import InputError

# Where a schedule of ours carries its name.
SCHEDULE_NAME = "userdp_name"
# The name in a configuration -> the class in `torch.optim`.
OPTIMIZERS: Mapping[str, str] = {
    name.lower(): name
    for name in (
        *("AdamW", "Adam", "SGD", "Adafactor", "Muon", "NAdam", "RAdam", "Adamax", "RMSprop"),
        *("Adagrad", "Adadelta", "ASGD", "Rprop"),
    )
}
# The names of those that are made here.
OWN = ("scaled",)
# Where a `ScaledMomentum` takes its scales from.
SCALES = ("private", "public")
UNUSABLE: Mapping[str, str] = {
    "lbfgs": "it computes the loss several times in a step, and each would have to be paid for",
    "sparseadam": "it needs sparse gradients, and noise is added to every coordinate",
}
# Optimizers whose step has the size of the learning rate, whatever the size of gradients.
# No rate is as large: weights are float32 numbers, or narrower ones.
MOST_RATE = 1e30
LIKE_ADAMW = ("adamw", "adam", "muon", "scaled")

# The momentum of torch's optimizers where none is given; those not listed have none.
MOMENTUM: Mapping[str, float] = {"muon": 0.95} | dict.fromkeys(
    ("adamw", "adam", "nadam", "radam", "adamax", "scaled"), 0.9
)

NOTHING_USES_PUBLIC = (
    "public_weight = 0: nothing uses the public records. Give them a share, or take scales from "
    "them (optimizer = 'scaled', optimizer_options = { scales = 'public' })."
)


def momentum_and_decay(
    name: str,
    options: Mapping[str, Any],
    learning_rate: float | None,
    weight_decay: float | None,
) -> dict[str, float]:
    """How an optimizer sums up gradients: its momentum, and the share of weights a step takes away.

    >>> momentum_and_decay("adamw", {"betas": [0.8, 0.99]}, 0.01, 0.1)
    {'momentum': 0.8, 'decay': 0.001}
    """
    betas = options.get("betas")
    if betas is not None and not isinstance(betas, list | tuple):
        raise InputError(f"optimizer_options: betas = {betas!r}: give both, such as [0.9, 0.999].")
    momentum = betas[0] if betas else options.get("momentum", MOMENTUM.get(name, 0.0))
    decay = 0.01 if weight_decay is None and name == "adamw" else weight_decay or 0.0
    return {"momentum": float(momentum), "decay": (learning_rate or 0.0) * decay}


def usable(name: str) -> str:
    """The name of an optimizer that can be trained with, in small letters; torch's is taken, too.

    >>> usable("AdamW")
    'adamw'
    >>> usable("lbfgs")
    Traceback (most recent call last):
        ...
    userdp.errors.InputError: optimizer = 'lbfgs' cannot be used: it computes ...
    """
    small = name.lower()
    if small in UNUSABLE:
        raise InputError(
            f"optimizer = {name!r} cannot be used: {UNUSABLE[small]}. Use another, such as 'adamw'."
        )
    known = (*OPTIMIZERS, *OWN)
    if small not in known:
        close = difflib.get_close_matches(small, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
        raise InputError(f"optimizer = {name!r} is not known; {hint}")
    return small
