"""Layers that compute with another `forward` for a while; the model object stays the same.

A layer's class is swapped for a subclass and put back afterwards. So `state_dict`,
`save_pretrained`, `generate` and PEFT see the model they know. While it is swapped, a layer carries
a `Tape`: what its other `forward` needs, and where it leaves what it saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import PLAIN, MixedExamplesError


@dataclass(eq=False, kw_only=True)
class Tape:
    """What one layer needs while the fast path runs.

    `probes` are the layer's probes by name (`layers`); what has no probe is not handed out.
    """

    users: int
    rows: int
    # Whether gradients are handed out by row, as in a ragged batch: then `users` is `rows`.
    each_row: bool = False
    probes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    # The token ids that an embedding was called with.
    ids: Tensor | None = None
    # For a layer without a rule: which of its input tensors count rows first, where that is known.
    by_row: tuple[bool, ...] | None = None
    # Columns added to a head of unaligned width, for speed; they carry nothing.
    padding: int = 0
    # In a ragged batch: where each user's rows end, if anything is handed out by user. That may be
    # a product's stored gradients, and sums over tokens (biases, norms' weights). Everything else
    # is handed out by row.
    ends: Tensor | None = None
    weight_by_user: bool = False
    adds_by_user: bool = False


def only(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    """The one tensor that a layer was called with, by position or by name."""
    (tensor,) = (*args, *kwargs.values())
    return tensor


def units_of(tape: Tape, x: Tensor) -> int | None:
    """How many users or rows gradients are handed out for; None: `x` has one for each of its rows.

    A compiled block takes every number of rows if it does not know that number.
    """
    return None if tape.each_row and x.dim() == 3 else tape.users


def per_user(tensor: Tensor, users: int | None) -> Tensor:
    """(rows, ..., features) as (users, tokens, features)."""
    return tensor if users is None else tensor.reshape(users, -1, tensor.shape[-1])


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product of x is computed in: autocast's, if that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@cache
def _stand_in(kind: type[nn.Module], rule: Any) -> type[nn.Module]:
    """A subclass of the layer's class with the rule's forward."""
    return type(kind.__name__, (kind,), {"forward": rule.forward, "__module__": kind.__module__})


@contextlib.contextmanager
def swapped(
    layers: Sequence[tuple[nn.Module, Any]], tapes: dict[nn.Module, Tape]
) -> Iterator[None]:
    """The layers' classes replaced by their rules' inside the `with` block."""
    before: dict[nn.Module, Any] = {}
    try:
        for module, rule in layers:
            if "forward" in module.__dict__:
                raise MixedExamplesError(
                    f"the forward of a {type(module).__name__} was replaced on the object itself "
                    "(as accelerate's hooks do): the fast path would not be seen. Remove the hook, "
                    f"or use {PLAIN}."
                )
            before[module] = type(module)
            module.__class__ = _stand_in(type(module), rule)
            module.__dict__["userdp_tape"] = tapes[module]
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind
            del module.__dict__["userdp_tape"]
