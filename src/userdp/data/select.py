"""Random chunks: training sequences drawn across a user's record boundaries.

For every user all records are one long document, and a chunk of the model's length begins anywhere
in it (Chua et al. 2024, Sec. 5.1). A chunk holds one user's tokens only. Where it begins depends
on the user's own data and fresh randomness, so a user's chunks cost what any other selection of
that user's data costs in user-wise DP-SGD.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from userdp.data.tokens import TokenRows, padded
from userdp.errors import InputError
from userdp.index import UserIndex


def random_chunks(
    rows: TokenRows,
    index: UserIndex,
    users: NDArray[np.int64],
    *,
    chunks_per_user: int,
    sequence_length: int,
    rng: np.random.Generator,
    pad_token: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Input ids and labels, `chunks_per_user` lines for each of `users`, in their order.

    A user with fewer tokens than `sequence_length` gives the whole document, padded. Chunks of one
    user are independent and may overlap.
    """
    if chunks_per_user < 1 or sequence_length < 2:
        raise InputError("give at least one chunk a user, of at least two tokens.")
    lines: list[NDArray[np.int32]] = []
    for user in users.tolist():
        own = index.rows_of(user)
        starts, ends = rows.indptr[own], rows.indptr[own + 1]
        # The user's document is the rows one after another; row i begins at borders[i] in it.
        lengths_of_rows = ends - starts
        borders = np.cumsum(lengths_of_rows) - lengths_of_rows
        total = int(lengths_of_rows.sum())
        last = max(0, total - sequence_length)
        for begin in rng.integers(0, last, size=chunks_per_user, endpoint=True).tolist():
            place = np.arange(begin, min(begin + sequence_length, total))
            row = np.searchsorted(borders, place, side="right") - 1
            lines.append(rows.tokens[starts[row] + place - borders[row]])
    lengths = np.asarray([len(line) for line in lines], np.int64)
    begins = np.cumsum(lengths) - lengths
    tokens = np.concatenate(lines) if lines else np.zeros(0, np.int32)
    return padded(tokens, begins, lengths, pad_token=pad_token)
