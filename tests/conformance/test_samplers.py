"""The conformance suite of samplers, run on every registered one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from common_rules import (
    check_every_number_is_said,
    check_frozen,
    check_json,
    check_keys,
    check_named,
    check_words,
)
from part_examples import each, without_example

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.sampling import SAMPLERS, Cohort, MinSeparated, Sampler
from userdp.streams import RunSecret, Streams
from userdp.units import SamplingUnit

# Users with 1, 4, 2, 1, 3 rows, in mixed order.
OWNERS = [0, 1, 2, 1, 3, 4, 1, 2, 4, 1, 4] * 3
STEPS = 30


def streams(seed: int = 5) -> Streams:
    return RunSecret.fixed_for_tests(seed).streams("cohort")


def limited(part: Sampler, owners: list[int] = OWNERS) -> UserIndex:
    return part.limit_contributions(
        index_for(part, owners), RunSecret.fixed_for_tests(5).streams("limit")
    )


def index_for(part: Sampler, owners: list[int]) -> UserIndex:
    """The index of these owners, with batches where the sampler takes a fixed order.

    Users take turns, one a step, each with its rows one after another; a second slot is empty.
    """
    index = UserIndex.from_owners(owners)
    if not isinstance(part, MinSeparated):
        return index
    batches = np.full((part.steps, 2), -1)
    for step in range(part.steps if index.num_users else 0):
        turn, user = divmod(step, index.num_users)
        own = index.rows_of(user)
        batches[step, 0] = own[turn % len(own)]
    used = [np.intersect1d(index.rows_of(user), batches) for user in range(index.num_users)]
    kept = Cohort.of(used)
    return UserIndex(indptr=kept.indptr, rows=kept.rows, batches=batches)


def plain(cohort: Cohort) -> list[list[int]]:
    return [group.tolist() for group in cohort]


def test_every_registered_sampler_has_an_example() -> None:
    assert without_example(SAMPLERS) == []


@each(SAMPLERS)
def test_any_step_in_any_order_gives_the_same_cohort(part: Sampler) -> None:
    index = limited(part)
    in_order = [plain(part.draw(index, step, streams())) for step in range(STEPS)]
    for step in (STEPS - 1, 0, 7, 7, 3):
        # An equal sampler in another process, which has drawn nothing before.
        again = SAMPLERS.from_json(SAMPLERS.to_json(part))
        assert plain(again.draw(index, step, streams())) == in_order[step]


@each(SAMPLERS)
def test_cohorts_follow_step_and_secret_unless_everybody_is_in_or_nothing_is_drawn(
    part: Sampler,
) -> None:
    index = limited(part)
    if isinstance(part, MinSeparated):
        return
    cohorts = [plain(part.draw(index, step, streams())) for step in range(STEPS)]
    others = [plain(part.draw(index, step, streams(6))) for step in range(STEPS)]
    if all(len(rows) == index.num_rows for rows in map(sum, cohorts, [[]] * STEPS)):
        return
    assert len({str(cohort) for cohort in cohorts}) > 1
    assert cohorts != others


@each(SAMPLERS)
def test_drawing_leaves_the_index_as_it_is(part: Sampler) -> None:
    index = limited(part)
    before = index.rows.copy(), index.indptr.copy()
    part.draw(index, 0, streams())
    part.limit_contributions(index, streams())
    assert np.array_equal(index.rows, before[0])
    assert np.array_equal(index.indptr, before[1])


@each(SAMPLERS)
def test_no_user_enters_with_more_rows_than_the_group_size(part: Sampler) -> None:
    index, owner_of_row = limited(part), np.asarray(OWNERS)
    for step in range(STEPS):
        cohort = part.draw(index, step, streams())
        assert len(np.unique(cohort.rows)) == len(cohort.rows)
        assert np.bincount(owner_of_row[cohort.rows], minlength=5).max() <= part.group_size


@each(SAMPLERS)
def test_a_group_is_of_one_user_and_no_larger_than_stated(part: Sampler) -> None:
    index, owner_of_row = limited(part), np.asarray(OWNERS)
    for step in range(STEPS):
        groups = list(part.draw(index, step, streams()))
        owners = [set(owner_of_row[group].tolist()) for group in groups if len(group)]
        assert all(len(group) <= part.rows_in_a_group for group in groups)
        assert all(len(each) == 1 for each in owners)
        if part.unit is SamplingUnit.USER:
            # Each group is clipped on its own: a user in two of them would count twice.
            assert len(set.union(set(), *owners)) == len(owners)


@each(SAMPLERS)
def test_limiting_contributions_gives_no_user_other_rows_than_its_own(part: Sampler) -> None:
    whole, index = UserIndex.from_owners(OWNERS), limited(part)
    assert index.num_users == whole.num_users
    for user in range(whole.num_users):
        assert set(index.rows_of(user).tolist()) <= set(whole.rows_of(user).tolist())
    if part.unit is SamplingUnit.RECORD:
        assert int(np.diff(index.indptr).max()) <= part.group_size


@each(SAMPLERS)
def test_nobody_gives_empty_cohorts(part: Sampler) -> None:
    assert len(part.draw(limited(part, []), 0, streams())) == 0


@each(SAMPLERS)
def test_a_cohort_does_not_show_who_is_in_it(part: Sampler) -> None:
    assert repr(part.draw(limited(part), 2, streams())) == "Cohort(<secret>)"


@each(SAMPLERS)
def test_parameters_are_frozen_named_and_written_down(part: Sampler) -> None:
    check_frozen(part)
    check_json(SAMPLERS, part)
    check_named(SAMPLERS, part, unit=part.unit)
    check_keys(part)
    check_words(part)
    check_every_number_is_said(part)
    assert part.words


@each(SAMPLERS)
def test_groups_without_records_are_refused(part: Sampler) -> None:
    with pytest.raises(InputError, match="group_size"):
        replace(part, group_size=0)  # type: ignore[type-var]
