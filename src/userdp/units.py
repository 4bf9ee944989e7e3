"""Who is protected, and which datasets count as neighbours.

`userdp` protects a *user*: everything that one person contributed. The papers define a neighbouring
dataset in three ways (McMahan et al. 2018, Def. 2; Charles et al. 2024, App. A; Ganesh et al. 2025,
Def. 2.1). The definition decides how far one user can move the clipped sum.
"""

from __future__ import annotations

from enum import StrEnum

from userdp.errors import InputError


class SamplingUnit(StrEnum):
    """What one Poisson coin decides: a whole user (ULS) or a single record (ELS).

    Both give a user-level guarantee. They differ in what it costs.
    """

    USER = "user"
    RECORD = "record"


class Adjacency(StrEnum):
    """Which datasets are neighbours. The guarantee compares models trained on one and the other.

    add-remove: all of one user's records are present, or absent.
    zero-out:   the user's records stay in place but contribute nothing.
    replace:    the user's records are exchanged for any others.

    For records with several owners there are two more, in which who owns what is held fixed (Ganesh
    et al. 2025, Def. 2.1). Every record that the user owns, alone or with others, changes only its
    content:

    fixed-graph-zero-out: those records contribute nothing.
    fixed-graph-replace:  their content is exchanged for any other.
    """

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE = "replace"
    FIXED_GRAPH_ZERO_OUT = "fixed-graph-zero-out"
    FIXED_GRAPH_REPLACE = "fixed-graph-replace"

    @classmethod
    def _missing_(cls, value: object) -> None:
        if value in ("node", "fixed-graph-node"):
            # Ganesh et al. 2025, Def. 2.2 and the discussion after it.
            raise InputError(
                "node privacy (a user and all its records vanish, the graph included) is not "
                "offered: bounding depends on the whole graph, so one user can change which "
                "records of others are selected, and no practical training algorithm is known "
                f"for it. Use {cls.FIXED_GRAPH_ZERO_OUT.value!r}: it protects what records say, "
                "not who owns them."
            )

    @property
    def fixed_graph(self) -> bool:
        """Whether both datasets have the same owners of records. Then who owns what is public."""
        return self in (Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.FIXED_GRAPH_REPLACE)

    @property
    def replaces(self) -> bool:
        """Whether a user is compared with another one, who may pull the other way."""
        return self in (Adjacency.REPLACE, Adjacency.FIXED_GRAPH_REPLACE)

    @property
    def meaning(self) -> str:
        """The neighbour relation in words, for statements and reports."""
        return {
            Adjacency.ADD_REMOVE: "all of one user's records are present or absent",
            Adjacency.ZERO_OUT: "all of one user's records count, or count as nothing",
            Adjacency.REPLACE: "all of one user's records are exchanged for any others",
            Adjacency.FIXED_GRAPH_ZERO_OUT: (
                "all records that one user owns, alone or with others, count or count as nothing; "
                "who owns which record is the same and is treated as public"
            ),
            Adjacency.FIXED_GRAPH_REPLACE: (
                "the content of all records that one user owns, alone or with others, is exchanged "
                "for any other; who owns which record is the same and is treated as public"
            ),
        }[self]

    @property
    def promise(self) -> str:
        """The guarantee as a curator may tell it to the users if epsilon is small."""
        return self.promised("is protected", "would learn nearly the same")

    def promised(self, degree: str, learns: str) -> str:
        """The promise in words. `degree` says how protected a user is, `learns` what others learn.

        Reference: Ganesh et al. 2025, Sec. 1.1, for records with several owners.
        """
        if self.fixed_graph:
            changed = (
                "replaced with different text"
                if self is Adjacency.FIXED_GRAPH_REPLACE
                else "left out of the computation"
            )
            return (
                "Even if every message you sent or received contained the same private information "
                f"about you, that information {degree}: whoever has the model {learns} if the text "
                f"of every message you sent or received had been {changed} before training. Who "
                "wrote to whom is not protected by this promise."
            )
        changed = "replaced with other text" if self is Adjacency.REPLACE else "left out"
        return (
            "Even if everything you wrote contained the same private information about you, that "
            f"information {degree}: whoever has the model {learns} if all your records had been "
            f"{changed} before training. What others wrote about you is not protected by this "
            "promise."
        )


def too_large(delta: float, num_users: int) -> str:
    """Why a delta this large protects nobody; empty if it is at most 1 / `num_users`.

    >>> too_large(1e-6, 1000)
    ''
    """
    if delta <= 1 / num_users:
        return ""
    return (
        f"delta={delta:g} is above 1/num_users={1 / num_users:.3g}: publishing one user's data "
        "outright would meet it"
    )
