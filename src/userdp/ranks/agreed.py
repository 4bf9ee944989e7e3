"""What the ranks must know of each other's part of a step before its sum is released.

Every decision of a step is taken from these numbers, which are the same on every rank. So all ranks
halt, doubt, refuse and adapt alike. Secret, like what they count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import fsum

import numpy as np
import torch

from userdp.clipping.flat import ClippedSum
from userdp.errors import StoppedRunError
from userdp.index import Rows
from userdp.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted of a rank's part of a step, or of all parts together.

    `keeps` says that a loss or a model kept something of one group for the next; `differs` that the
    fast path was seen to differ from the plain loop.
    """

    num_within: int = 0
    num_updates: int = 0
    weight: float = 0.0
    keeps: bool = False
    differs: bool = False


def agreed(
    ranks: Ranks, compute: Callable[[], tuple[ClippedSum, Counted]], *, dealt: int
) -> tuple[ClippedSum, Counted]:
    """This rank's part of the sum with the counts of all parts, and what was seen on any rank.

    `dealt` names what the groups were shared out by (`shares.dealt_by`). If a rank has another
    number, all ranks raise: somebody may be on two of them.

    What raises on one rank raises on all, so that nobody waits for a rank that has given up.
    """
    if ranks.count == 1:
        return compute()
    found: tuple[ClippedSum, Counted] | None = None
    error: Exception | None = None
    try:
        found = compute()
    except Exception as raised:
        error = raised
    own = Counted() if found is None else found[1]
    rows = ranks.numbers(
        [
            *(error is not None, own.num_within, own.num_updates, own.weight),
            *(own.keeps, own.differs, dealt),
        ]
    )
    if rows[:, 0].any():
        ranks.raise_together(error)
    others = np.flatnonzero(rows[:, 6] != rows[0, 6])
    if len(others):
        raise StoppedRunError(
            f"rank {others[0]} shares out the cohort of this step otherwise than rank 0, so a user "
            "could count on two ranks: it was given other row_lengths, or draws otherwise (another "
            "numpy?). The step is not taken. Make the ranks alike and start again."
        )
    assert found is not None
    seen = Counted(
        num_within=int(rows[:, 1].sum()),
        num_updates=int(rows[:, 2].sum()),
        # Rounded once, so that the weight hardly depends on how the groups are shared out.
        weight=fsum(rows[:, 3]),
        keeps=bool(rows[:, 4].any()),
        differs=bool(rows[:, 5].any()),
    )
    counted = replace(
        found[0],
        num_within=torch.tensor(seen.num_within),
        num_updates=seen.num_updates,
        weight=seen.weight,
    )
    return counted, seen


def with_all_apart(ranks: Ranks, total: ClippedSum, places: Rows) -> ClippedSum:
    """The sum of all ranks, where it needs the updates of all users; otherwise the rank's own.

    `places` are those of this rank's groups in the cohort. The updates of all ranks are put into
    the cohort's order, so the sum is that of one process, bit for bit.
    """
    apart = total.apart
    if apart is None:
        return total
    users = torch.cat(ranks.tensors(apart.users_UP))
    own = torch.from_numpy(np.asarray(places, np.int64)[list(apart.places)])
    order = torch.argsort(torch.cat(ranks.tensors(own)))
    return apart.of_all(users[order], total.num_updates)
