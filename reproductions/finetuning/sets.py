"""Sets that `prepare` wrote, and which of a user's rows take part.

Needs numpy and torch, and neither Arrow nor DuckDB.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from userdp.data.choose import Choice, ChosenRows, Contributions, contributions
from userdp.data.tokens import TokenRows
from userdp.evaluation import mean_losses
from userdp.streams import RunSecret
from userdp.units import SamplingUnit


def records_of(record_of_row: np.ndarray) -> np.ndarray | None:
    """The record of each row; None where `prepare --join` has made one document of them."""
    return record_of_row if record_of_row.any() else None


@dataclass(frozen=True)
class Set:
    """A prepared set: rows of training users and of held-out ones."""

    train: TokenRows
    test: TokenRows
    end: int
    kept: dict[int, np.ndarray]

    @classmethod
    def read(cls, path: Path) -> Set:
        """The file that `prepare` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}

        def part(name: str) -> TokenRows:
            return TokenRows(
                tokens=arrays[f"{name}_tokens"].astype(np.int32),
                indptr=arrays[f"{name}_indptr"],
                owners=arrays[f"{name}_owners"],
                num_users=int(arrays[f"{name}_num_users"]),
                records=records_of(arrays[f"{name}_record_of_row"]),
            )

        kept = {
            int(name.removeprefix("train_kept_")): value
            for name, value in arrays.items()
            if name.startswith("train_kept_")
        }
        return cls(part("train"), part("test"), int(arrays["end"]), kept)

    @property
    def has_several_owners(self) -> bool:
        """Whether records have several owners: then greedy bounding chose which are kept."""
        return bool(self.kept)

    def rows(self, k: int) -> TokenRows:
        """The rows that may take part if each owner has at most `k` records."""
        if not self.has_several_owners:
            return self.train
        chosen = self.kept[k]
        starts, lengths = self.train.indptr[chosen], np.diff(self.train.indptr)[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
        return TokenRows(
            tokens=self.train.tokens[places],
            indptr=indptr,
            owners=np.arange(len(chosen)),
            num_users=len(chosen),
        )

    def contributions(
        self,
        select: str,
        *,
        method: str,
        k: int,
        length: int,
        secret: RunSecret,
        losses: np.ndarray | None = None,
    ) -> Contributions:
        """What users give under a selection (Chua et al. 2024, Sec. 4.1 and 5.1).

        Where users are sampled ("uls"), rows are drawn anew at each step; otherwise once. `losses`
        score the records, for the perplexity criteria.
        """
        rows = self.rows(k)
        choice = Choice.of(select)
        if self.has_several_owners:
            assert choice == Choice(), "greedy bounding has chosen the records"
            return ChosenRows(rows=rows, chosen=rows.index())
        return contributions(
            rows,
            choice,
            unit=SamplingUnit.USER if method == "uls" else SamplingUnit.RECORD,
            group_size=k,
            sequence_length=length,
            streams=secret.streams("choose rows"),
            losses=losses if choice.needs_losses else None,
        )


def record_losses(base: nn.Module, found: Set) -> np.ndarray:
    """The mean loss of each training record under the public model.

    The data is public, and so are these numbers: nothing else would cover them.
    """
    rows = found.train
    assert rows.records is not None, "prepare the set without --join"
    number = int(rows.records.max()) + 1
    return mean_losses(base, rows, rows.records, num_records=number, pad_token=found.end)
