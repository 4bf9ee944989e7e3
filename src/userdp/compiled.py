"""Loops compiled to machine code that keep their Python types."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call with new array types, and keep the result on disk."""
    return cast(Callable[P, R], numba.njit(cache=True)(function))
