"""A fixed order: slots stay where they are, and what is used is counted again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiny import make_store
from userdp.bounding.edges import Edges
from userdp.bounding.min_sep import min_separation
from userdp.bounding.selection import Selection
from userdp.clipping.rules import FlatClip
from userdp.data.tokens import TokenRows
from userdp.digests.of_runs import index_digest
from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.plan import Plan
from userdp.sampling import MinSeparated, PublicNumbers
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.training.rows import batches_of, selection_name
from userdp.units import Adjacency

STREAMS = RunSecret.fixed_for_tests(0).streams("cohort")
SAMPLER = MinSeparated(separation=2, steps=4, group_size=2)
# Rows 0 to 5 belong to users 0 to 2, two each.
INDEX = UserIndex.from_owners([0, 1, 2, 0, 1, 2])


def with_batches(*batches: list[int]) -> UserIndex:
    return replace(INDEX, batches=np.array(batches))


def test_each_step_has_the_rows_of_its_batch_one_a_group() -> None:
    index = SAMPLER.limit_contributions(with_batches([0, 1], [2, -1], [3, 4], [-1, 5]), STREAMS)
    drawn = [[group.tolist() for group in SAMPLER.draw(index, t, STREAMS)] for t in range(4)]
    assert drawn == [[[0], [1]], [[2]], [[3], [4]], [[5]]]


def test_a_batch_of_empty_slots_is_an_empty_cohort() -> None:
    index = SAMPLER.limit_contributions(with_batches([0], [-1], [-1], [-1]), STREAMS)
    assert [len(SAMPLER.draw(index, t, STREAMS)) for t in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[0], [3], [1], [2]], "takes part again after 1 steps"),
        ([[0, 3], [-1, -1], [-1, -1], [-1, -1]], "takes part again after 0 steps"),
        ([[0], [1], [3]], "3 batches, and 4 steps"),
        ([[0], [7], [3], [4]], "rows that nobody owns"),
    ],
    ids=["too soon", "twice in a step", "too few", "foreign rows"],
)
def test_an_order_that_the_price_does_not_cover_is_refused(
    batches: list[list[int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SAMPLER.limit_contributions(with_batches(*batches), STREAMS)


def test_more_participations_than_priced_are_refused() -> None:
    sampler = MinSeparated(separation=1, steps=4, group_size=2)
    with pytest.raises(InputError, match="takes part in 3 steps, and group_size=2"):
        sampler.limit_contributions(with_batches([0], [3], [0], [2]), STREAMS)


def test_without_an_order_nothing_is_drawn() -> None:
    with pytest.raises(InputError, match="needs the batches in their order"):
        SAMPLER.limit_contributions(INDEX, STREAMS)
    with pytest.raises(InputError, match="no batch for step 4"):
        SAMPLER.draw(with_batches([0], [1], [2], [-1]), 4, STREAMS)


def plan_of(sampler: MinSeparated, **changes: Any) -> Plan:
    public = PublicNumbers(
        num_users=3, num_records=8, expected_groups=2, group_size=sampler.group_size, steps=4
    )
    settings: dict[str, Any] = {
        "adjacency": Adjacency.FIXED_GRAPH_ZERO_OUT,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
    }
    own = {"separation": sampler.separation}
    clip = FlatClip(clip_norm=1.0)
    return Plan.of(MinSeparated, public, own=own, clip=clip, **(settings | changes))


@pytest.mark.parametrize("adjacency", Adjacency)
def test_only_a_public_graph_has_a_price(adjacency: Adjacency) -> None:
    if adjacency.fixed_graph:
        assert plan_of(SAMPLER, adjacency=adjacency)
    else:
        with pytest.raises(InputError, match="no accounting rule"):
            plan_of(SAMPLER, adjacency=adjacency)


def test_a_private_step_counts_the_order_again_before_it_begins() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match="takes part again"):
        PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan_of(SAMPLER),
            with_batches([0], [3], [1], [2]),
            record_loss=lambda model, batch: model(batch["x"])[:, 0],
        )


def rows_of_records(records: list[int]) -> TokenRows:
    """One row for each of these records: the others have no token to predict."""
    return TokenRows(
        tokens=np.arange(2 * len(records), dtype=np.int32),
        indptr=np.arange(len(records) + 1, dtype=np.int64) * 2,
        owners=np.arange(len(records)),
        num_users=len(records),
        records=np.array(records, dtype=np.int64),
    )


@given(data=st.data())
def test_records_without_tokens_keep_their_slots_and_nobody_else_moves(data: st.DataObject) -> None:
    batches = np.array(data.draw(st.permutations(range(12)))).reshape(4, 3)
    kept = sorted(data.draw(st.sets(st.integers(0, 11))))
    selection = SimpleNamespace(batches=batches)
    found = batches_of(rows_of_records(kept), plan_of(SAMPLER), selection)  # type: ignore[arg-type]
    assert found is not None
    assert found.shape == batches.shape
    for slot, record in zip(found.reshape(-1), batches.reshape(-1), strict=True):
        assert (kept[slot] if slot >= 0 else None) == (record if record in kept else None)


@given(seed=st.integers(0, 2**32), separation=st.integers(1, 4))
def test_owners_are_counted_from_the_edges_as_brute_force_counts_them(
    seed: int, separation: int
) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.choice(30, size=rng.integers(1, 4), replace=False).tolist() for _ in range(60)]
    edges = Edges.from_lists(lists, num_users=30)
    try:
        found = min_separation(edges, steps=6, batch_size=2, separation=separation)
    except InputError:
        return
    selection = Selection.of(
        edges,
        found.multiplicity(60),
        9,
        method="min-separation",
        batches=found.batches,
        separation=separation,
    )
    users, steps = selection.participants(edges, 6)
    expected = sorted(
        (owner, step)
        for step, batch in enumerate(found.batches.tolist())
        for record in batch
        for owner in lists[record]
    )
    assert sorted(zip(users.tolist(), steps.tolist(), strict=True)) == expected
    most = int(np.bincount(users).max())
    sampler = MinSeparated(separation=separation, steps=6, group_size=most)
    sampler.check_order(users, steps)
    if most > 1:
        with pytest.raises(InputError, match="takes part in"):
            replace(sampler, group_size=most - 1).check_order(users, steps)


def test_another_order_of_the_same_records_has_other_noise(tmp_path: Path) -> None:
    """With the same noise, the difference of two runs would show what the records give.

    The noise follows the names in the ledger, and the index where the ledger does not name it.
    """
    store = make_store(tmp_path / "store", [1, 1, 1, 1])
    edges = Edges.load(store.path)

    def selected(batches: list[list[int]]) -> Selection:
        return Selection.of(
            edges,
            np.ones(4, dtype=np.int64),
            1,
            method="min-separation",
            batches=np.array(batches),
            separation=2,
        )

    orders = [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[0], [1], [2], [3]]]
    assert len({selection_name(store, selected(order)) for order in orders}) == 3
    assert len({index_digest(with_batches(*order)) for order in orders}) == 3
    assert index_digest(INDEX) not in {index_digest(with_batches(*order)) for order in orders}
