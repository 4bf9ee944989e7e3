"""Digests of everything that changes what a run releases: weights, optimizer, schedule, code.

Noise is bound to these digests. Two runs that share a secret and differ in any of them draw
different noise. With the same noise, the difference of the two models would show the data without
noise.

Public: a digest of weights, settings or code. The digest of an index is secret, like the index.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import userdp
from userdp.index import UserIndex
from userdp.models.checks import extra_state_bytes
from userdp.parts import Part, is_our_own

# Bytes that are hashed at a time, so that a tensor on a GPU need not fit into host memory.
PIECE = 2**26
# Hashing releases the interpreter's lock, so threads use several cores.
THREADS = 4
DEEPEST = 8


def weights_digest(model: nn.Module) -> str:
    """A digest of every parameter and buffer: names, dtypes, shapes and all bytes.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> weights_digest(first) == weights_digest(second)
    False
    """
    return _named_digest([*model.named_parameters(), *model.named_buffers()])


def trained_digest(model: nn.Module) -> str:
    """A digest of the trainable parameters alone: all that a run can have changed."""
    return _named_digest((n, p) for n, p in model.named_parameters() if p.requires_grad)


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """A digest of each saved tensor that a run must leave as it is, and of extra state, by name.

    These are parameters that are not trained, and buffers that are saved.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    found: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            found[name] = hashlib.sha256(extra_state_bytes(value)).hexdigest()
        elif id(value) not in trained:
            tensors[name] = value
    with ThreadPoolExecutor(THREADS) as pool:
        found.update(zip(tensors, pool.map(_tensor_digest, tensors.values()), strict=True))
    return found


def base_digest(model: nn.Module, published: Collection[str], *, precision: str = "") -> str:
    """A digest of the saved tensors of an adapted model that its adapter's files do not hold.

    `published` are the adapter's tensor names, as `peft` writes them. All numbers are converted to
    one `precision`, by default the narrowest one in the model. The digest begins with its name. So
    a base has the same digest whether it is loaded in bfloat16 for training or in float32 later.
    """
    own = {_base_name(name) for name in published}
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and _base_name(name) not in own
    }
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    # Wider numbers than float32 may be read back as float32.
    narrowest = min([torch.float32, *floats], key=lambda dtype: dtype.itemsize)
    precision = precision or str(narrowest).removeprefix("torch.")
    named = ((_base_name(name), tensor) for name, tensor in tensors.items())
    return f"{precision} {_named_digest(named, getattr(torch, precision))}"


def digest_precision(digest: str) -> str:
    """The precision in which the digest of a base was computed."""
    return digest.partition(" ")[0]


def _base_name(name: str) -> str:
    """The name of a tensor without the parts that `peft` adds when it wraps a layer."""
    name = name.removeprefix("base_model.model.")
    for part in (".base_layer", ".original_module", ".modules_to_save", ".default"):
        name = name.replace(f"{part}.", ".")
    return name.removesuffix(".default")


def _named_digest(named: Iterable[tuple[str, Tensor]], precision: torch.dtype | None = None) -> str:
    pairs = sorted(named, key=lambda pair: pair[0])

    def digest_of(tensor: Tensor) -> str:
        # Tensors are converted one at a time, so a second copy of all weights need not fit.
        convert = precision is not None and tensor.is_floating_point()
        return _tensor_digest(tensor.to(precision) if convert else tensor)

    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(digest_of, [tensor for _, tensor in pairs]))
    whole = hashlib.sha256()
    for (name, _), digest in zip(pairs, digests, strict=True):
        whole.update(f"{name}|{digest}\n".encode())
    return whole.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, len(raw), PIECE):
        hashed.update(raw[start : start + PIECE].cpu().numpy().data)
    return hashed.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """A digest of the optimizer's class, hyper-parameters and state."""
    return _digest([_kind(optimizer), _described(optimizer.state_dict(), DEEPEST)])


def scheduler_digest(scheduler: Any) -> str:
    """A digest of a schedule's class and all that it holds; functions count by their code."""
    return _digest(_described(scheduler, DEEPEST))


def model_digest(model: nn.Module) -> str:
    """A digest of a model's class and configuration, but not of where it was read from."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    plain = {name: value for name, value in to_dict().items() if name != "_name_or_path"}
    return _digest([_kind(model), str(model), _described(plain, DEEPEST)])


def index_digest(index: UserIndex) -> str:
    """A digest of who owns which row. It is secret."""
    hashed = hashlib.sha256()
    for array in (index.indptr, index.rows):
        hashed.update(np.ascontiguousarray(array, "<i8").data)
    return hashed.hexdigest()


@functools.cache
def code_version() -> str:
    """The version of this package and of torch, and a digest of this package's source."""
    root = Path(userdp.__file__).parent
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return f"userdp {userdp.__version__} {hashed.hexdigest()[:16]}, torch {torch.__version__}"


def parts_version(parts: Iterable[Part]) -> str:
    """A digest of the source of every part from another package; empty if there is none."""
    files = {type(part).__module__: part for part in parts if not is_our_own(part)}
    named = {
        name: inspect.getsource(inspect.getmodule(type(p)) or type(p)) for name, p in files.items()
    }
    return _digest(named) if named else ""


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _described(value: Any, depth: int) -> Any:
    """Plain data that changes with the value. An opaque value counts by its type alone."""
    if depth == 0:
        return _kind(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Tensor):
        return _tensor_digest(value)
    if isinstance(value, Mapping):
        return [[str(name), _described(entry, depth - 1)] for name, entry in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_described(entry, depth - 1) for entry in value]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_code(value.__code__), _described([cells, value.__defaults__], depth - 1)]
    if isinstance(value, torch.optim.Optimizer) or not hasattr(value, "__dict__"):
        return _kind(value)
    return [_kind(value), _described(vars(value), depth - 1)]


def _code(code: types.CodeType) -> list[Any]:
    constants = [
        _code(entry) if isinstance(entry, types.CodeType) else repr(entry)
        for entry in code.co_consts
    ]
    return [code.co_code.hex(), constants, list(code.co_names)]
