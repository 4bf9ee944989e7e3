"""Users of one size in tokens: those with fewer give nothing, the others give their first ones.

McMahan et al. 2018 prepare their users in this way (App. B), with 1,600 tokens each.

What a user gives depends on that user's own rows alone, so a neighbouring dataset still differs in
one user, and nothing is to pay. A user without rows is drawn like any other and gives nothing. The
number of users who are left is secret: the plan counts all of them. All this needs rows of one
owner each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from userdp.data.tokens import TokenRows
from userdp.index import indptr_of, ranges


def equally_long(rows: TokenRows, tokens_per_user: int) -> TokenRows:
    """The rows of users with at least `tokens_per_user` tokens, cut after these. Secret.

    Rows stay in their order. A row that is cut to its first token predicts nothing and is left out.
    """
    owners = np.asarray(rows.owners)
    lengths = np.diff(rows.indptr)
    totals = np.zeros(rows.num_users, dtype=np.int64)
    np.add.at(totals, owners, lengths)
    left = np.clip(tokens_per_user - _before(owners, lengths), 0, lengths)
    left = np.where(totals[owners] >= tokens_per_user, left, 0)
    left = np.where((left == 1) & (lengths > 1), 0, left)
    kept = np.flatnonzero(left)
    places = ranges(np.asarray(rows.indptr)[kept], left[kept])
    return TokenRows(
        tokens=np.asarray(rows.tokens[places]),
        indptr=indptr_of(left[kept]),
        owners=owners[kept],
        num_users=rows.num_users,
        labelled=None if rows.labelled is None else np.asarray(rows.labelled[places]),
        classes=None if rows.classes is None else np.asarray(rows.classes)[kept],
        records=None if rows.records is None else np.asarray(rows.records)[kept],
    )


def _before(owners: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens each row's owner has in the rows before it.

    >>> _before(np.array([0, 1, 0, 0]), np.array([5, 9, 2, 3])).tolist()
    [0, 0, 5, 7]
    """
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(lengths[order])
    starts = ends - lengths[order]
    # Rows of one owner lie together: what was there before the first of them does not count.
    first = np.searchsorted(owners[order], owners[order], side="left")
    found = np.empty_like(starts)
    found[order] = starts - starts[first] if len(starts) else starts
    return found
