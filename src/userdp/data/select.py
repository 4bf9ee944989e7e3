"""Which of a user's own data take part: the best records by a criterion, or random chunks.

A criterion (Chua et al. 2024, Sec. 4.1) gives every record a score, such as its length or its loss
under a public model. Every user keeps the k records with the highest scores. For random chunks
(Sec. 5.1), all records of a user form one long document, and a chunk of the model's length begins
anywhere in it.

Both look at text, unlike bounding from the owners alone. They still cost nothing under user-level
privacy: what a user keeps depends on that user's own data, public scores and fresh randomness. A
neighbouring dataset changes what that one user contributes and nothing else. This fails if a record
has several owners, because one owner's text would decide which records of the others are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.index import Rows

if TYPE_CHECKING:
    from userdp.data.store import UserStore


def best_records(
    store: UserStore, scores: NDArray[np.float64], *, at_most: int
) -> NDArray[np.int64]:
    """The multiplicity (0 or 1) of each record: one for every user's `at_most` highest scores.

    `scores[i]` may depend only on record i and on public things. Of equal scores the user's earlier
    record wins. The order of a user's records does not depend on other users.

    Guarantee: no user keeps more than k = `at_most` records, and what a user keeps depends on that
    user's records alone. Raises `InputError` if a record has several owners.
    Reference: Chua et al. 2024, Sec. 4.1.
    """
    check_single_owners(store)
    owners = np.asarray(store.record_users)
    assert scores.shape == owners.shape
    by_score = np.argsort(-scores, kind="stable")
    order = by_score[np.argsort(owners[by_score], kind="stable")]
    position = np.arange(len(order)) - store.user_records_indptr[owners[order]]
    multiplicity = np.zeros(len(scores), dtype=np.int64)
    multiplicity[order[position < at_most]] = 1
    return multiplicity


def check_single_owners(store: UserStore) -> None:
    """Refuse a store in which a record has several owners."""
    shared = int((store.users_per_record() > 1).sum())
    if shared:
        raise InputError(
            f"{store.path}: {shared:,} of {store.num_records:,} records have several owners. "
            "Choosing by what records say would let one user's text change which records of "
            "another user are kept, and that user's accounting would be wrong. Use a method that "
            "sees the owners alone, such as greedy."
        )


def random_chunks(
    rows: TokenRows,
    own: Rows,
    *,
    count: int,
    sequence_length: int,
    rng: np.random.Generator,
) -> TokenRows:
    """`count` chunks of one user's document, which is the rows `own`, one after another.

    Chunks are independent and may overlap. If the user has no more than `sequence_length` tokens,
    each chunk is the whole document.
    """
    if count < 1 or sequence_length < 2:
        raise InputError("give at least one chunk a user, of at least two tokens.")
    starts = rows.indptr[own]
    lengths = rows.indptr[own + 1] - starts
    # Row i begins at borders[i] of the document.
    borders = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    width = min(sequence_length, total)
    begins = rng.integers(0, total - width, size=count, endpoint=True)
    place = (begins[:, None] + np.arange(width)).reshape(-1)
    row = np.searchsorted(borders, place, side="right") - 1
    return TokenRows(
        tokens=rows.tokens[starts[row] + place - borders[row]],
        indptr=np.arange(count + 1, dtype=np.int64) * width,
        owners=np.repeat(np.asarray(rows.owners)[own[:1]], count),
        num_users=rows.num_users,
    )
