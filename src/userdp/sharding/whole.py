"""A sharded model as one process would see it, for what the first rank does alone.

Digests, the history of the weights and the files of a model are the business of the first rank. For
them every rank gives its rows, and the first rank holds the whole model in its main memory inside
the `with` block. Classes and hooks are those before sharding. So whatever is computed there, such
as the name that noise is bound to, is what a single process computes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from userdp.ranks import Ranks
from userdp.sharded_tensors import is_shard, whole_of
from userdp.sharding.shard import is_sharded

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MORE_HOOKS = tuple(
    f"{kind}_{what}" for kind in _HOOKS for what in ("with_kwargs", "always_called")
)


@contextlib.contextmanager
def as_one_process(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """The model whole on the first rank, and undressed on all. Every rank must enter together."""
    if not is_sharded(model):
        yield
        return
    with undressed(model), _whole_on_first(model, ranks):
        yield


@contextlib.contextmanager
def undressed(model: nn.Module) -> Iterator[None]:
    """The model without what sharding added to its modules: classes and hooks. Nothing runs."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before: list[tuple[nn.Module, Any, dict[str, Any]]] = []
    for module in sharded:
        hooks = {
            name: vars(module)[name] for name in (*_HOOKS, *_MORE_HOOKS) if name in vars(module)
        }
        before.append((module, type(module), hooks))
    try:
        for module, kind, hooks in before:
            module.__class__ = next(base for base in kind.__bases__ if base is not FSDPModule)
            # A model that is sharded has no other forward hooks (`models.proven`).
            for name in hooks:
                vars(module)[name] = OrderedDict()
        yield
    finally:
        for module, kind, hooks in before:
            module.__class__ = kind
            vars(module).update(hooks)


@contextlib.contextmanager
def _whole_on_first(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    whole: dict[int, nn.Parameter] = {}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_shard(parameter):
                places.append((module._parameters, name, parameter))
    for _, _, parameter in places:
        if id(parameter) in whole:
            continue
        values = whole_of(parameter.detach())
        if ranks.is_first:
            kept = values.to("cpu", copy=True)
            whole[id(parameter)] = nn.Parameter(kept, requires_grad=parameter.requires_grad)
        else:
            # A tied weight is gathered once.
            whole[id(parameter)] = parameter
        del values
    try:
        if ranks.is_first:
            for held, name, parameter in places:
                held[name] = whole[id(parameter)]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter
