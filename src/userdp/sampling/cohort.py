"""The groups that were drawn for one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from userdp.index import Rows, indptr_of


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The groups drawn at one step; each group's rows give one update. Secret: never logged."""

    indptr: Rows
    rows: Rows

    def __repr__(self) -> str:
        return "Cohort(<secret>)"

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __iter__(self) -> Iterator[Rows]:
        for start, stop in zip(self.indptr[:-1], self.indptr[1:], strict=True):
            yield self.rows[start:stop]

    @staticmethod
    def of(groups: list[Rows]) -> Cohort:
        """A cohort of the given groups."""
        sizes = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
        rows = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
        return Cohort(indptr=indptr_of(sizes), rows=rows)

    @staticmethod
    def of_single_rows(rows: Rows) -> Cohort:
        """A cohort in which every row is a group of its own."""
        return Cohort(indptr=np.arange(len(rows) + 1, dtype=np.int64), rows=rows)
