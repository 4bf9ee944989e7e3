"""Runs that promise nothing by choice: what they price, and what they really cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from dp_accounting.dp_event import GaussianDpEvent

from userdp import defaults
from userdp.accounting import accountant, events
from userdp.clipping.rules import FlatClip
from userdp.errors import InputError, LedgerError, UnaccountedPlanError
from userdp.history import History, merged
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.marked import epsilon_of
from userdp.prices.marks import AsIfPoisson, Hypothetical, RecordLevel
from userdp.prices.paid import Paid
from userdp.sampling import PublicNumbers, Shuffled
from userdp.units import Adjacency

DELTA = 1e-3


def records(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 60,
        "expected_batch_size": 30,
        "group_size": 3,
        "steps": 20,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "delta": DELTA,
        "mark": RecordLevel(),
    }
    return Plan.sample_records(**(settings | changes))


def users(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 1000,
        "expected_cohort_size": 20,
        "group_size": 3,
        "steps": 20,
        "clip_norm": 1.5,
        "noise_multiplier": 1.0,
        "delta": DELTA,
        "mark": Hypothetical(num_users=50_000, expected_groups=400),
    }
    return Plan.sample_users(**(settings | changes))


def poisson_epsilon(rate: float, noise: float, adjacency: Adjacency, steps: int = 20) -> float:
    event = events.poisson_users_gaussian(user_sampling_prob=rate, noise_multiplier=noise)
    return accountant.epsilon(events.repeated(event, steps), delta=DELTA, adjacency=adjacency)


def test_without_a_cap_a_record_is_priced_by_its_own_coin() -> None:
    plan = records(group_size=None, num_records=300)
    statement = plan.statement()
    expected = poisson_epsilon(30 / 300, 2.0, Adjacency.ADD_REMOVE)
    assert statement.record_level_epsilon == pytest.approx(expected)
    assert statement.epsilon == math.inf
    assert not plan.has_price
    assert "any number of records" in statement.sampler


def test_with_a_cap_a_record_may_take_anothers_place_and_is_priced_as_an_exchange() -> None:
    rate = 30 / 180
    capped = records().statement().record_level_epsilon
    assert capped == pytest.approx(poisson_epsilon(rate, 2.0, Adjacency.REPLACE))
    # What is zeroed out keeps its place, so the cap chooses the same records.
    zeroed = records(adjacency=Adjacency.ZERO_OUT).statement().record_level_epsilon
    assert zeroed == pytest.approx(poisson_epsilon(rate, 2.0, Adjacency.ZERO_OUT))
    assert capped is not None
    assert zeroed is not None
    assert zeroed < capped


def test_a_capped_run_still_has_its_price_at_user_level_for_the_budget() -> None:
    marked, plain = records(), records(mark=None)
    assert marked.event() == plain.event()
    assert marked.statement().epsilon == plain.statement().epsilon


def test_noise_is_calibrated_at_record_level() -> None:
    plan = records(noise_multiplier=None, epsilon=4.0)
    found = plan.statement()
    assert found.record_level_epsilon == pytest.approx(4.0, rel=1e-3)
    assert found.record_level_epsilon is not None
    assert found.record_level_epsilon <= 4.0
    assert found.epsilon > 6
    promised = records(mark=None, noise_multiplier=None, epsilon=4.0)
    assert plan.noise.noise_multiplier < promised.noise.noise_multiplier


def test_a_hypothetical_run_is_priced_with_its_numbers_and_noised_as_its_average() -> None:
    plan = users()
    # Noise on the average: z C / M' (McMahan et al. 2018, Sec. 3).
    assert plan.noise_stddev / plan.divisor == pytest.approx(1.0 * 1.5 / 400)
    found = plan.statement()
    expected = poisson_epsilon(400 / 50_000, 1.0, Adjacency.ADD_REMOVE)
    assert found.hypothetical_epsilon == pytest.approx(expected)
    real = poisson_epsilon(20 / 1000, 20 / 400, Adjacency.ADD_REMOVE)
    assert found.epsilon == pytest.approx(real)
    assert plan.event() == users(mark=None, noise_multiplier=0.05).event()


def test_more_users_alone_keep_the_real_cohort() -> None:
    # Charles et al. 2024, Fig. 8.
    plan = users(mark=Hypothetical(num_users=10_000, expected_groups=20))
    assert plan.noise.noise_multiplier == 1.0
    expected = poisson_epsilon(20 / 10_000, 1.0, Adjacency.ADD_REMOVE)
    assert plan.statement().hypothetical_epsilon == pytest.approx(expected)


def test_the_numbers_of_mcmahan_2018_table_2_come_out() -> None:
    plan = Plan.sample_users(
        num_users=763_430,
        expected_cohort_size=100,
        group_size=1,
        steps=5000,
        clip_norm=15.0,
        noise_multiplier=1.0,
        delta=1e-9,
        mark=Hypothetical(num_users=763_430, expected_groups=5000),
    )
    assert plan.noise_stddev / plan.divisor == pytest.approx(0.003)
    found = plan.statement()
    # 4.634 by the moments accountant of 2018, 3.90 exactly.
    assert found.hypothetical_epsilon == pytest.approx(3.90, abs=0.01)
    assert found.epsilon > 10_000


@pytest.mark.parametrize("plan", [records(), records(group_size=None, num_records=300), users()])
def test_a_marked_plan_survives_its_json_and_an_unmarked_one_is_written_as_before(
    plan: Plan,
) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert "mark" in plan.to_json()
    assert "mark" not in users(mark=None).to_json()


def test_a_mark_that_nobody_knows_is_refused() -> None:
    for mark in ({"type": "Other"}, {"type": "RecordLevel", "x": 1}, {}, "RecordLevel"):
        with pytest.raises(LedgerError):
            Plan.from_json(users().to_json() | {"mark": mark})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: users(mark=RecordLevel()), "one by one"),
        (lambda: records(group_size=None, num_records=300, mark=None), "any number of records"),
        (lambda: records(group_size=None), "num_records"),
        (lambda: records(non_private=True), "claims nothing"),
        (lambda: records(adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT), "kept several times"),
        (lambda: users(mark=Hypothetical(num_users=100, expected_groups=400)), "not a probability"),
        (lambda: Hypothetical(num_users=1, expected_groups=4), "at least 2"),
        (lambda: Hypothetical(num_users=100, expected_groups=math.nan), "at least 1"),
    ],
)
def test_what_has_no_price_under_a_mark_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def entry(plan: Plan, steps: int = 5) -> Earlier:
    return Earlier(
        run="a" * 64,
        data="",
        plan=plan.to_json(),
        event=plan.event(steps) if plan.has_price else None,
        steps=steps,
        adjacency=plan.adjacency,
        fixed_seed=False,
    )


def test_a_promise_after_a_marked_run_counts_what_that_run_really_cost() -> None:
    plan = users(mark=None, noise_multiplier=2.0)
    before = entry(users())
    plan.check_paid([], earlier=[before])
    found = plan.statement(earlier=[before])
    assert found.guarantee
    assert found.epsilon > 5 * plan.statement().epsilon
    unbounded = entry(records(group_size=None, num_records=300))
    with pytest.raises(UnaccountedPlanError, match="without privacy"):
        plan.check_paid([], earlier=[unbounded])


def test_a_run_that_chose_its_rows_has_no_price_by_the_record() -> None:
    # Resampled, the one record of a user is three groups, each with a coin of its own.
    plan = records()
    chose = replace(entry(plan, steps=20), chose_rows=True)
    assert Earlier.from_json(chose.to_json()) == chose
    with pytest.raises(UnaccountedPlanError, match="chose its rows"):
        plan.check_paid([], earlier=[chose])
    records(mark=None).check_paid([], earlier=[replace(chose, plan=records(mark=None).to_json())])


@pytest.mark.parametrize(
    ("bound_to", "expected"),
    [
        ({}, False),
        ({"select": "random", "selection": ""}, False),
        ({"select": "random, resampled", "selection": ""}, True),
        ({"select": "longest", "selection": ""}, True),
        ({"select": "random", "selection": "a keyed name"}, True),
    ],
)
def test_a_models_history_says_whether_its_rows_were_chosen(
    bound_to: dict[str, str], expected: bool
) -> None:
    ledger = Ledger.create(records(), bound_to=bound_to, fixed_seed=False)
    ledger.charge_step()
    found = ledger.as_entry()
    assert found is not None
    assert Earlier.from_json(found).chose_rows is expected


@pytest.mark.parametrize("is_first", [True, False])
def test_that_rows_were_chosen_is_not_lost_where_an_older_file_is_silent(is_first: bool) -> None:
    # An adapter and its base tell of the same run; one of them was written before this was named.
    silent = entry(records(), steps=20).to_json()
    told = [History(entries=(silent | {"chose_rows": True},)), History(entries=(silent,))]
    (found,) = merged(*told if is_first else reversed(told)).entries
    with pytest.raises(UnaccountedPlanError, match="chose its rows"):
        records().check_paid([], earlier=[Earlier.from_json(found)])


def test_earlier_runs_are_priced_by_the_same_mark() -> None:
    plan = records(group_size=None, num_records=300)
    plan.check_paid([], earlier=[entry(plan, steps=20)])
    both = plan.statement(earlier=[entry(plan, steps=20)])
    expected = poisson_epsilon(0.1, 2.0, Adjacency.ADD_REMOVE, steps=40)
    assert both.record_level_epsilon == pytest.approx(expected)
    # A user's mean may turn round when one record is left out: it has no price by the record.
    with pytest.raises(UnaccountedPlanError, match="one by one"):
        plan.check_paid([], earlier=[entry(users(mark=None))])
    twice = users().statement(earlier=[entry(users(), steps=20)])
    assert twice.hypothetical_epsilon == pytest.approx(
        poisson_epsilon(400 / 50_000, 1.0, Adjacency.ADD_REMOVE, steps=40)
    )


def test_a_look_behind_the_weights_has_no_price_by_the_record_either() -> None:
    plan = records(group_size=None, num_records=300)
    look = Paid(what="group size", event=GaussianDpEvent(8.0))
    before = replace(entry(plan, steps=20), paid=(look,))
    with pytest.raises(UnaccountedPlanError, match="none for single records"):
        plan.check_paid([], earlier=[before])
    # At user level it has one.
    at_user_level = records(mark=None)
    looked = replace(entry(at_user_level), paid=(look,))
    at_user_level.check_paid([], earlier=[looked])


def test_a_look_at_users_has_no_price_by_the_record() -> None:
    ledger = Ledger.create(records(), bound_to={}, fixed_seed=False)
    with pytest.raises(UnaccountedPlanError, match="none for single records"):
        ledger.charge(GaussianDpEvent(9.0), what="x")


def shuffled(**changes: Any) -> Plan:
    public = PublicNumbers(
        num_users=100, num_records=300, expected_groups=20, group_size=3, steps=20
    )
    settings: dict[str, Any] = {
        "clip": FlatClip(clip_norm=1.0),
        "noise_multiplier": 2.0,
        "delta": DELTA,
    }
    return Plan.of(Shuffled, public, **(settings | changes))


def test_shuffled_batches_are_planned_with_their_mark_and_no_other() -> None:
    plan = shuffled()
    assert plan.mark == AsIfPoisson()
    assert not plan.has_price
    assert plan.epsilon() == math.inf
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        replace(plan, mark=None)
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        shuffled(mark=Hypothetical(num_users=1000, expected_groups=20))
    with pytest.raises(UnaccountedPlanError, match="priced as it is drawn"):
        users(mark=AsIfPoisson())
    assert shuffled(noise_multiplier=0.0, non_private=True).mark is None


def test_the_epsilon_of_shuffled_batches_is_that_of_poisson_sampling_and_is_not_promised() -> None:
    statement = shuffled().statement()
    expected = poisson_epsilon(0.2, 2.0, Adjacency.ADD_REMOVE)
    assert statement.as_if_epsilon == pytest.approx(expected)
    assert not statement.guarantee
    assert statement.promise == ""
    assert str(statement).startswith("guarantee: none, the batches were shuffled")
    assert statement.to_json()["epsilon"] is None
    assert statement.to_json()["planned_epsilon"] is None
    # A target is met by that number.
    plan = shuffled(noise_multiplier=None, epsilon=3.0)
    assert plan.statement().as_if_epsilon == pytest.approx(3.0, rel=1e-3)


def test_the_usual_delta_is_for_the_hypothetical_people() -> None:
    # With that of the real ones any noise would do: a user of a million is hardly ever drawn.
    wanted: dict[str, Any] = {"noise_multiplier": None, "epsilon": 8.0, "delta": None}
    mark = Hypothetical(num_users=1_000_000, expected_groups=20)
    plan = users(mark=mark, num_users=73, **wanted)
    assert plan.delta == defaults.delta(1_000_000)
    epsilon = epsilon_of(plan, plan.steps)
    assert epsilon == pytest.approx(8.0, rel=1e-3)
    assert plan.noise.noise_multiplier > 0.2
    assert users(mark=None, num_users=73, **wanted).delta == defaults.delta(73)


def test_a_delta_that_protects_none_of_the_hypothetical_people_is_said() -> None:
    mark = Hypothetical(num_users=1_000_000, expected_groups=20)
    found = users(mark=mark, delta=1e-5).cautions()
    assert any("publishing one user's data outright" in caution for caution in found)
    assert not users(mark=mark, delta=1e-6).cautions()
