"""Digests of everything that changes what a run releases: weights, optimizer, schedule, code.

Noise is bound to these digests. Two runs that share a secret and differ in any of them draw
different noise. With the same noise, the difference of the two models would show the data without
noise.

Public: a digest of weights, settings or code. The digest of an index is secret, like the index.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import types
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import userdp
from userdp.index import UserIndex
from userdp.models.checks import extra_state_bytes
from userdp.models.quantised import quantisation_of
from userdp.parts import Part, is_our_own

# Bytes that are hashed at a time, so that a tensor on a GPU need not fit into host memory.
PIECE = 2**26
# Hashing releases the interpreter's lock, so threads use several cores.
THREADS = 4
DEEPEST = 8
# Other packages whose code decides what a model computes.
COMPARED = ("torch", "transformers", "peft", "tokenizers")


def weights_digest(model: nn.Module) -> str:
    """A digest of every parameter, buffer and other saved tensor: name, dtype, shape and all bytes.

    The scales of quantised weights are such others.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> weights_digest(first) == weights_digest(second)
    False
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    known = {id(tensor) for _, tensor in named}
    saved = model.state_dict(keep_vars=True).items()
    others = [(n, t) for n, t in saved if isinstance(t, Tensor) and id(t) not in known]
    return _named_digest(named + others)


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
    """A digest of the optimizer's class, hyper-parameters, state, hooks and own attributes."""
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return _digest(
        [
            _kind(optimizer),
            _class_code(type(optimizer)),
            _described(optimizer.state_dict(), DEEPEST),
            _plain_attributes(optimizer, but=("defaults", "state", "param_groups")),
            [_described(list(entry.values()), DEEPEST) for entry in hooks],
        ]
    )


def scheduler_digest(scheduler: Any) -> str:
    """A digest of a schedule's class and all that it holds; functions count by their code."""
    return _digest(_described(scheduler, DEEPEST))


def task_digest(task: Any) -> str:
    """A digest of a task's code, of its loss and of all that they hold."""
    used = [task.record_loss, task.batch, task.encoding, task.encoding.encode]
    return _digest(_described([task, *used], DEEPEST))


def model_digest(model: nn.Module) -> str:
    """A digest of how a model computes, but not of where it was read from.

    It covers the configuration, and of every module the class, the plain attributes (such as the
    scaling of an adapter) and the hooks. Code outside torch, transformers and peft counts as such.
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    plain = {name: value for name, value in to_dict().items() if name != "_name_or_path"}
    classes: dict[str, Any] = {
        _kind(module): _class_code(type(module)) for module in model.modules()
    }
    if quantisation_of(model) is not None:
        classes["bitsandbytes"] = _version("bitsandbytes")
    modules = [
        [name, _plain_attributes(module, but=("training",)), _hooks(module)]
        for name, module in model.named_modules()
    ]
    return _digest([_kind(model), str(model), _described(plain, DEEPEST), classes, modules])


def _hooks(module: nn.Module) -> list[Any]:
    kinds: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [_described(list(hooks.values()), DEEPEST) for hooks in kinds]


def _plain_attributes(value: Any, *, but: Collection[str]) -> list[Any]:
    """The public attributes that hold plain values or functions; paths may differ."""
    named = sorted(vars(value).items())
    return [
        [name, _described(entry, DEEPEST)]
        for name, entry in named
        if name not in but and not name.startswith("_") and not name.endswith("path")
        if _is_plain(entry) or isinstance(entry, types.FunctionType | functools.partial)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return all(_is_plain(entry) for entry in (*entries, *entries.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(entry) for entry in cast("Collection[Any]", value))
    kinds = bool | int | float | complex | str | bytes | np.ndarray | np.generic | torch.dtype
    return value is None or isinstance(value, kinds)


def _class_code(kind: type) -> list[Any]:
    """The code of a class and its bases; of the packages in `code_version` their names do."""
    return [
        [base.__qualname__, name, _code(method.__code__)]
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in (*COMPARED, "userdp", "builtins")
        for name, member in sorted(vars(base).items())
        if isinstance(method := _function_of(member), types.FunctionType)
    ]


def _function_of(member: Any) -> Any:
    """The function inside of a property, a static method or a class method."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def index_digest(index: UserIndex) -> str:
    """A digest of who owns which row. It is secret."""
    hashed = hashlib.sha256()
    arrays = [index.indptr, index.rows]
    # The fixed order of an index with one.
    arrays += [] if index.batches is None else [np.asarray(index.batches.shape), index.batches]
    for array in arrays:
        hashed.update(np.ascontiguousarray(array, "<i8").data)
    return hashed.hexdigest()


@functools.cache
def code_version() -> str:
    """The versions of what computes, and a digest of this package's source."""
    root = Path(userdp.__file__).parent
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    others = [f"{name} {_version(name)}" for name in COMPARED]
    return ", ".join([f"userdp {userdp.__version__} {hashed.hexdigest()[:16]}", *others])


def _version(name: str) -> str:
    try:
        return torch.__version__ if name == "torch" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


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
    if isinstance(value, list | tuple):
        return [_described(entry, depth - 1) for entry in cast("list[Any]", value)]
    if isinstance(value, set | frozenset):
        entries = cast("Iterable[Any]", value)
        # The order differs from process to process.
        return sorted(json.dumps(_described(entry, depth - 1)) for entry in entries)
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        content = hashlib.sha256(array.tobytes()).hexdigest()
        return [str(array.dtype), list(array.shape), content]
    if isinstance(value, complex | bytes | range | torch.dtype):
        return repr(value)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        around = [cells, value.__defaults__, value.__kwdefaults__, _globals(value)]
        return [_code(value.__code__), _described(around, depth - 1)]
    if isinstance(value, functools.partial):
        return _described([value.func, value.args, value.keywords], depth - 1)
    if isinstance(value, types.MethodType):
        return _described([value.__func__, value.__self__], depth - 1)
    if isinstance(value, torch.optim.Optimizer | nn.Module) or not hasattr(value, "__dict__"):
        return _kind(value)
    return [_kind(value), _class_code(type(value)), _described(vars(value), depth - 1)]


def _globals(function: types.FunctionType) -> list[Any]:
    """The values of the global names that a function uses: plain ones, and functions by code."""
    found: list[Any] = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            found.append([name, _code(value.__code__)])
        elif _is_plain(value) or isinstance(value, Tensor):
            found.append([name, value])
    return found


def _code(code: types.CodeType) -> list[Any]:
    constants = [
        _code(entry)
        if isinstance(entry, types.CodeType)
        else _described(entry, DEEPEST)
        if isinstance(entry, frozenset)
        else repr(entry)
        for entry in code.co_consts
    ]
    return [code.co_code.hex(), constants, list(code.co_names)]
