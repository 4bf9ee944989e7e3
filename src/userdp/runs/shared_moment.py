"""A checkpoint on all ranks: the first reads it, and the others get it over the network.

So only the first rank needs the run's directory. Tensors go one by one, so no rank ever holds the
whole checkpoint twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from userdp.ranks import Ranks
from userdp.runs.checkpoints import Moment, packed, unpacked


def shared_moment(ranks: Ranks, moment: Moment | None) -> Moment | None:
    """The moment that the first rank gives, on all of them."""
    if ranks.count == 1:
        return moment

    def outline() -> tuple[Any, ...] | None:
        if moment is None:
            return None
        tree, tensors = packed(moment.state)
        return moment.step, moment.head, tree, _shapes(moment.weights), _shapes(tensors)

    told = ranks.by_first(outline)
    if told is None:
        return None
    step, head, tree, weight_shapes, shapes = told
    own = {} if moment is None else packed(moment.state)[1]
    weights = _copied(ranks, weight_shapes, {} if moment is None else dict(moment.weights))
    tensors = _copied(ranks, shapes, own)
    return moment or Moment(step=step, head=head, weights=weights, state=unpacked(tree, tensors))


_Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]


def _shapes(tensors: Any) -> _Shapes:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def _copied(ranks: Ranks, shapes: _Shapes, own: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {
        name: own[name] if own else torch.empty(shape, dtype=dtype) for name, shape, dtype in shapes
    }
    ranks.copy_from_first_(found.values())
    return found
