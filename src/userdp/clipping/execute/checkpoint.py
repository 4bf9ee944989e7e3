"""Blocks that keep only their input and run again in the backward pass: less memory, more time.

A model's blocks are instances of Hugging Face's `GradientCheckpointingLayer`. That class has a
checkpointing of its own, which does not fit: it runs only in training mode, where blocks such as
OPT's apply dropout, and it saves the state of the random generator, which cannot be read while a
CUDA graph is captured. Here a block's class is swapped for a subclass whose call is checkpointed,
as `layer_swap` does for layers. No flag of the model changes.

Reference: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from userdp.errors import InputError


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's outermost blocks; raises if it has none."""
    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not found:
        raise InputError(
            f"checkpoint_blocks=True, but {type(model).__name__} has no block that can be run "
            "again: only Hugging Face's GradientCheckpointingLayer is known to be one. Leave "
            "checkpoint_blocks off; a smaller microbatch_tokens saves memory with any model."
        )
    nested = _below([child for block in found for child in block.children()])
    return [block for block in found if id(block) not in nested]


def _below(modules: Collection[nn.Module]) -> set[int]:
    """The modules and everything inside them, by id."""
    return {id(below) for module in modules for below in module.modules()}


@contextlib.contextmanager
def checkpointed_blocks(model: nn.Module, apart: Collection[nn.Module] = ()) -> Iterator[None]:
    """The model's blocks checkpointed inside the `with` block, which must hold the backward pass.

    Blocks inside one of the layers `apart` stay as they are: such a layer already runs as a whole
    and keeps only its inputs.
    """
    taken = _below(apart)
    before = {block: type(block) for block in blocks_of(model) if id(block) not in taken}
    try:
        for block, kind in before.items():
            block.__class__ = _checkpointed(kind)
        yield
    finally:
        for block, kind in before.items():
            block.__class__ = kind


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the block's class that runs again in the backward pass."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        original: Any = super(stand_in, self)
        if any(isinstance(leaf, Cache) for leaf in pytree.tree_leaves((args, kwargs))):
            raise InputError(
                f"checkpoint_blocks=True, but {kind.__name__} is given a cache of keys and values, "
                "which a second run would change. Call the model with use_cache=False in the loss, "
                "or leave checkpoint_blocks off."
            )
        # The random generator's state is not saved: CUDA graphs forbid it, and nothing is drawn.
        return checkpoint(
            original.__call__,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **kwargs,
        )

    stand_in = type(
        kind.__name__,
        (kind,),
        {
            "__call__": call,
            "__module__": kind.__module__,
            # Switches Hugging Face's own checkpointing off, which would read the generator's state.
            # Python finds a property of the class before an attribute of the object.
            "gradient_checkpointing": property(lambda self: False),
        },
    )
    return stand_in
