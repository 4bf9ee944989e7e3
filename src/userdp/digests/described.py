"""Plain data that changes with a value and with all code that the value can run.

A loss or a task of one's own is code, and so is what it calls. Code is followed from a function to
every function, class, object and module that it names or holds, however deep. It ends at the
standard library and at the packages whose versions a run is bound to, which count by name, and at
large installed packages, which count by all of their source.

The data is the same in every process: no address, no order of a set and no line number is in it.
Nothing is imported, and nothing of one's own is called. Code may look up something by a name that
it computes. That is found only in modules that the code is in or names: of these the whole source
counts. A script (`__main__`) counts by what it defines alone.

Public: all of this is code and settings.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import hashlib
import logging
import os
import sys
import types
from collections.abc import (
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.digests.code import bound_by, files_of, is_installed, is_known, source_of
from userdp.digests.modules import model_parts, optimizer_parts, script_of
from userdp.digests.values import BARE, SAID_BY_REPR, kind_of, standing, tensor_digest

# The flag of a class that was made while the program runs.
_MADE_AT_RUN_TIME = 1 << 9
# What Python itself puts into a class.
_OF_PYTHON = frozenset(
    """
    __dict__ __weakref__ __doc__ __module__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __firstlineno__ __static_attributes__ __abstractmethods__ _abc_impl
    __slotnames__ __dataclass_fields__ __dataclass_params__
    """.split()
)


def described(value: Any) -> list[Any]:
    """Plain data that changes with the value and its code. An opaque value counts by its type.

    >>> described({"rate": 0.5}) == described({"rate": 0.25})
    False
    """
    walk = _Walk()
    return [walk.of(value), *walk.rest()]


def described_model(model: nn.Module) -> list[Any]:
    """Plain data that changes with how a model computes, but not with where it was read from.

    Weights do not count here, wherever a module refers to them.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    walk = _Walk(known=dict(model.named_modules()) | tensors)
    return [walk.of(model_parts(model)), walk.patched(vars(F), F.__name__), *walk.rest()]


def described_optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Plain data that changes with an optimizer: class, settings, state, hooks, all attributes.

    The values of the parameters do not count here, wherever the optimizer refers to them.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    known = {str(i): p for i, p in enumerate(parameters)} | {"itself": optimizer}
    walk = _Walk(known=known, optimizers=True)
    return [walk.of(optimizer_parts(optimizer)), *walk.rest()]


class _Walk:
    """Describes values. What may be met again is described once, and has a number.

    Numbers are given in the order in which things are met, which is the same in every process.
    What is `known` is described elsewhere, and counts by its name. So are optimizers, unless the
    walk is about them.
    """

    def __init__(self, known: Mapping[str, Any] | None = None, *, optimizers: bool = False) -> None:
        self._optimizers = optimizers
        self._known = {id(value): name for name, value in (known or {}).items()}
        self._numbers: dict[int, int] = {}
        # Kept, so that no address is used twice.
        self._met: list[Any] = []

    def rest(self) -> Iterator[Any]:
        """What everything with a number is, and what is met meanwhile."""
        for value in self._met:
            yield self._inside(value)

    def of(self, value: Any) -> Any:
        """The value, or its number."""
        # Only these very types: a type derived from one of them may have code of its own.
        kind: type = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value.hex()
        if kind in (complex, bytes, bytearray, range, slice, torch.dtype, torch.device):
            return repr(value)
        if kind is tuple:
            return [self.of(entry) for entry in value]
        if kind in (set, frozenset):
            # The order differs from process to process.
            entries = sorted(cast("Iterable[Any]", value), key=self._standing)
            return [kind_of(value), *map(self.of, entries)]
        if id(value) in self._known:
            return {"known": self._known[id(value)]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return {"number": self._numbers[id(value)]}

    def _standing(self, entry: Any) -> str:
        """Where an entry of a set stands among the others."""
        known = self._known.get(id(entry))
        return standing(entry) if known is None else f"known {known}"

    def _inside(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, torch.optim.Optimizer):
            # The run's own optimizer has a digest of its own.
            return self.of(optimizer_parts(value)) if self._optimizers else kind_of(value)
        if value is os.environ or isinstance(value, logging.Logger):
            # A logger knows all others of its process.
            return kind_of(value)
        content = self._content(value)
        return [self._pickled(value) if content is None else content, self._object(value)]

    def _content(self, value: Any) -> Any:
        """What a value of a known type, or of one derived from it, holds beside its attributes."""
        if isinstance(value, Tensor):
            return tensor_digest(value)
        if isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(value)
            if array.dtype.hasobject:
                return self.of(array.tolist())
            content = hashlib.sha256(array.tobytes()).hexdigest()
            return [str(array.dtype), list(array.shape), content]
        if isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value).items()
            return [[self.of(name), self.of(entry)] for name, entry in entries]
        if isinstance(value, list | collections.deque):
            return [self.of(entry) for entry in cast("Iterable[Any]", value)]
        if isinstance(value, functools.partial):
            return [self.of(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, property):
            return [self.of(part) for part in (value.fget, value.fset, value.fdel)]
        if isinstance(value, staticmethod | classmethod):
            return self.of(cast(Any, value).__func__)
        if isinstance(value, nn.Module):
            tensors = dict(value.named_parameters()) | dict(value.named_buffers())
            return [self.of(model_parts(value)), self.of(tensors)]
        if isinstance(value, torch.jit.ScriptFunction):
            return script_of(value)
        if isinstance(value, KeysView | ValuesView | ItemsView):
            return [self.of(entry) for entry in cast("Iterable[Any]", value)]
        for plain, bare in BARE.items():
            if isinstance(value, plain):
                return self.of(bare(value))
        return repr(value) if type(value) in SAID_BY_REPR else None

    def _pickled(self, value: Any) -> Any:
        """What a library's object that shows nothing would be pickled as, such as a tokenizer."""
        shows = callable(value) or bool(getattr(value, "__dict__", None))
        if shows or bound_by(str(type(value).__module__)) is None:
            return None
        try:
            return self.of(value.__reduce_ex__(_PICKLE))
        except Exception:
            return None

    def _object(self, value: Any) -> list[Any]:
        """An object: its class, and what it holds."""
        is_tensor = isinstance(value, Tensor) and bound_by(str(type(value).__module__)) is not None
        if is_tensor or isinstance(value, nn.Module):
            held = []
        elif hasattr(value, "__dict__"):
            held = [self.of(vars(value))]
        else:
            # What is not written in Python, such as torch.exp, has a name at most, and an owner.
            held = [str(getattr(value, name, "")) for name in ("__module__", "__name__")]
            owner = getattr(value, "__self__", None)
            held += [] if isinstance(owner, type | types.ModuleType) else [self.of(owner)]
        for base in type(value).__mro__:
            if bound_by(str(base.__module__)) is None:
                held += [self.of(entry) for entry in _slots_of(value, base)]
        return [self.of(type(value)), held]

    def patched(self, members: Mapping[str, Any], home: str) -> list[Any]:
        """Functions of a library's class or module that somebody else has put there."""
        top, found = home.partition(".")[0], list[Any]()
        for name, member in sorted(members.items()):
            if isinstance(member, types.FunctionType):
                whose = str(member.__globals__.get("__name__"))
                if not is_installed(whose):
                    found.append([name, self.of(member)])
                elif not is_known(whose) and whose.partition(".")[0] != top:
                    # Following it would describe what is inside other packages.
                    found.append([name, whose, member.__qualname__])
        return found

    def _function(self, function: types.FunctionType) -> list[Any]:
        if (original := vars(function).get("_torchdynamo_orig_callable")) is not None:
            # The rest of what torch.compile gives is about the process.
            return [function.__qualname__, self.of(original)]
        cells = [_in_cell(cell) for cell in function.__closure__ or ()]
        around = [cells, function.__defaults__, function.__kwdefaults__, vars(function)]
        held = [self.of(part) for part in around]
        # A decorator of another package still holds the caller's own function.
        home = str(function.__globals__.get("__name__"))
        if (bound := bound_by(home)) is not None:
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
        imported = [[top, source_of(files_of(top))] for top in _imports(function.__code__, package)]
        return [home, self._code(function.__code__), held, used, imported, self._home(home)]

    def _home(self, name: str) -> Any:
        """The source of a module that holds code of the caller's own.

        A script counts by what it defines alone: it also says whether a run goes on.
        """
        return None if name == "__main__" else self.of(sys.modules.get(name))

    def _in_module(self, module: types.ModuleType, names: list[str], seen: set[int]) -> list[Any]:
        """What code with these names may take from a module, such as `scale` of `util.scale`."""
        if bound_by(module.__name__) is not None or id(module) in seen:
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
        bound, file = bound_by(module.__name__), getattr(module, "__file__", None)
        if bound is not None or file is None or not Path(file).is_file():
            return [module.__name__, bound]
        return [module.__name__, source_of([(Path(file).parent, Path(file))])]

    def _class(self, kind: type) -> list[Any]:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (bound := bound_by(str(kind.__module__))) is not None and _is_where_it_says(kind):
            patched = [self.patched(vars(base), base.__module__) for base in kind.__mro__]
            around = vars(sys.modules.get(kind.__module__, types))
            return [name, bound, patched, self.patched(around, kind.__module__)]
        members = [
            [name, self.of(member)]
            for name, member in sorted(vars(kind).items())
            if name not in _OF_PYTHON and not isinstance(member, types.MemberDescriptorType)
        ]
        bases = [self.of(base) for base in kind.__bases__]
        return [name, bases, self.of(type(kind)), members, self._home(str(kind.__module__))]

    def _code(self, code: types.CodeType) -> list[Any]:
        constants = [
            self._code(entry) if isinstance(entry, types.CodeType) else self.of(entry)
            for entry in code.co_consts
        ]
        # Which name is which argument, and what is caught where, is not in the instructions.
        beside = [list(code.co_varnames), code.co_flags, code.co_exceptiontable.hex()]
        return [code.co_code.hex(), constants, list(code.co_names), beside]


# How objects are pickled: the same in every version of Python that runs this.
_PICKLE = 4


def _is_where_it_says(kind: type) -> bool:
    """Whether a class is found under its name in its module, or is not made by Python code."""
    if not kind.__flags__ & _MADE_AT_RUN_TIME:
        return True
    home = sys.modules.get(kind.__module__)
    found = functools.reduce(
        lambda at, name: getattr(at, name, None), kind.__qualname__.split("."), home
    )
    return found is kind or not any(isinstance(m, types.FunctionType) for m in vars(kind).values())


def _in_cell(cell: types.CellType) -> Any:
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
    return sorted(top for top in found if not is_known(top))


def _slots_of(value: Any, kind: type) -> Iterator[Any]:
    """What an object holds in a class's slots. Members of compiled classes are something else."""
    if "__slots__" not in vars(kind):
        return
    for _, entry in sorted(vars(kind).items()):
        if isinstance(entry, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):
                yield entry.__get__(value)
