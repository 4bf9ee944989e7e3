"""What the selections of Chua et al. 2024 select, on made-up records."""

from __future__ import annotations

import numpy as np
import pytest

from finetuning_sets import made_up
from reproductions.finetuning import selections
from reproductions.finetuning.sets import Set
from userdp.data.choose import record_lengths
from userdp.streams import RunSecret

STREAMS = RunSecret.fixed_for_tests(0).streams("choose rows")


def losses_of(rows: object, seed: int = 0) -> np.ndarray:
    records = np.asarray(getattr(rows, "records", None))
    return np.random.default_rng(seed).uniform(1, 5, size=int(records.max()) + 1)


@pytest.mark.parametrize("select", ["random", "longest", "lowest-perplexity"])
def test_nobody_has_more_than_k_records_and_those_are_the_best(select: str) -> None:
    rows = made_up(0)
    losses, lengths = losses_of(rows), record_lengths(rows)
    records, owners = selections.selected_records(rows, select, losses, k=2, streams=STREAMS)
    assert len(set(records.tolist())) == len(records)
    of_record = dict(zip(np.asarray(rows.records).tolist(), rows.owners.tolist(), strict=True))
    for user in range(rows.num_users):
        own = [record for record, owner in of_record.items() if owner == user]
        kept = records[owners == user].tolist()
        assert len(kept) == min(2, len(own))
        assert set(kept) <= set(own)
        if select == "longest":
            assert sorted(lengths[kept]) == sorted(sorted(lengths[own])[-2:])
        if select == "lowest-perplexity":
            assert sorted(losses[kept]) == sorted(sorted(losses[own])[:2])


def test_resampled_every_user_weighs_the_same() -> None:
    # User 0 has one record of 10 tokens, user 1 has two of 20.
    records, owners = np.array([0, 1, 2]), np.array([0, 1, 1])
    lengths, losses = np.array([10.0, 20.0, 20.0]), np.log([2.0, 4.0, 4.0])
    plain = selections.describe(records, owners, lengths, losses, k=None)
    equal = selections.describe(records, owners, lengths, losses, k=10)
    assert plain["mean_length"] == pytest.approx(50 / 3)
    assert equal["mean_length"] == pytest.approx(15)
    assert equal["mean_perplexity"] == pytest.approx(3)
    assert equal["share_below_longest"] == 1.0


def test_the_papers_own_numbers_agree_with_themselves_and_a_turned_order_does_not() -> None:
    enron = {
        name: dict(zip(selections.STATISTICS, values, strict=True))
        for name, values in selections.TABLE_7["Enron Email"].items()
    }
    for statistic in selections.STATISTICS:
        found = selections.agreement(enron, statistic)
        assert found["ordered_alike"]["Enron Email"] == "10 of 10"
        assert found["against_both"] == []
    # Enron and BookSum differ in one pair of lengths: random and lowest perplexity.
    lengths = selections.agreement(enron, "mean_length")
    assert lengths["ordered_alike"]["BookSum"] == "9 of 10"
    assert lengths["where_both_agree"] == "9 of 9"
    turned = {name: {k: -v for k, v in told.items()} for name, told in enron.items()}
    found = selections.agreement(turned, "mean_perplexity")
    assert found["ordered_alike"] == {"Enron Email": "0 of 10", "BookSum": "0 of 10"}
    assert len(found["against_both"]) == 10


def test_the_table_has_both_ways_of_counting_and_some_users_are_the_first() -> None:
    found = Set(made_up(0), made_up(1), 0, {})
    few = selections.some_users(found, 5)
    assert few.train.num_users == 5
    assert set(few.train.owners.tolist()) <= set(range(5))
    assert selections.some_users(found, None) is found
    told = selections.table_7(few.train, losses_of(few.train), k=2)
    assert set(told) == {"resampled", "not resampled"}
    for way in told.values():
        perplexity = {name: row["mean_perplexity"] for name, row in way["selections"].items()}
        assert max(perplexity, key=lambda name: perplexity[name]) == "highest-perplexity"
        length = {name: row["mean_length"] for name, row in way["selections"].items()}
        assert length["shortest"] < length["longest"]
