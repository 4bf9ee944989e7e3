"""The registries: what may be registered, and what a name or a type finds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from userdp import parts
from userdp.errors import InputError, UnaccountedPlanError
from userdp.parts import Part, Registry


class Shape(Part):
    """A kind of part."""

    colour: ClassVar[str] = "red"

    @property
    def words(self) -> str:
        return "a shape"


@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    name: ClassVar[str] = "square"
    side: float
    corners: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    name: ClassVar[str] = "round"
    side: float


@dataclass(frozen=True, kw_only=True)
class BlueCircle(Shape):
    name: ClassVar[str] = "round"
    colour: ClassVar[str] = "blue"
    keys: ClassVar[Mapping[str, str]] = {"side": "side"}
    side: float


@pytest.fixture
def shapes() -> Registry[Shape]:
    registry: Registry[Shape] = Registry("shape")
    for kind in (Square, Circle, BlueCircle):
        registry.register(kind)
    return registry


def test_a_part_that_can_be_changed_after_it_was_priced_is_refused(
    shapes: Registry[Shape],
) -> None:
    @dataclass(kw_only=True)
    class Soft(Shape):
        name: ClassVar[str] = "soft"
        side: float

    class NoDataclass(Shape):
        name: ClassVar[str] = "none"

    class OnlyInherits(Square):
        more: float = 1.0

    for kind in (Soft, NoDataclass, OnlyInherits):
        with pytest.raises(TypeError, match=f"{kind.__name__} must be a frozen dataclass"):
            shapes.register(kind)
    assert list(shapes) == [Square, Circle, BlueCircle]


def test_another_type_of_the_same_name_is_refused(shapes: Registry[Shape]) -> None:
    # A ledger names types: it must not be read as a plan of something else.
    other = dataclass(frozen=True, kw_only=True)(type("Square", (Shape,), {"name": "other"}))
    with pytest.raises(TypeError, match="already"):
        shapes.register(other)
    assert shapes.register(Square) is Square
    assert isinstance(shapes.from_json({"type": "Square", "side": 1.0}), Square)


def test_a_name_finds_the_part_with_the_attributes_asked_for(shapes: Registry[Shape]) -> None:
    assert shapes.named("square") is Square
    assert shapes.named("round", colour="red") is Circle
    assert shapes.named("round", colour="blue") is BlueCircle


def test_an_unknown_name_is_refused_and_the_known_ones_are_told(shapes: Registry[Shape]) -> None:
    with pytest.raises(InputError, match=r"no shape 'oval'\. Known: 'round', 'square'"):
        shapes.named("oval")
    with pytest.raises(InputError, match="no shape 'square' with colour = 'blue'"):
        shapes.named("square", colour="blue")


@pytest.mark.parametrize("kind", ["Oval", "square", ""])
def test_an_unknown_type_is_refused_by_its_name(kind: str, shapes: Registry[Shape]) -> None:
    with pytest.raises(UnaccountedPlanError, match=f"shape '{kind}' has no accounting rule"):
        shapes.from_json({"type": kind, "side": 1.0})


@pytest.mark.parametrize(
    "part",
    [
        Square(side=0.1),
        Square(side=math.inf, corners=()),
        Square(side=3, corners=(4, 5, 6)),
        Circle(side=1e-300),
        BlueCircle(side=0.1),
    ],
    ids=str,
)
def test_json_gives_the_same_part_of_the_same_type(part: Shape, shapes: Registry[Shape]) -> None:
    # No NaN or Infinity, which JSON has not.
    text = json.dumps(shapes.to_json(part), allow_nan=False)
    again = shapes.from_json(json.loads(text))
    assert again == part
    assert type(again) is type(part)


@pytest.mark.parametrize(
    "data", [{"type": "Square", "sides": 1.0}, {"type": "Square"}, {"type": "Circle", "corners": 1}]
)
def test_fields_that_a_part_has_not_or_lacks_are_refused(
    data: dict[str, object], shapes: Registry[Shape]
) -> None:
    with pytest.raises(TypeError):
        shapes.from_json(data)


@dataclass(frozen=True, kw_only=True)
class Oval(Shape):
    """A part that an installed package brings."""

    name: ClassVar[str] = "oval"
    side: float


class Entry:
    """An entry point of that package: loading it imports the module, which registers the part."""

    def __init__(self, registry: Registry[Shape]) -> None:
        self._registry = registry

    def load(self) -> None:
        self._registry.register(Oval)


@pytest.mark.parametrize("asked", ["by name", "by type"])
def test_parts_of_installed_packages_are_found(
    asked: str, shapes: Registry[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str] = []

    def entry_points(group: str) -> list[Entry]:
        groups.append(group)
        return [Entry(shapes)]

    monkeypatch.setattr(parts, "entry_points", entry_points)
    parts.load_installed_parts.cache_clear()
    try:
        # What is known here needs nothing from elsewhere.
        assert shapes.named("square") is Square
        assert groups == []
        if asked == "by name":
            assert shapes.named("oval") is Oval
        else:
            assert shapes.from_json({"type": "Oval", "side": 2}) == Oval(side=2.0)
        assert groups == ["userdp.parts"]
    finally:
        parts.load_installed_parts.cache_clear()
