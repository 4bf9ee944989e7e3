"""Plain values, and what values of known types hold: the same words for them in every process.

Public: all of this is settings and code.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import json
import operator
import pathlib
import random
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

# Bytes that are hashed at a time, so that a tensor on a GPU need not fit into host memory.
PIECE = 2**26


def plain_attributes(value: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """The public attributes that hold plain values or functions; paths may differ."""
    return {
        name: entry
        for name, entry in sorted(vars(value).items())
        if name not in but and not name.startswith("_") and not name.endswith("path")
        if is_plain(entry) or isinstance(entry, types.FunctionType | functools.partial)
    }


def kind_of(value: Any) -> str:
    """The name of a value's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_nested:
        return str([tensor_digest(part) for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        sparse = tensor.to_sparse_coo().coalesce()
        parts = tensor_digest(sparse.indices()), tensor_digest(sparse.values())
        return str([str(tensor.layout), list(tensor.shape), *parts])
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    raw = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, len(raw), PIECE):
        hashed.update(raw[start : start + PIECE].cpu().numpy().data)
    return hashed.hexdigest()


def standing(entry: Any) -> str:
    """Where an entry of a set stands among the others: by what it says, or by its name."""
    if isinstance(entry, enum.Enum):
        return f"{kind_of(entry)} {entry._name_}"
    if isinstance(entry, tuple | frozenset):
        parts = map(standing, cast("Iterable[Any]", entry))
        return json.dumps(sorted(parts) if isinstance(entry, frozenset) else list(parts))
    if isinstance(entry, str | bytes | bool | int | float | complex | torch.dtype | torch.device):
        return f"{kind_of(entry)} {entry!r}"
    return f"{kind_of(entry)} {getattr(entry, '__qualname__', '')}"


# The plain part of a value whose type is derived from a plain one, by no code of its own.
BARE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytes(memoryview(value)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: frozenset.union,
    set: set.union,
    array.array: lambda value: (value.typecode, value.tobytes()),
    memoryview: bytes,
    re.Pattern: lambda value: (value.pattern, value.flags),
    random.Random: random.Random.getstate,
    np.random.Generator: lambda value: value.bit_generator.state,
    torch.Generator: torch.Generator.get_state,
}
# Their words say all that they hold.
SAID_BY_REPR = frozenset(
    {fractions.Fraction, decimal.Decimal, pathlib.PosixPath, pathlib.WindowsPath}
    | {datetime.timedelta, datetime.date, datetime.datetime, datetime.time}
    | {operator.itemgetter, operator.attrgetter, operator.methodcaller}
)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, an array or nothing, or holds such values alone."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return all(is_plain(entry) for entry in (*entries, *entries.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(entry) for entry in cast("Collection[Any]", value))
    kinds = bool | int | float | complex | str | bytes | np.ndarray | np.generic | torch.dtype
    return value is None or isinstance(value, kinds)
