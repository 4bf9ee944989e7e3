"""Keys of parts in a configuration: none is ignored, misread or given to another part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from userdp.config.own_keys import check_own_keys, own_values
from userdp.errors import InputError
from userdp.parts import Part, Registry


class Shape(Part):
    """A kind of part."""

    @property
    def words(self) -> str:
        return "a shape"


@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    name: ClassVar[str] = "square"
    keys: ClassVar[Mapping[str, str]] = {"side": "length", "tilt": "tilt"}
    length: float = field(metadata={"hint": "One is common."})
    tilt: int = 0


@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    name: ClassVar[str] = "circle"
    keys: ClassVar[Mapping[str, str]] = {"radius": "radius"}
    radius: float


SHAPES: Registry[Shape] = Registry("shape")
SHAPES.register(Square)
SHAPES.register(Circle)


class Section(BaseModel):
    """Names a shape; the shape's own keys stand beside."""

    model_config = ConfigDict(extra="allow")

    shape: str = "square"
    steps: int = 1


def values(kind: type[Shape], **given: Any) -> dict[str, Any]:
    return own_values(SHAPES, kind, Section(**given), "drawing", "shape")


def test_a_part_gets_the_fields_that_its_keys_set() -> None:
    assert values(Square, side=2.0) == {"length": 2.0}
    assert values(Square, side=2, tilt=3) == {"length": 2.0, "tilt": 3}
    assert values(Circle, shape="circle", radius=math.inf) == {"radius": math.inf}


def test_a_key_of_another_part_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"\[drawing\] radius has no meaning with shape = 'square'"
    ):
        values(Square, side=2.0, radius=1.0)
    with pytest.raises(InputError, match=r"side has no meaning .* set shape = 'square'"):
        values(Circle, shape="circle", radius=1.0, side=2.0)


def test_a_key_that_is_missing_is_named_with_its_hint() -> None:
    with pytest.raises(InputError, match=r"side is missing: shape = 'square' .* One is common\."):
        values(Square)


@pytest.mark.parametrize("given", [{"side": "wide"}, {"side": 1.0, "tilt": 0.5}, {"side": [1.0]}])
def test_a_value_of_another_type_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"drawing\.(side|tilt) = "):
        values(Square, **given)


def test_a_key_that_nobody_knows_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"unknown key 'drawing\.sidd'; did you mean 'side'"):
        check_own_keys(Section(sidd=1.0), "drawing", {"shape": SHAPES})
    check_own_keys(Section(side=1.0, steps=3), "drawing", {"shape": SHAPES})


def test_a_part_that_nobody_knows_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no shape 'oval'\. Known: 'circle', 'square'"):
        check_own_keys(Section(shape="oval"), "drawing", {"shape": SHAPES})
