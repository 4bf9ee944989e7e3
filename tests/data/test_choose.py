"""Which rows each user gives, against a plain search by hand; and that nobody gives too many."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userdp.config.sections import DataSettings
from userdp.data.choose import Choice, Contributions, Select, contributions
from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.streams import RunSecret, Streams
from userdp.units import SamplingUnit

LENGTH = 4
Records = list[tuple[int, int]]

# Records as (owner, number of tokens), in the order of the data.
records_strategy = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 13)), max_size=14)
selects = st.sampled_from(list(Select))


def streams(seed: int = 0) -> Streams:
    return RunSecret.fixed_for_tests(seed).streams("choose rows")


def cut(records: Records, num_users: int = 4) -> TokenRows:
    """Rows of at most LENGTH tokens. Every token is the number of its owner and of its place."""
    tokens: list[int] = []
    lengths: list[int] = []
    owners: list[int] = []
    numbers: list[int] = []
    for number, (owner, size) in enumerate(records):
        text = [1000 * owner + 20 * number + place for place in range(size)]
        for begin in range(0, size, LENGTH):
            row = text[begin : begin + LENGTH]
            if len(row) > 1:
                tokens += row
                lengths.append(len(row))
                owners.append(owner)
                numbers.append(number)
    return TokenRows(
        tokens=np.array(tokens, np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=np.array(owners, np.int64),
        num_users=num_users,
        records=np.array(numbers, np.int64),
    )


def losses_of(records: Records) -> np.ndarray:
    """Made-up losses, some of them equal."""
    return np.array([(7 * size + 3 * i) % 5 for i, (_, size) in enumerate(records)], float)


def choose(
    records: Records,
    choice: Choice,
    *,
    unit: SamplingUnit = SamplingUnit.USER,
    group_size: int = 3,
    is_selected: bool = False,
) -> Contributions:
    return contributions(
        cut(records),
        choice,
        unit=unit,
        group_size=group_size,
        sequence_length=LENGTH,
        streams=streams(),
        losses=losses_of(records) if choice.needs_losses else None,
        is_selected=is_selected,
    )


def by_hand(records: Records, select: Select, user: int, k: int) -> list[tuple[int, ...]]:
    """The rows that a user keeps, by their tokens: one row a record in turn, best record first."""
    rows = cut(records)
    texts: dict[int, list[tuple[int, ...]]] = {}
    for row in range(len(rows)):
        if rows.owners[row] == user:
            text = tuple(rows.tokens[rows.indptr[row] : rows.indptr[row + 1]].tolist())
            texts.setdefault(int(rows.records[row]), []).append(text)  # type: ignore[index]
    losses = losses_of(records)
    worth = {
        Select.LONGEST: lambda r: -sum(map(len, texts[r])),
        Select.SHORTEST: lambda r: sum(map(len, texts[r])),
        Select.HIGHEST_PERPLEXITY: lambda r: -losses[r],
        Select.LOWEST_PERPLEXITY: lambda r: losses[r],
    }[select]
    best = sorted(sorted(texts), key=worth)
    kept: list[tuple[int, ...]] = []
    turn = 0
    while len(kept) < k and any(len(texts[r]) > turn for r in best):
        kept += [texts[r][turn] for r in best if len(texts[r]) > turn]
        turn += 1
    return kept[:k]


def texts_of(table: TokenRows, places: np.ndarray) -> list[tuple[int, ...]]:
    return [
        tuple(table.tokens[table.indptr[i] : table.indptr[i + 1]].tolist()) for i in places.tolist()
    ]


@given(
    records=records_strategy,
    select=st.sampled_from([s for s in Select if s not in (Select.RANDOM, Select.RANDOM_CHUNK)]),
    k=st.integers(1, 5),
)
def test_a_user_gives_the_rows_that_a_search_by_hand_finds(
    records: Records, select: Select, k: int
) -> None:
    for unit in SamplingUnit:
        chosen = choose(records, Choice(select=select), unit=unit, group_size=k)
        for user in range(4):
            table, places = chosen.read(chosen.index().rows_of(user), streams().rng(0))
            expected = by_hand(records, select, user, k)
            assert sorted(texts_of(table, places)) == sorted(expected)


@settings(max_examples=60)
@given(records=records_strategy, select=selects, resample=st.booleans(), k=st.integers(1, 5))
def test_sampled_users_give_at_most_k_rows_all_their_own_at_every_step(
    records: Records, select: Select, resample: bool, k: int
) -> None:
    chosen = choose(records, Choice(select=select, resample=resample), group_size=k)
    sampler = PoissonUsers(user_sampling_prob=1.0, group_size=k)
    for step in range(3):
        cohort = sampler.draw(chosen.index(), step, streams())
        assert len(cohort) == 4
        for user, group in enumerate(cohort):
            table, places = chosen.read(group, streams().rng(step, user + 1))
            given_by_user = texts_of(table, places)
            assert len(given_by_user) <= k
            has_any = any(owner == user for owner, _ in records)
            if resample and has_any:
                assert len(given_by_user) == k
            assert (len(given_by_user) > 0) == has_any
            assert all(2 <= len(text) <= LENGTH for text in given_by_user)
            assert all(token // 1000 == user for text in given_by_user for token in text)


@settings(max_examples=60)
@given(
    records=records_strategy,
    select=selects,
    resample=st.booleans(),
    k=st.integers(1, 5),
    is_selected=st.booleans(),
)
def test_sampled_records_form_at_most_k_groups_of_a_user(
    records: Records, select: Select, resample: bool, k: int, is_selected: bool
) -> None:
    chosen = choose(
        records,
        Choice(select=select, resample=resample),
        unit=SamplingUnit.RECORD,
        group_size=k,
        is_selected=is_selected and select is Select.RANDOM,
    )
    sampler = PoissonRecords(record_sampling_prob=1.0, group_size=k)
    index = chosen.index()
    if select is Select.RANDOM and not is_selected:
        index = sampler.limit_contributions(index, streams(1))
    groups = [0, 0, 0, 0]
    for group in sampler.draw(index, 0, streams()):
        table, places = chosen.read(group, streams().rng(0, int(group[0]) + 1))
        (text,) = texts_of(table, places)
        owners = {token // 1000 for token in text}
        assert len(owners) == 1
        groups[owners.pop()] += 1
    present = {owner for owner, _ in records}
    assert max(groups) <= k
    assert {user for user in range(4) if groups[user]} == present
    if resample:
        assert all(groups[user] == k for user in present)


@settings(max_examples=60)
@given(
    records=records_strategy,
    select=selects,
    resample=st.booleans(),
    unit=st.sampled_from(list(SamplingUnit)),
)
def test_without_a_user_the_others_give_the_same(
    records: Records, select: Select, resample: bool, unit: SamplingUnit
) -> None:
    choice = Choice(select=select, resample=resample)
    losses = losses_of(records)
    rest = [i for i, (owner, _) in enumerate(records) if owner != 0]
    whole = cut(records)
    assert whole.records is not None
    records_of_rows = whole.records

    def chosen(of: list[int]) -> Contributions:
        """The same rows, with the same tokens, of these records only."""
        keep = np.isin(records_of_rows, of)
        lengths = np.diff(whole.indptr)[keep]
        return contributions(
            TokenRows(
                tokens=whole.tokens[np.repeat(keep, np.diff(whole.indptr))],
                indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                owners=whole.owners[keep],
                num_users=4,
                records=np.searchsorted(of, records_of_rows[keep]),
            ),
            choice,
            unit=unit,
            group_size=3,
            sequence_length=LENGTH,
            streams=streams(),
            losses=losses[of] if choice.needs_losses else None,
        )

    with_user, without = chosen(list(range(len(records)))), chosen(rest)
    for user in (1, 2, 3):
        given_by_user = [
            texts_of(*side.read(side.index().rows_of(user), streams().rng(5, user)))
            for side in (with_user, without)
        ]
        assert given_by_user[0] == given_by_user[1]


def test_random_rows_and_chunks_are_redrawn_at_each_step_and_the_best_ones_are_not() -> None:
    records = [(0, 13)] * 6
    sampler = PoissonUsers(user_sampling_prob=1.0, group_size=2)
    for select in Select:
        chosen = choose(records, Choice(select=select), group_size=2)
        seen = set()
        for step in range(20):
            group = next(iter(sampler.draw(chosen.index(), step, streams())))
            seen.add(frozenset(texts_of(*chosen.read(group, streams().rng(step, 1)))))
        # 18 rows, or 75 places: 20 equal draws in a row have probability below 1e-40.
        assert (len(seen) > 1) == (select in (Select.RANDOM, Select.RANDOM_CHUNK))


def test_a_slot_reads_another_chunk_whenever_its_record_is_drawn() -> None:
    chosen = choose(
        [(0, 13), (0, 12)], Choice(select=Select.RANDOM_CHUNK), unit=SamplingUnit.RECORD
    )
    slot = chosen.index().rows_of(0)[:1]
    # The last token of the first record would be a row of one token, so it is in no row.
    document = [*range(12), *range(20, 32)]
    spans = {tuple(document[i : i + LENGTH]) for i in range(len(document) - LENGTH + 1)}
    seen = {texts_of(*chosen.read(slot, streams().rng(step, 1)))[0] for step in range(600)}
    # Each of the 21 places is missed with probability (20/21)^600 < 2e-13.
    assert seen == spans


def test_a_short_document_has_one_slot_unless_it_is_resampled() -> None:
    for resample, slots in ((False, [1, 2, 3, 0]), (True, [3, 3, 3, 0])):
        records = [(0, 3), (1, 3), (1, 2), (2, 40)]
        chosen = choose(records, Choice(select=Select.RANDOM_CHUNK, resample=resample))
        assert np.diff(chosen.index().indptr).tolist() == slots


def test_resampling_draws_every_row_alike() -> None:
    chosen = choose([(0, 2), (0, 3)], Choice(resample=True), group_size=4)
    counts = np.zeros(2)
    for step in range(2000):
        _, places = chosen.read(chosen.index().rows_of(0), streams().rng(step, 1))
        counts += np.bincount(places, minlength=2)
    # 8,000 fair draws: five standard deviations are 224, passed with probability below 1e-6.
    assert abs(counts[0] - 4000) < 224


def test_a_selection_fills_up_with_later_rows_only_where_a_user_has_few_records() -> None:
    records = [(0, 12), (0, 4), (0, 4), (1, 12)]
    chosen = choose(records, Choice(), unit=SamplingUnit.RECORD, is_selected=True)
    table, places = chosen.read(chosen.index().rows_of(0), streams().rng(0))
    assert [text[0] for text in texts_of(table, places)] == [0, 20, 40]
    table, places = chosen.read(chosen.index().rows_of(1), streams().rng(0))
    assert [text[0] - 1060 for text in texts_of(table, places)] == [0, 4, 8]


def test_the_configuration_knows_the_same_names() -> None:
    assert get_args(DataSettings.model_fields["select"].annotation) == tuple(Select)


def test_choices_without_a_guarantee_or_a_meaning_are_refused() -> None:
    usual = {"has_selection": False, "fixed_graph": False, "task": "causal"}
    for select in Select:
        Choice(select=select, resample=True).check(**usual)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown: use one of random, longest"):
        Choice.of("best")
    with pytest.raises(InputError, match="tokens_per_user=1: predicting takes at least 2"):
        Choice.of("random", tokens_per_user=1)
    lengths = Choice.of("random", tokens_per_user=9)
    assert lengths.name == "random, 9 tokens of each user"
    for choice in (Choice(select=Select.LONGEST), Choice(resample=True), lengths):
        with pytest.raises(InputError, match="records of one owner each"):
            choice.check(has_selection=True, fixed_graph=True, task="causal")
    with pytest.raises(InputError, match="both choose the records"):
        Choice.of("longest").check(has_selection=True, fixed_graph=False, task="causal")
    # As a ledger names them: with settings, and with a loss of one's own.
    for task in ("masked", "masked 0.15 4 [0, 2]", "masked 0.15 4 [0, 2], loss own 1f"):
        with pytest.raises(InputError, match="the task is 'masked': choose rows"):
            Choice.of("random-chunk").check(has_selection=False, fixed_graph=False, task=task)
    Choice.of("random-chunk").check(has_selection=False, fixed_graph=False, task="causal, loss f")
    Choice.of("longest").check(has_selection=False, fixed_graph=False, task="masked")
    rows = TokenRows(
        tokens=np.zeros(2, np.int32),
        indptr=np.array([0, 2]),
        owners=np.zeros(1, np.int64),
        num_users=1,
    )
    settings = {"unit": SamplingUnit.USER, "group_size": 1, "sequence_length": 2}
    with pytest.raises(InputError, match="which records they are from"):
        contributions(rows, Choice.of("longest"), streams=streams(), **settings)  # type: ignore[arg-type]
