"""What is wrong with a configuration, in one line that says what may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from userdp.config.own_keys import as_sentence, shown, unknown_key


def first_problem(error: ValidationError, data: dict[str, Any], root: type[BaseModel]) -> str:
    """The problem to mend first, of all that pydantic found in `data`."""
    # A key that nobody knows comes first: it may be the misspelling of one that is missing.
    problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return _unknown(location, isinstance(problem["input"], dict), root)
    if problem["type"] == "missing":
        return _missing(location, data, root)
    said = as_sentence(problem["msg"])
    if problem["type"] == "value_error":
        # A message of ours names the key itself.
        section = _section(location, root)
        return f"[{section}] {said}" if section else said
    return f"{'.'.join(location)} = {shown(problem['input'])}: {said}"


def keys_of_sections(root: type[BaseModel]) -> dict[str, list[str]]:
    """The keys of each section, in order."""
    return {section: _known_keys([section], root) for section in root.model_fields}


def _section(location: list[str], root: type[BaseModel]) -> str:
    """The section that a problem is in; empty if `root` is that section."""
    found: list[str] = []
    fields = root.model_fields
    for part in location:
        inner = _fields_inside(fields, part)
        if inner is None:
            break
        fields = inner
        found.append(part)
    return ".".join(found)


def _unknown(location: list[str], is_section: bool, root: type[BaseModel]) -> str:
    """What to say about a key or a section that nobody knows."""
    if len(location) > 1 or not is_section:
        return unknown_key(location, _known_keys(location[:-1], root), keys_of_sections(root))
    known = sorted(root.model_fields)
    close = difflib.get_close_matches(location[0], known, n=1, cutoff=0.5)
    names = ", ".join(f"[{name}]" for name in known)
    hint = f"did you mean [{close[0]}]?" if close else f"there are {names}."
    return f"unknown section [{location[0]}]; {hint}"


def _missing(location: list[str], data: dict[str, Any], root: type[BaseModel]) -> str:
    """What to say about a key that is not there, and about one that may be meant for it."""
    if len(location) == 1:
        return f"section [{location[0]}] is missing."
    given: Any = data
    for part in location[:-1]:
        given = given[part]
    strangers = sorted(set(map(str, given)) - set(_known_keys(location[:-1], root)))
    close = difflib.get_close_matches(location[-1], strangers, n=1, cutoff=0.6)
    hint = f"; did you mean it by {close[0]!r}?" if close else "."
    return f"key {'.'.join(location)!r} is missing{hint}"


def _known_keys(section: list[str], root: type[BaseModel]) -> list[str]:
    fields = root.model_fields
    for name in section:
        inner = _fields_inside(fields, name)
        assert inner is not None
        fields = inner
    return sorted(fields)


def _fields_inside(fields: Mapping[str, FieldInfo], name: str) -> Mapping[str, FieldInfo] | None:
    """The fields of the section `name` among `fields`; None if it is no section."""
    kind: Any = fields[name].annotation if name in fields else None
    for one in (kind, *getattr(kind, "__args__", ())):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one.model_fields
    return None
