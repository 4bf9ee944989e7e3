"""What `userdp plan` knows of users and records: told, counted in a store, or left by bounding.

Where records have several owners, only sampled records under a fixed-graph adjacency have a price,
and only after contribution bounding. Who owns what is public there, so what bounding keeps may be
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from userdp import defaults
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.units import Adjacency

if TYPE_CHECKING:
    from userdp.bounding.selection import Selection


@dataclass(frozen=True, kw_only=True)
class Known:
    """The numbers of a plan, what was `peeked` at to know them, and under which adjacency.

    `per_user` is the median of a user's records. `selection` is what bounding by it keeps.
    """

    num_users: int
    per_user: int
    adjacency: Adjacency
    peeked: list[str]
    store: Path | None = None
    selection: Selection | None = None

    @property
    def most_records(self) -> int:
        """The most records that a user of sampled records has."""
        return self.per_user if self.selection is None else self.selection.realised_bound

    @property
    def num_records(self) -> int | None:
        """How many records are kept, where that is public."""
        return None if self.selection is None else self.selection.size

    @property
    def compute(self) -> int:
        """The default gradients in a step: at most as many as there are records."""
        found = defaults.compute(self.num_users, self.per_user)
        return found if self.num_records is None else min(found, _power_below(self.num_records))

    @property
    def reasons(self) -> tuple[str, ...]:
        """What follows from a fixed graph, in words."""
        if not self.adjacency.fixed_graph:
            return ()
        priced = (
            f"{self.adjacency.value}: only sampled records have a price where records may have "
            "several owners"
        )
        if self.selection is None:
            return (
                priced,
                f"kept records taken as {self.per_user} of each user, the most there can be; with "
                "several owners fewer are kept and the noise is larger: give the store",
            )
        kept = (
            f"`userdp bound --max-records-per-user {self.per_user}` keeps "
            f"{self.selection.size:,} records"
        )
        return (priced, kept)


def known(
    store: UserStore | None, users: int | None, per_user: int | None, adjacency: Adjacency | None
) -> Known:
    """What is told, and the rest from the store."""
    if store is None:
        if users is None or per_user is None:
            raise InputError("give a store, or --users N and --records-per-user K.")
        told = adjacency or Adjacency.ADD_REMOVE
        return Known(num_users=users, per_user=per_user, adjacency=told, peeked=[])
    adjacency = _adjacency_for(store, adjacency)
    peeked: list[str] = []
    if users is None:
        users = store.num_users
        peeked.append("number of users, counted in the store (or declare --users)")
    if per_user is None:
        # The median rule for G_ELS (Charles et al. 2024), applied to the users in the store.
        per_user = math.ceil(np.median(store.records_per_user()))
        peeked.append(
            "median records of a user, read from the store (or pay for it with `userdp quantile` "
            "and give --records-per-user)"
        )
    if not adjacency.fixed_graph:
        return Known(num_users=users, per_user=per_user, adjacency=adjacency, peeked=peeked)
    from userdp.bounding.bound import bound

    return Known(
        num_users=users,
        per_user=per_user,
        adjacency=adjacency,
        # Who owns what is public here, and these numbers follow from it.
        peeked=[],
        store=store.path,
        selection=bound(store.path, per_user).selection,
    )


def _adjacency_for(store: UserStore, given: Adjacency | None) -> Adjacency:
    """The adjacency that is given, or the usual one for records like these."""
    shared = int((store.users_per_record() > 1).sum())
    if given is None:
        return Adjacency.FIXED_GRAPH_ZERO_OUT if shared else Adjacency.ADD_REMOVE
    if shared and not given.fixed_graph:
        raise InputError(
            f"--adjacency {given.value}: {shared:,} of {store.num_records:,} records have several "
            "owners, which has a price under a fixed-graph adjacency only. Use "
            f"{Adjacency.FIXED_GRAPH_ZERO_OUT.value} or {Adjacency.FIXED_GRAPH_REPLACE.value}."
        )
    return given


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
