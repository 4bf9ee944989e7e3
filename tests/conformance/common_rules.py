"""What every part must do, whatever its kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from userdp.parts import Part, Registry


def check_frozen(part: Part) -> None:
    """A plan is priced once: no parameter of its parts can be changed afterwards."""
    names = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    for name in names:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, getattr(part, name))
    # Equal parts are equal as keys, too.
    assert hash(dataclasses.replace(part)) == hash(part)  # type: ignore[type-var]


def check_json(registry: Registry[Any], part: Part) -> None:
    """What is written as JSON, by the letter of the standard, comes back as the same part."""
    text = json.dumps(registry.to_json(part), allow_nan=False)
    again = registry.from_json(json.loads(text))
    assert again == part
    assert type(again) is type(part)


def check_named(registry: Registry[Any], part: Part, **attributes: Any) -> None:
    """A configuration finds the type by its name."""
    assert registry.named(part.name, **attributes) is type(part)


def check_keys(part: Part) -> None:
    """Every configuration key of the part sets one of its fields."""
    names = {field.name for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    assert set(part.keys.values()) <= names


def check_words(part: Part) -> None:
    """A statement prints the part on one line, the same way every time."""
    assert part.words == dataclasses.replace(part).words  # type: ignore[type-var]
    assert "\n" not in part.words
    assert part.words == part.words.strip()


def check_every_number_is_said(part: Part, *, but: Sequence[str] = ()) -> None:
    """A part with another number, whichever it is, is printed otherwise."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if field.name in but or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        other = value + 1 if isinstance(value, int) else value / 2
        if other != value:
            changed = dataclasses.replace(part, **{field.name: other})  # type: ignore[type-var]
            assert changed.words != part.words, field.name
