"""Loops compiled to machine code, with the types of the Python they are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled at its first call for the array types it meets, and kept on disk."""
    return cast(Callable[P, R], numba.njit(cache=True)(function))
