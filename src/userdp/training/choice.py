"""The choice of a run's rows: is it allowed here, what decides it, and what is it called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from userdp.data.choose import Choice, Contributions, Select, contributions, ranked_rows
from userdp.data.same_size import equally_long
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows
from userdp.digests.of_runs import index_digest
from userdp.evaluation import check_public, mean_losses
from userdp.index import Rows
from userdp.plan import Plan
from userdp.streams import Streams


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """Which rows take part in a run. Where losses decide, they are those before training."""

    rows: TokenRows
    choice: Choice
    plan: Plan
    losses: NDArray[np.float64] | None
    is_selected: bool
    batches: Rows | None
    sequence_length: int

    def __repr__(self) -> str:
        return f"RowChoice(<secret>, {self.choice.name!r})"

    @staticmethod
    def of(
        rows: TokenRows,
        choice: Choice,
        plan: Plan,
        model: nn.Module,
        tokenizer: Any,
        *,
        task: str,
        is_selected: bool,
        batches: Rows | None = None,
        sequence_length: int,
        dry_run: bool = False,
    ) -> RowChoice:
        """The choice, if it has a guarantee and a meaning here. A dry run scores nothing.

        `batches` are the rows of each step, where their order is fixed.
        `model` is the model before training: its losses rank records, so it must be public.
        """
        choice.check(has_selection=is_selected, fixed_graph=plan.adjacency.fixed_graph, task=task)
        if choice.tokens_per_user is not None:
            rows = equally_long(rows, choice.tokens_per_user)
        losses = None
        if choice.needs_losses:
            check_public(model)
            if not dry_run:
                losses = _losses(rows, model, tokenizer.pad_token_id)
        return RowChoice(
            rows=rows,
            choice=choice,
            plan=plan,
            losses=losses,
            is_selected=is_selected,
            batches=batches,
            sequence_length=sequence_length,
        )

    def name(self, store: UserStore) -> str:
        """The choice, for the ledger; if losses decide, with a keyed digest of what they decided.

        Elsewhere losses may be rounded in another way. A user who then gave other rows under the
        same noise would be exposed, so a run that goes on is held to the rows that it began with.
        """
        if self.losses is None:
            return self.choice.name
        group_size = self.plan.sampler.group_size
        index = ranked_rows(self.rows, self.choice, group_size=group_size, losses=self.losses)
        return f"{self.choice.name} {store.keyed_digest(index_digest(index).encode())}"

    @property
    def row_lengths(self) -> Rows | None:
        """How many tokens each row has; None where a slot reads any part of a user's text."""
        if self.choice.select is Select.RANDOM_CHUNK:
            return None
        return np.diff(self.rows.indptr)

    def contributions(self, streams: Streams) -> Contributions:
        """What each user may give, and what it reads when it is drawn."""
        return contributions(
            self.rows,
            self.choice,
            unit=self.plan.sampler.unit,
            group_size=self.plan.sampler.group_size,
            sequence_length=self.sequence_length,
            streams=streams,
            losses=self.losses,
            is_selected=self.is_selected,
            batches=self.batches,
        )


def _losses(rows: TokenRows, model: nn.Module, pad_token: int) -> NDArray[np.float64]:
    assert rows.records is not None
    number = int(rows.records.max(initial=-1)) + 1
    return mean_losses(model, rows, rows.records, num_records=number, pad_token=pad_token)
