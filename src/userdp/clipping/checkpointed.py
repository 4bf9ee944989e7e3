"""Blocks that keep their input alone and run again in the backward pass: less memory, more time.

A model's blocks are known by Hugging Face's `GradientCheckpointingLayer`. Its own checkpointing
runs only in training mode, where blocks such as OPT's drop out values themselves, and saves the
state of the random numbers, which cannot be read while a CUDA graph is captured. Here a block's
class is swapped for a subclass whose call is checkpointed, as `swap` does for layers, and no flag
of the model changes.

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
    """The model's repeated blocks, none inside another; raises if it has none."""
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
    """The model's blocks checkpointed for the length of the block, which the backward pass is in.

    `apart` are layers that already run as one: a block in one of them stays as it is (a block with
    parameters of its own keeps its inputs alone anyway).
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
        # The state of the random numbers is not read: CUDA graphs forbid it, and nothing is drawn.
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
            # Hugging Face's own, where the caller switched it on, would read the random state. A
            # property is found before what the object itself says.
            "gradient_checkpointing": property(lambda self: False),
        },
    )
    return stand_in
