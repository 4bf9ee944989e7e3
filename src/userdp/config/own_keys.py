"""Configuration keys that belong to parts, and the message for keys that have no meaning.

A part lists its own keys (`Part.keys`). They stand in the section that names the part, beside the
section's own keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from userdp.errors import InputError
from userdp.parts import Part, Registry

# In a field's metadata: a sentence that helps whoever left the key out.
HINT = "hint"

# A message is one line, so it shows the beginning of a long value only.
LONGEST_SHOWN = 80


def own_values(
    registry: Registry[Any], part: type[Part], section: BaseModel, name: str, setting: str
) -> dict[str, Any]:
    """The fields that the section `name` gives to the part that its key `setting` chose."""
    chosen = getattr(section, setting)
    for other in registry:
        for key in other.keys.keys() - part.keys.keys():
            if _given(section, key) is not None:
                raise InputError(
                    f"[{name}] {key} has no meaning with {setting} = {chosen!r}: remove it, or set "
                    f"{setting} = {other.name!r}."
                )
    found: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(part)
    for key, field_name in part.keys.items():
        value = _given(section, key)
        field = fields[field_name]
        is_optional = field.default is not dataclasses.MISSING
        if value is None and not is_optional:
            hint = field.metadata.get(HINT, "")
            raise InputError(
                f"[{name}] {key} is missing: {setting} = {chosen!r} needs it. {hint}".rstrip()
            )
        if value is not None:
            found[field_name] = _checked(hints[field_name], value, f"{name}.{key}")
    return found


def check_own_keys(
    section: BaseModel,
    name: str,
    registries: Mapping[str, Registry[Any]],
    sections: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Refuse keys that are neither the section's nor those of the parts that it chose.

    `sections` are the keys of all sections, to say where a key belongs.
    """
    known = set(type(section).model_fields)
    for setting, registry in registries.items():
        # Also imports the part where an installed package brings it.
        chosen = getattr(section, setting)
        if not any(part.name == chosen for part in registry):
            registry.named(chosen)
        known |= {key for part in registry for key in part.keys}
    for key in section.model_extra or {}:
        if key not in known:
            raise InputError(unknown_key([name, key], sorted(known), sections or {}))


def unknown_key(
    location: list[str], known: list[str], sections: Mapping[str, Collection[str]]
) -> str:
    """What to say about a key that nobody knows in its section."""
    for section, keys in sections.items():
        if location[-1] in keys and location[:-1] != [section]:
            return f"unknown key {'.'.join(location)!r}; it belongs into section [{section}]."
    close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}."
    return f"unknown key {'.'.join(location)!r}; {hint}"


def _given(section: BaseModel, key: str) -> Any:
    if key in type(section).model_fields:
        return getattr(section, key)
    return (section.model_extra or {}).get(key)


def _checked(hint: Any, value: Any, name: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        said = as_sentence(error.errors()[0]["msg"])
        raise InputError(f"{name} = {shown(value)}: {said}") from None


def as_sentence(message: str) -> str:
    """What pydantic says, as one sentence: it puts words of its own before a message of ours.

    >>> as_sentence("Value error, did you mean 'muon'?"), as_sentence("Input should be a number")
    ("did you mean 'muon'?", 'Input should be a number.')
    """
    message = message.removeprefix("Value error, ")
    return message if message.endswith((".", "?", "!")) else f"{message}."


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
