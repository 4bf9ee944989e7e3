"""The rows that a run trains on: the store's records as tokens, bounded as the plan says."""

from __future__ import annotations

from typing import Any

import numpy as np

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.data.encoding import WHOLE_TEXT, Encoding
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise, tokenise_selected
from userdp.errors import InputError
from userdp.index import Rows
from userdp.plan import Plan


def rows_of(
    store: UserStore,
    tokenizer: Any,
    plan: Plan,
    selection: Selection | None,
    sequence_length: int,
    *,
    encoding: Encoding = WHOLE_TEXT,
) -> TokenRows:
    """The rows of the store, or of the selection if there is one, in a task's encoding."""
    plan.sampler.check_users(store.num_users)
    if selection is None:
        if plan.adjacency.fixed_graph:
            raise InputError(
                f"adjacency {plan.adjacency.value!r} needs a selection: bound contributions first."
            )
        return tokenise(
            store, tokenizer, sequence_length=sequence_length, encoding=encoding, verify=True
        )
    edges = Edges.load(store.path)
    selection.check(edges)
    if not plan.adjacency.fixed_graph:
        # Rows keep their owners. The sampler limits what each owner contributes, as without a
        # selection.
        selection.check_user_by_user(edges)
        return tokenise_selected(
            store,
            tokenizer,
            selection.records(),
            sequence_length=sequence_length,
            encoding=encoding,
            owners=store.sole_owners(),
            verify=True,
        )
    if plan.sampler.group_size < selection.realised_bound:
        raise InputError(
            f"the selection gives users up to {selection.realised_bound} records; the plan covers "
            f"{plan.sampler.group_size} under {plan.adjacency.value}. Plan for the selection, "
            "under fixed-graph adjacency."
        )
    return tokenise_selected(
        store,
        tokenizer,
        _records_of(selection, edges, plan),
        sequence_length=sequence_length,
        encoding=encoding,
        verify=True,
    )


def _records_of(selection: Selection, edges: Edges, plan: Plan) -> Rows:
    """The records to train on. In a fixed order, a record has one row, whenever it comes again."""
    if not plan.sampler.is_ordered:
        return selection.records()
    plan.sampler.check_order(*selection.participants(edges, plan.steps))
    assert selection.batches is not None
    return np.unique(selection.batches[: plan.steps])


def batches_of(rows: TokenRows, plan: Plan, selection: Selection | None) -> Rows | None:
    """The fixed order in numbers of rows, -1 where a record has no row; None if there is no order.

    A record without a token to predict keeps its slot, so all others stay where they are.
    """
    if not plan.sampler.is_ordered or selection is None:
        return None
    assert selection.batches is not None
    assert rows.records is not None
    # `records` is sorted, and each record has at most one row.
    records = np.asarray(rows.records)
    batches = selection.batches[: plan.steps].astype(np.int64)
    if not len(records):
        return np.full_like(batches, -1)
    row = np.minimum(np.searchsorted(records, batches), len(records) - 1)
    return np.where(records[row] == batches, row, -1)


def selection_name(store: UserStore, selection: Selection | None) -> str:
    """A keyed name, because it is private who owns how much."""
    if selection is None:
        return ""
    named = f"selection {selection.sha256()} {selection.order_sha256()}".rstrip()
    return store.keyed_digest(named.encode())
