"""Plain data that changes with a value and with all code that the value can run.

A loss or a task of one's own is code, and so is what it calls. Code is followed from a function to
every function, class, object and module that it names or holds, however deep. It ends at the
standard library and at the packages whose versions a run is bound to, of which the names count, and
at large installed packages, of which all source counts.

The data is the same in every process: no address, no order of a set and no line number is in it.
Nothing is imported and nothing is called. What code looks up by a name that it computes is found
only where it lies in a module that the code names, because of such modules the whole source counts.

Public: all of this is code and settings.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.util
import json
import logging
import os
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

# Bytes that are hashed at a time, so that a tensor on a GPU need not fit into host memory.
PIECE = 2**26
# Other packages whose code decides what a model computes.
COMPARED = ("torch", "transformers", "peft", "tokenizers")
# Following the code of an installed package with more files would take seconds.
FEW_FILES = 100
# What Python itself puts into a class.
_OF_PYTHON = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate__"}
    | {"__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__"}
    | {"__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__"}
)


def described(value: Any) -> list[Any]:
    """Plain data that changes with the value and its code. An opaque value counts by its type.

    >>> described({"rate": 0.5}) == described({"rate": 0.25})
    False
    """
    walk = _Walk()
    return [walk.of(value), *walk.rest()]


def described_model(model: nn.Module) -> list[Any]:
    """Plain data that changes with how a model computes, but not with where it was read from."""
    walk = _Walk()
    return [walk.model(model), *walk.rest()]


def plain_attributes(value: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """The public attributes that hold plain values or functions; paths may differ."""
    return {
        name: entry
        for name, entry in sorted(vars(value).items())
        if name not in but and not name.startswith("_") and not name.endswith("path")
        if _is_plain(entry) or isinstance(entry, types.FunctionType | functools.partial)
    }


def kind_of(value: Any) -> str:
    """The name of a value's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and bytes."""
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, len(raw), PIECE):
        hashed.update(raw[start : start + PIECE].cpu().numpy().data)
    return hashed.hexdigest()


class _Walk:
    """Describes values. What may be met again is described once, and has a number.

    Numbers are given in the order in which things are met, which is the same in every process.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        # Kept, so that no address is used twice.
        self._met: list[Any] = []

    def rest(self) -> Iterator[Any]:
        """What everything with a number is, and what is met meanwhile."""
        for value in self._met:
            yield self._inside(value)

    def of(self, value: Any) -> Any:
        """The value, or its number."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, complex | bytes | range | torch.dtype | torch.device):
            return repr(value)
        if isinstance(value, tuple):
            return [self.of(entry) for entry in cast("tuple[Any, ...]", value)]
        if isinstance(value, set | frozenset):
            # The order differs from process to process.
            entries = sorted(cast("Iterable[Any]", value), key=_standing)
            return [kind_of(value), *map(self.of, entries)]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return {"number": self._numbers[id(value)]}

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor_digest(value)
        if isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(value)
            content = hashlib.sha256(array.tobytes()).hexdigest()
            return [str(array.dtype), list(array.shape), content]
        if isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value).items()
            pairs = [[self.of(name), self.of(entry)] for name, entry in entries]
            return [self.of(type(value)), pairs]
        if isinstance(value, list):
            entries = cast("list[Any]", value)
            return [self.of(type(entries)), [self.of(entry) for entry in entries]]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, functools.partial):
            return [self.of(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, property):
            return [self.of(part) for part in (value.fget, value.fset, value.fdel)]
        if isinstance(value, staticmethod | classmethod):
            return [kind_of(value), self.of(cast(Any, value).__func__)]
        if isinstance(value, nn.Module):
            return [self.model(value), self.of(dict(value.state_dict(keep_vars=True)))]
        if isinstance(value, torch.optim.Optimizer | logging.Logger):
            # An optimizer has a digest of its own. A logger knows all others of its process.
            return kind_of(value)
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        """An object: its class, and what it holds."""
        if hasattr(value, "__dict__"):
            held = [self.of(vars(value))]
        else:
            # What is not written in Python, such as torch.exp, has a name at most, and an owner.
            held = [str(getattr(value, name, "")) for name in ("__module__", "__name__")]
            owner = getattr(value, "__self__", None)
            held += [] if isinstance(owner, type | types.ModuleType) else [self.of(owner)]
        for base in type(value).__mro__:
            if _bound_by(str(base.__module__)) is None:
                held += [self.of(entry) for entry in _slots_of(value, base)]
        return [self.of(type(value)), held]

    def model(self, model: nn.Module) -> list[Any]:
        """The configuration, and of every module the class, the plain attributes and the hooks."""
        to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
        config = {name: value for name, value in to_dict().items() if name != "_name_or_path"}
        modules = [
            [
                name,
                self.of(type(module)),
                self.of(plain_attributes(module, but=("training",))),
                self.of(_hooks(module)),
            ]
            for name, module in model.named_modules()
        ]
        return [kind_of(model), str(model), self.of(config), modules]

    def _function(self, function: types.FunctionType) -> list[Any]:
        if (original := vars(function).get("_torchdynamo_orig_callable")) is not None:
            # The rest of what torch.compile gives is about the process.
            return [function.__qualname__, self.of(original)]
        cells = [_content(cell) for cell in function.__closure__ or ()]
        around = [cells, function.__defaults__, function.__kwdefaults__, vars(function)]
        held = [self.of(part) for part in around]
        # A decorator that another package made still holds a function of one's own.
        home = str(function.__globals__.get("__name__"))
        if (bound := _bound_by(home)) is not None:
            return [home, bound, function.__qualname__, held]
        names = list(dict.fromkeys(_names(function.__code__)))
        seen: set[int] = set()
        modules = [cell for cell in cells if isinstance(cell, types.ModuleType)]
        used: list[Any] = [self._in_module(module, names, seen) for module in modules]
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                used.append([name, self.of(value)])
                if isinstance(value, types.ModuleType):
                    used.append(self._in_module(value, names, seen))
        package = str(function.__globals__.get("__package__") or home).partition(".")[0]
        imported = [[top, _source(_files(top))] for top in _imports(function.__code__, package)]
        return [home, self._code(function.__code__), held, used, imported]

    def _in_module(self, module: types.ModuleType, names: list[str], seen: set[int]) -> list[Any]:
        """What code with these names may take from a module, such as `scale` of `util.scale`."""
        if _bound_by(module.__name__) is not None or id(module) in seen:
            return []
        seen.add(id(module))
        found: list[Any] = [self.of(module)]
        for name in names:
            if name in vars(module):
                value = vars(module)[name]
                found.append([name, self.of(value)])
                if isinstance(value, types.ModuleType):
                    found.append(self._in_module(value, names, seen))
        return found

    def _module(self, module: types.ModuleType) -> list[Any]:
        """A module's name and its file, in which code may look up names that it computes."""
        bound, file = _bound_by(module.__name__), getattr(module, "__file__", None)
        if bound is not None or file is None or not Path(file).is_file():
            return [module.__name__, bound]
        return [module.__name__, _source([(Path(file).parent, Path(file))])]

    def _class(self, kind: type) -> list[Any]:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (bound := _bound_by(str(kind.__module__))) is not None:
            return [name, bound]
        members = [
            [name, self.of(member)]
            for name, member in sorted(vars(kind).items())
            if name not in _OF_PYTHON and not isinstance(member, types.MemberDescriptorType)
        ]
        return [name, [self.of(base) for base in kind.__bases__], self.of(type(kind)), members]

    def _code(self, code: types.CodeType) -> list[Any]:
        constants = [
            self._code(entry) if isinstance(entry, types.CodeType) else self.of(entry)
            for entry in code.co_consts
        ]
        # Which name is which argument, and what is caught where, is not in the instructions.
        beside = [list(code.co_varnames), code.co_flags, code.co_exceptiontable.hex()]
        return [code.co_code.hex(), constants, list(code.co_names), beside]


def _standing(entry: Any) -> str:
    """Where an entry of a set stands among the others: by what it says, or by its name."""
    if isinstance(entry, tuple | frozenset):
        parts = map(_standing, cast("Iterable[Any]", entry))
        return json.dumps(sorted(parts) if isinstance(entry, frozenset) else list(parts))
    if isinstance(entry, str | bytes | bool | int | float | complex):
        return f"{kind_of(entry)} {entry!r}"
    return f"{kind_of(entry)} {getattr(entry, '__qualname__', '')}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # A name that has no value yet.
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a code looks up, also in what is defined in it, such as a lambda."""
    yield from code.co_names
    for entry in code.co_consts:
        if isinstance(entry, types.CodeType):
            yield from _names(entry)


def _imports(code: types.CodeType, package: str) -> list[str]:
    """The packages that a code imports when it runs. A relative import is of its own `package`."""
    found = {
        str(line.argval).partition(".")[0] or package
        for line in dis.get_instructions(code)
        if line.opname == "IMPORT_NAME"
    }
    for entry in code.co_consts:
        if isinstance(entry, types.CodeType):
            found |= set(_imports(entry, package))
    return sorted(top for top in found if not _is_known(top))


def _slots_of(value: Any, kind: type) -> Iterator[Any]:
    """What an object holds in the slots of a class."""
    for _, entry in sorted(vars(kind).items()):
        if isinstance(entry, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):
                yield entry.__get__(value)


def _hooks(module: nn.Module) -> list[Any]:
    kinds: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [list(hooks.values()) for hooks in kinds]


@functools.cache
def _is_known(name: str) -> bool:
    """Whether a module's code is in the version that a run is bound to, or is Python's own."""
    top = name.partition(".")[0]
    if top in (*COMPARED, __name__.partition(".")[0]):
        return True
    if top not in sys.stdlib_module_names:
        return False
    # A file of one's own may have the name of a module of Python.
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or Path(file).is_relative_to(Path(os.__file__).parent)


def _bound_by(name: str) -> str | None:
    """What a module's code counts by, if it is not followed: nothing more than its name, or source.

    None if it is followed.
    """
    if _is_known(name):
        return ""
    top = name.partition(".")[0]
    file = str(getattr(sys.modules.get(top), "__file__", None))
    return _large_package(top) if {"site-packages", "dist-packages"} & {*Path(file).parts} else None


@functools.cache
def _large_package(top: str) -> str | None:
    """A digest of an installed package's source; None if it has few files."""
    files = _files(top)
    return _source(files) if len(files) > FEW_FILES else None


def _files(top: str) -> list[tuple[Path, Path]]:
    """The source of a package or a module: folders, and the files in them."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    roots = [Path(root) for root in sorted(spec.submodule_search_locations or ())]
    if not roots and spec.origin and Path(spec.origin).is_file():
        return [(Path(spec.origin).parent, Path(spec.origin))]
    return [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]


def _source(files: Iterable[tuple[Path, Path]]) -> str:
    hashed = hashlib.sha256()
    for root, path in files:
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return hashed.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return all(_is_plain(entry) for entry in (*entries, *entries.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(entry) for entry in cast("Collection[Any]", value))
    kinds = bool | int | float | complex | str | bytes | np.ndarray | np.generic | torch.dtype
    return value is None or isinstance(value, kinds)
