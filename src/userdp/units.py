"""Who is protected, and which datasets count as neighbours.

`userdp` protects a *user*: everything one person contributed. What a neighbouring dataset is has
three readings (McMahan et al. 2018, Def. 2; Charles et al. 2024, App. A; Ganesh et al. 2025,
Def. 2.1), and the reading fixes how far one user can move the clipped sum.
"""

from __future__ import annotations

from enum import StrEnum


class SamplingUnit(StrEnum):
    """What one Poisson coin decides: a whole user (ULS) or a single record (ELS).

    Both give a user-level guarantee; they differ in what it costs.
    """

    USER = "user"
    RECORD = "record"


class Adjacency(StrEnum):
    """Which datasets are neighbours: the guarantee compares a model trained on either.

    add-remove: all of one user's records are present, or absent.
    zero-out:   the user's records stay in place but contribute nothing.
    replace:    the user's records are exchanged for any others.
    """

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE = "replace"

    @property
    def sensitivity_factor(self) -> float:
        """How far neighbours differ in the clipped sum, in clip norms per contributed update.

        >>> Adjacency.ADD_REMOVE.sensitivity_factor, Adjacency.REPLACE.sensitivity_factor
        (1.0, 2.0)
        """
        return 2.0 if self is Adjacency.REPLACE else 1.0

    @property
    def meaning(self) -> str:
        """The neighbour relation in words, for statements and reports."""
        return {
            Adjacency.ADD_REMOVE: "all of one user's records are present or absent",
            Adjacency.ZERO_OUT: "all of one user's records count, or count as nothing",
            Adjacency.REPLACE: "all of one user's records are exchanged for any others",
        }[self]
