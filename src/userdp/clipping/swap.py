"""Layers with another `forward` for the length of a block; the model object stays what it is.

A module's class is swapped for a subclass and put back: `state_dict`, `save_pretrained`, `generate`
and PEFT see the model they know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import nn

from userdp.clipping.layers import Tape
from userdp.errors import MixedExamplesError


@cache
def _stand_in(kind: type[nn.Module], rule: Any) -> type[nn.Module]:
    """A subclass of the layer's class with the rule's forward."""
    return type(kind.__name__, (kind,), {"forward": rule.forward, "__module__": kind.__module__})


@contextlib.contextmanager
def swapped(
    layers: Sequence[tuple[nn.Module, Any]], tapes: dict[nn.Module, Tape]
) -> Iterator[None]:
    """The layers' classes replaced by their rules' for the length of the block."""
    before: dict[nn.Module, Any] = {}
    try:
        for module, rule in layers:
            if "forward" in module.__dict__:
                raise MixedExamplesError(
                    f"the forward of a {type(module).__name__} was replaced on the object itself "
                    "(as accelerate's hooks do): the fast path would not be seen. Remove the hook, "
                    'or use path="plain".'
                )
            before[module] = type(module)
            module.__class__ = _stand_in(type(module), rule)
            module.__dict__["userdp_tape"] = tapes[module]
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind
            del module.__dict__["userdp_tape"]
