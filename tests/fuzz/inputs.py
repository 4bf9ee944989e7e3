"""Strategies for broken files: good ones that were edited, and JSON with odd values in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

# In every record's text. With its blank it is no name of a column, so no message may hold it.
SECRET = "zebra canary"

# What parsers stumble over, beside random bytes.
ODD_BYTES = (
    b"\x00",
    b"\n",
    b"\r",
    b'"',
    b"'",
    b",",
    b";",
    b"{",
    b"}",
    b"[",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"9" * 5000,
    b"[" * 2000,
    b"From ",
    b"<row ",
    b"&x;",
    b"<!DOCTYPE a [",
)

ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**63, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["inf", "nan", "", " ", "user", "type", "\ud800", "\x00"]),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    ODD_VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@st.composite
def edited(draw: st.DrawFn, good: Sequence[bytes]) -> bytes:
    """One of the good files, with up to four edits at any place."""
    content = draw(st.sampled_from(list(good)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 0, 1, 1, 2, 8, 64, len(content)]))
        piece = draw(st.sampled_from(ODD_BYTES) | st.binary(max_size=4))
        if draw(st.integers(0, 7)) == 0:
            # A part of the file once more, as after a copy that was begun twice.
            begin = draw(st.integers(0, len(content)))
            piece = content[begin : begin + 64]
        content = content[:at] + piece + content[at + length :]
    return content


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value, itself included."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            found += _places(inner, (*path, number))
    return found


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(copy[path[0]], path[1:], new)
    return copy


@st.composite
def edited_json(draw: st.DrawFn, good: Sequence[Any]) -> Any:
    """One of the good JSON values, with up to three of the values in it replaced or taken away."""
    value = draw(st.sampled_from(list(good)))
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(_places(value)))
        if path and draw(st.integers(0, 3)) == 0:
            holder = value
            for part in path[:-1]:
                holder = holder[part]
            kept = (
                {k: v for k, v in holder.items() if k != path[-1]}
                if isinstance(holder, dict)
                else [v for number, v in enumerate(holder) if number != path[-1]]
            )
            value = _replaced(value, path[:-1], kept)
        else:
            value = _replaced(value, path, draw(VALUES))
    return value


def json_bytes(value: Any) -> bytes:
    """A JSON file; numbers that JSON does not have are written as Python reads them."""
    return json.dumps(value).encode()
