"""The rows that a run trains on: the store's records as tokens, bounded as the plan says."""

from __future__ import annotations

from typing import Any

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.data.encoding import WHOLE_TEXT, Encoding
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise, tokenise_selected
from userdp.errors import InputError
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
        selection.records(),
        sequence_length=sequence_length,
        encoding=encoding,
        verify=True,
    )


def selection_name(store: UserStore, selection: Selection | None) -> str:
    """A keyed name, because it is private who owns how much."""
    if selection is None:
        return ""
    return store.keyed_digest(f"selection {selection.sha256()}".encode())
