"""Local training with shards: whose weights are whole while the users of a rank train.

In local training each user has weights of its own for a while. The rank that trains the user needs
the trained weights whole, whatever it holds of them between the steps. So

    adapters on a frozen base: every rank holds the adapters whole. They are few. The base is
    sharded, and its blocks are gathered one by one as in every other pass.
    all weights are trained: before the users of a step train, every rank gathers the whole model
    and puts it in place of the shards; it is freed afterwards. The optimizer's state and the noise
    stay divided.

Why the sum is right. In both cases a user's weights are ordinary tensors of one rank, so the code
that trains and clips the user is that of one process, on the same values. Nothing that a user
changes there is ever sent or kept: the shards are not touched, and adapters are put back by the
code that moved them. What leaves the rank is the clipped sum, divided by rows as always (`pieces`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import InputError
from userdp.sharded_tensors import is_shard, note_copy, whole_of
from userdp.sharding.whole import undressed


def copies_of(model: nn.Module) -> WholeCopies | None:
    """The whole weights for local training; None if all that is trained is whole on every rank."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not any(map(is_shard, trained)):
        return None
    if len(trained) < len(parameters):
        raise InputError(
            "local training with sharded adapters: each user has adapters of its own for a while, "
            "which no rank holds whole. Divide the model with shard(model, trained=False), which "
            "leaves what is trained whole on every rank."
        )
    return WholeCopies(model)


class WholeCopies:
    """The whole weights of a sharded model, on every rank. Between steps they take no memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._whole: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                self._places.append((module._parameters, name, parameter))
                # A tied weight has one copy.
                if id(parameter) not in self._whole:
                    self._whole[id(parameter)] = whole = nn.Parameter(_empty(parameter))
                    note_copy(whole)

    def of(self, parameters: Sequence[Tensor]) -> list[Any]:
        """The copies of these parameters. Code that trains users holds these, not the shards."""
        return [self._whole[id(parameter)] for parameter in parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is whole, as in one process. Every rank must enter together."""
        shards = {id(parameter): parameter for _, _, parameter in self._places}
        try:
            for key, parameter in shards.items():
                # Not in inference mode or under autograd: these are values.
                with torch.no_grad():
                    found = whole_of(parameter.detach())
                    self._whole[key].untyped_storage().resize_(found.nbytes)
                    self._whole[key].copy_(found)
                    del found
            with undressed(self._model):
                for held, name, parameter in self._places:
                    held[name] = self._whole[id(parameter)]
                try:
                    yield
                finally:
                    for held, name, parameter in self._places:
                        held[name] = parameter
        finally:
            for whole in self._whole.values():
                whole.untyped_storage().resize_(0)


def _empty(parameter: Tensor) -> Tensor:
    """A tensor of the parameter's whole shape without memory of its own."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    empty.untyped_storage().resize_(0)
    return empty
