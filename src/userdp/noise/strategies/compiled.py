"""Loops compiled to machine code, in which sums may be taken in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call, and keep the result on disk.

    Sums may be reordered and multiplications fused, which lets loops use vector instructions. On
    one machine the result is the same every time. On another one its last bits may differ.
    """
    made = numba.njit(cache=True, fastmath={"reassoc", "contract", "nsz"})(function)
    return cast(Callable[P, R], made)
