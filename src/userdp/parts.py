"""Parts of the private step that can be exchanged: samplers, noises, clip rules, update rules.

A part is a frozen dataclass of public parameters. It has a `name`, by which a configuration asks
for it, and `words`, which a statement prints. Each kind of part has one registry. The registry is
also how a plan is written as JSON and read back, so an unknown type is refused by its name.

A package can bring parts of its own: it lists the module that defines them under the entry point
group `userdp.parts` (docs/extending.md). Such modules are imported when a name is not known here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar, cast

from userdp.errors import InputError, LedgerError, UnaccountedPlanError

ENTRY_POINTS = "userdp.parts"


class Part(ABC):
    """Public parameters, a name in configurations, and words in statements."""

    name: ClassVar[str]
    # The configuration keys that are this part's own, each with the field that it sets.
    keys: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def words(self) -> str:
        """The part and its parameters, as a statement prints them."""


def is_our_own(part: Part) -> bool:
    """Whether the part comes with this package, whose tests cover it."""
    return type(part).__module__.split(".")[0] == __name__.split(".")[0]


AnyPart = TypeVar("AnyPart", bound=Part)
ThisPart = TypeVar("ThisPart", bound=Part)


class Registry(Generic[AnyPart]):
    """Every part of one kind, by its configuration name and by its type."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._types: dict[str, type[AnyPart]] = {}

    def register(self, part: type[ThisPart]) -> type[ThisPart]:
        """Add a part; used as a decorator above `@dataclass(frozen=True, kw_only=True)`."""
        # The class itself must be a dataclass. If it only inherits from one, its attributes are not
        # frozen, and JSON would leave them out.
        params = vars(part).get("__dataclass_params__")
        if params is None or not params.frozen:
            # A plan is priced once, when it is made.
            raise TypeError(f"{part.__name__} must be a frozen dataclass: a priced part stays.")
        known: dict[str, Any] = self._types
        if known.setdefault(part.__name__, part) is not part:
            raise TypeError(f"there is a {self.kind} of type {part.__name__} already.")
        return part

    def __iter__(self) -> typing.Iterator[type[AnyPart]]:
        return iter(list(self._types.values()))

    def named(self, name: str, **attributes: Any) -> type[AnyPart]:
        """The part that a configuration calls `name`, with these class attributes."""

        def matching() -> list[type[AnyPart]]:
            found = (part for part in self if part.name == name)
            return [p for p in found if all(getattr(p, n) == v for n, v in attributes.items())]

        if not matching():
            load_installed_parts()
        if not matching():
            here = [p for p in self if all(getattr(p, n) == v for n, v in attributes.items())]
            known = ", ".join(sorted({repr(part.name) for part in here}))
            with_ = "".join(f" with {n} = {str(v)!r}" for n, v in attributes.items())
            raise InputError(f"there is no {self.kind} {name!r}{with_}. Known: {known}.")
        return matching()[0]

    def to_json(self, part: AnyPart) -> dict[str, Any]:
        """Plain data, with the type's name."""
        fields = {name: _plain(value) for name, value in dataclasses.asdict(part).items()}  # type: ignore[call-overload]
        return {"type": type(part).__name__} | fields

    def from_json(self, data: Mapping[str, Any]) -> AnyPart:
        """What `to_json` wrote; a type that nobody registered is refused."""
        given = dict(data)
        kind = given.pop("type")
        if kind not in self._types:
            load_installed_parts()
        if kind not in self._types:
            raise UnaccountedPlanError(
                f"{self.kind} {kind!r} has no accounting rule here: it is not known."
            )
        part = self._types[kind]
        hints = typing.get_type_hints(part)
        return part(**{n: _of_type(value, hints.get(n)) for n, value in given.items()})


@contextmanager
def as_written(what: str) -> Generator[None]:
    """Refuse `what` if making it from plain data fails: it is not as this program wrote it."""
    try:
        yield
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise LedgerError(f"{what} lacks a field, or has one that is wrong.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        # As it is when it is read back, so that both compare as equal.
        return [_plain(entry) for entry in cast("tuple[Any, ...]", value)]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _of_type(value: Any, hint: Any) -> Any:
    if hint is float and isinstance(value, str | int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list):
        return tuple(_of_type(entry, None) for entry in typing.cast("list[Any]", value))
    return value


@functools.cache
def load_installed_parts() -> None:
    """Import the modules that installed packages list as bringing parts."""
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
