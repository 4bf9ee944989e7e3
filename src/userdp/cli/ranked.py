"""A command that several ranks run: the first prepares it, and all leave together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from userdp.ranks_launched import launched_ranks

Value = TypeVar("Value")


def by_first(make: Callable[[], Value]) -> Value:
    """What `make` returns on the first rank; what it raises there, all ranks raise.

    A process that is alone needs no torch for it.
    """
    if launched_ranks() == 1:
        return make()
    from userdp.ranks import Ranks

    return Ranks.found().by_first(make)


def leave() -> None:
    """Leave the others, at the end of a program that went well."""
    if launched_ranks() > 1:
        from userdp.ranks import Ranks

        Ranks.leave()
