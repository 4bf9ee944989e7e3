"""What a model keeps between two forward passes, beside its weights, and how to put it back.

A user's gradient must depend on that user's records alone. But some models remember things: rotary
embeddings that grow with the longest text seen, caches, counters, buffers outside `state_dict`. So
everything that a module holds is noted once, compared after each pass, and put back. The values of
weights are left alone, also where a module keeps a list of them (`nn.LSTM` does): the optimizer
changes them between passes, and a pass that writes to them is refused elsewhere.

What a model keeps outside its modules, in globals or in its own objects, is not seen here. The
neighbour probe looks at behaviour, and so at those, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that torch itself keeps on a module, and those that the fast path adds while it runs.
_TORCH_OWN = set(nn.Module().__dict__) | {"_compiled_call_impl", "userdp_tape"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set)
_WATCHED = (*_PLAIN, *_CONTAINERS, Tensor)


@dataclass(frozen=True, kw_only=True)
class _Noted:
    """One attribute or buffer: its place, its value, and a mark that tells if it changed."""

    name: str
    place: dict[str, Any]
    key: str
    value: Any
    mark: Any
    weights: frozenset[int]

    @property
    def is_changed(self) -> bool:
        now = self.place.get(self.key, _MISSING)
        if now is self.value and isinstance(now, _PLAIN):
            return False
        return _mark(now, self.weights) != self.mark


class ModuleState:
    """Notes all buffers and attributes of a model's modules, and puts them back."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = frozenset(id(parameter) for parameter in model.parameters())
        self._places: list[tuple[str, dict[str, Any]]] = []
        for name, module in model.named_modules():
            self._places += [(name, module._buffers), (name, module.__dict__)]
        self._note()

    def _note(self) -> None:
        self._noted = [
            _Noted(
                name=f"{name}.{key}".lstrip("."),
                place=place,
                key=key,
                value=_copied(value),
                mark=_mark(value, self._weights),
                weights=self._weights,
            )
            for name, place in self._places
            for key, value in _watched(place)
        ]
        # These copies undo in-place writes.
        self._values = [
            (tensor, tensor.detach().clone())
            for noted in self._noted
            for tensor in self._kept(noted.value)
        ]
        self._value_of = {id(tensor): value for tensor, value in self._values}
        self._sizes = [len(place) for _, place in self._places]

    def changed(self) -> list[str]:
        """The names of everything that is not as it was noted."""
        names = [
            noted.name
            for noted in self._noted
            if noted.is_changed or any(map(self._is_written, self._kept(noted.value)))
        ]
        for (name, place), size in zip(self._places, self._sizes, strict=True):
            if len(place) != size:
                names += [f"{name}.{key}".lstrip(".") for key in self._new_keys(place)]
        return names

    def _kept(self, value: Any) -> Iterator[Tensor]:
        """The tensors in a value that are not weights of the model."""
        return (tensor for tensor in _tensors(value) if id(tensor) not in self._weights)

    def _is_written(self, tensor: Tensor) -> bool:
        """Whether the values have changed: torch does not count writes through `.data`."""
        return not torch.equal(_bytes(tensor), _bytes(self._value_of[id(tensor)]))

    def _new_keys(self, place: dict[str, Any]) -> list[str]:
        known = {noted.key for noted in self._noted if noted.place is place}
        return [key for key, _ in _watched(place) if key not in known]

    def restore(self) -> None:
        """Put everything back as it was noted. What was not there then is removed."""
        if not self.changed():
            return
        for _, place in self._places:
            for key in self._new_keys(place):
                del place[key]
        with torch.no_grad():
            for tensor, value in self._values:
                # What was made in inference mode is written to in inference mode only.
                with torch.inference_mode() if tensor.is_inference() else nullcontext():
                    tensor.copy_(value)
        for noted in self._noted:
            noted.place[noted.key] = _copied(noted.value)
        self._note()


_MISSING = object()


def _watched(place: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in place.items():
        if key not in _TORCH_OWN and isinstance(value, _WATCHED):
            yield key, value


def _copied(value: Any) -> Any:
    """The value with its containers copied, so that later changes to them do not show here."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return set(value) if type(value) is set else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes: any dtype can be compared, and NaN is equal to itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mark(value: Any, weights: frozenset[int]) -> Any:
    """A mark that changes if the value is replaced or, unless it is a weight, written to."""
    if isinstance(value, Tensor):
        # Tensors made in inference mode count no versions.
        counts = not value.is_inference() and id(value) not in weights
        return _Same(value), value._version if counts else -1
    if isinstance(value, dict):
        return dict, [(repr(key), _mark(item, weights)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_mark(item, weights) for item in value]
    if isinstance(value, set):
        return set, sorted(map(repr, value))
    # As text, NaN is equal to itself.
    return (type(value), repr(value)) if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal only for the same object. Holding the object keeps its address from being reused."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = object.__hash__
