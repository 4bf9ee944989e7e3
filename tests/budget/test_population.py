"""One budget per population: exact composition, a limit that holds, and nothing forgotten."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from cli_runner import python
from store_copies import COPIES
from stores import KEY, sentences
from userdp import (
    Adjacency,
    BudgetExhaustedError,
    InputError,
    Ledger,
    Plan,
    Population,
    UserStore,
)
from userdp.accounting import events
from userdp.budget.spending import FIXED_SEED, NEW_START, NOT_PRIVATE
from userdp.data import split
from userdp.data.store import write_store
from userdp.errors import LedgerError
from userdp.files.chain import Row
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid

DELTA = 1e-5
MANY = events.poisson_users_gaussian(user_sampling_prob=0.02, noise_multiplier=1.0)
FEW = events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=3.0)
LOOK = dp_event.GaussianDpEvent(8.0)


@pytest.fixture
def store(tmp_path: Path) -> UserStore:
    return make(tmp_path / "store")


def make(place: Path) -> UserStore:
    def write(out: Path) -> None:
        write_store(sentences(users=6, records_per_user=2, seed=1, prefix="a"), out, key=KEY)

    COPIES.make("six users of the population's tests", place, write)
    return UserStore.open(place)


def reserve(population: Population, run: str, event: Any, steps: int, **options: Any) -> None:
    """Reserve a run of `steps` times `event`; None: a run without privacy."""
    population.reserve(
        run=run,
        what=f"training, {steps} steps",
        where=f"runs/{run}",
        event=None if event is None else events.repeated(event, steps),
        steps=steps,
        **{"adjacency": Adjacency.ADD_REMOVE} | options,
    )


def library(*parts: tuple[dp_event.DpEvent, int]) -> float:
    """What another accountant says of all events together."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for event, count in parts:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(DELTA))


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def spent(population: Population) -> float:
    found = population.spent(DELTA).epsilon
    assert found is not None
    return found


def test_nothing_is_spent_and_nothing_written_by_looking(store: UserStore) -> None:
    population = Population.of(store)
    assert population.spent().epsilon == 0.0
    assert (population.limit, population.id, population.entries(DELTA)) == (None, None, [])
    assert not population.path.exists()


def test_runs_a_fork_a_continued_run_and_a_look_compose_exactly(store: UserStore) -> None:
    population = Population.of(store)
    entry = population.debit("records per user, private median", LOOK, Adjacency.ADD_REMOVE)
    look = Paid(what="records per user, private median", event=LOOK, entry=entry)
    reserve(population, "first", MANY, 200, paid=[look])
    population.settle("first", 200, events.repeated(MANY, 200))
    reserve(population, "second", FEW, 50)
    # A fork of the first after 100 steps takes 100 of its own.
    reserve(population, "fork", MANY, 100)
    # The second goes on for 30 steps.
    reserve(population, "second", FEW, 80)
    population.settle("second", 80, events.repeated(FEW, 80))
    expected = library((LOOK, 1), (MANY, 200), (FEW, 80), (MANY, 100))
    assert spent(population) == pytest.approx(expected, rel=1e-3)
    entries = population.entries(DELTA)
    assert [entry["run"] for entry in entries] == [None, "first", "second", "fork"]
    alone = {entry["run"]: entry["epsilon"] for entry in entries}
    assert alone["fork"] == pytest.approx(library((MANY, 100)), rel=1e-3)
    assert sum(alone.values()) > spent(population) * 1.01, "events are composed, not epsilons"


def test_other_processes_and_paths_see_the_same_budget(store: UserStore, tmp_path: Path) -> None:
    reserve(Population.of(store), "first", MANY, 10)
    (tmp_path / "link").symlink_to(store.path)
    linked = Population.of(UserStore.open(tmp_path / "link"))
    reserve(linked, "second", MANY, 10)
    assert len(Population.of(store).entries(DELTA)) == 2
    assert not (tmp_path / "link.population").exists()


DEBITS = """
import sys
from dp_accounting import dp_event
from userdp import Adjacency, Population, UserStore
population = Population.of(UserStore.open(sys.argv[1]))
for _ in range(5):
    population.debit(sys.argv[2], dp_event.GaussianDpEvent(50.0), Adjacency.ADD_REMOVE)
"""


def test_a_debit_of_another_process_is_counted(store: UserStore) -> None:
    population = Population.of(store)
    population.debit("ours", LOOK, Adjacency.ADD_REMOVE)
    assert python(DEBITS, store.path, "theirs").returncode == 0
    assert [entry["what"] for entry in population.entries(DELTA)] == ["ours", *["theirs"] * 5]


@pytest.mark.slow
def test_a_hundred_equal_runs_are_one_part(
    store: UserStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = Population.of(store)
    for number in range(100):
        reserve(population, f"run {number}", MANY, 10)
    from userdp.accounting import accountant

    seen: list[dp_event.DpEvent] = []
    real = accountant.evaluate

    def evaluate(event: dp_event.DpEvent, **options: Any) -> Any:
        seen.append(event)
        return real(event, **options)

    monkeypatch.setattr(accountant, "evaluate", evaluate)
    assert spent(population) == pytest.approx(library((MANY, 1000)), rel=1e-3)
    assert seen == [events.repeated(MANY, 1000)]
    assert len({entry["epsilon"] for entry in population.entries(DELTA)}) == 1
    assert len(seen) == 2, "equal releases are priced once"


def test_a_resumed_run_is_counted_once(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100, paid=[Paid(what="tuning", event=LOOK)])
    before = contents(population.path)
    reserve(population, "first", MANY, 100, paid=[Paid(what="tuning", event=LOOK)])
    reserve(population, "first", MANY, 60, paid=[Paid(what="tuning", event=LOOK)])
    assert contents(population.path) == before
    assert spent(population) == pytest.approx(library((MANY, 100), (LOOK, 1)), rel=1e-3)


def test_two_equal_looks_of_one_run_are_two(store: UserStore) -> None:
    population = Population.of(store)
    looks = [Paid(what="tuning", event=LOOK)] * 2
    for _ in range(2):
        reserve(population, "first", MANY, 100, paid=looks)
    assert spent(population) == pytest.approx(library((MANY, 100), (LOOK, 2)), rel=1e-3)


def test_settling_counts_the_steps_taken_and_resuming_the_plan_again(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100)
    assert population.entries(DELTA)[0]["is_planned"]
    population.settle("first", 40, events.repeated(MANY, 40))
    assert spent(population) == pytest.approx(library((MANY, 40)), rel=1e-3)
    before = contents(population.path)
    population.settle("first", 40, events.repeated(MANY, 40))
    assert contents(population.path) == before
    reserve(population, "first", MANY, 100)
    assert spent(population) == pytest.approx(library((MANY, 100)), rel=1e-3)


@pytest.mark.parametrize("make_plan", [Plan.sample_users, Plan.sample_records])
def test_a_plan_settles_at_the_steps_of_its_ledger(
    store: UserStore, make_plan: Callable[..., Plan]
) -> None:
    users = make_plan == Plan.sample_users
    plan = make_plan(
        num_users=100,
        group_size=2,
        steps=20,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=DELTA,
        **{"expected_cohort_size" if users else "expected_batch_size": 10},
    )
    ledger = Ledger.create(plan, bound_to={}, fixed_seed=False)
    population = Population.of(store)
    population.reserve(
        run=ledger.run_digest,
        what="training",
        where="run",
        event=plan.event(),
        steps=plan.steps,
        adjacency=plan.adjacency,
        fixed_seed=ledger.fixed_seed,
    )
    assert spent(population) == pytest.approx(plan.epsilon(), rel=1e-9)
    population.settle(ledger.run_digest, 5, plan.event(5))
    assert spent(population) == pytest.approx(plan.epsilon(5), rel=1e-9)


@pytest.mark.parametrize("event", [MANY, None])
def test_a_run_that_goes_on_beyond_its_plan_is_counted_again(
    store: UserStore, event: dp_event.DpEvent | None
) -> None:
    population = Population.of(store)
    reserve(population, "first", event, 100)
    reserve(population, "first", event, 130)
    assert population.entries(DELTA)[0]["steps"] == 130
    population.settle("first", 120, None if event is None else events.repeated(event, 120))
    assert [entry["steps"] for entry in population.entries(DELTA)] == [120]


def test_more_steps_than_planned_are_counted_and_refused(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100)
    with pytest.raises(LedgerError, match="took 101 steps, and 100 were counted"):
        population.settle("first", 101, events.repeated(MANY, 101))
    assert spent(population) == pytest.approx(library((MANY, 101)), rel=1e-3)


def test_settling_never_makes_it_larger(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100)
    planned = spent(population)
    # Fewer steps of another kind, or without a price, are not surely less.
    dear = events.poisson_users_gaussian(user_sampling_prob=0.5, noise_multiplier=0.5)
    for event in (events.repeated(dear, 99), events.repeated(MANY, 150), None):
        population.settle("first", 99, event)
        assert spent(population) == planned
    with pytest.raises(LedgerError, match="no run other"):
        population.settle("other", 1, events.repeated(MANY, 1))


def test_settling_at_no_step_frees_the_run_and_not_what_it_paid_for(store: UserStore) -> None:
    population = Population.of(store)
    with pytest.raises(LedgerError, match="no run first"):
        population.settle("first", 0, None)
    reserve(population, "first", MANY, 100, paid=[Paid(what="tuning", event=LOOK)])
    population.settle("first", 0, None)
    assert [entry["what"] for entry in population.entries(DELTA)] == ["tuning"]
    assert spent(population) == pytest.approx(library((LOOK, 1)), rel=1e-3)


def test_more_noise_in_a_single_gaussian_is_less(store: UserStore) -> None:
    population = Population.of(store)
    options: dict[str, Any] = {"what": "a", "where": "", "adjacency": Adjacency.ADD_REMOVE}
    population.reserve(run="r", event=dp_event.GaussianDpEvent(1.0), steps=8, **options)
    population.settle("r", 2, dp_event.GaussianDpEvent(2.0))
    assert spent(population) == pytest.approx(library((dp_event.GaussianDpEvent(2.0), 1)), rel=1e-3)


def test_one_digest_with_other_steps_is_refused(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100)
    before = contents(population.path)
    with pytest.raises(LedgerError, match="with other steps than it now plans"):
        reserve(population, "first", FEW, 100)
    assert contents(population.path) == before


def test_a_release_past_the_limit_is_refused_and_nothing_is_written(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 200)
    limit = library((MANY, 200), (MANY, 200)) * 1.001
    population.set_limit(limit, DELTA)
    before = contents(population.path)
    with pytest.raises(BudgetExhaustedError, match=r"epsilon=1\.\d+ is spent .* raise the limit"):
        reserve(population, "second", MANY, 220)
    with pytest.raises(BudgetExhaustedError, match=r"would bring it to inf.* No limit holds"):
        reserve(population, "second", None, 1)
    with pytest.raises(BudgetExhaustedError, match="this look"):
        population.debit("a look", dp_event.GaussianDpEvent(0.5), Adjacency.ADD_REMOVE)
    with pytest.raises(BudgetExhaustedError):
        reserve(population, "first", MANY, 420)
    with pytest.raises(BudgetExhaustedError):
        reserve(population, "third", MANY, 200, paid=[Paid(what="tuning", event=LOOK)])
    assert contents(population.path) == before
    # What is counted already may go on, and what fits may begin.
    reserve(population, "first", MANY, 200)
    reserve(population, "second", MANY, 200)
    population.set_limit(limit * 2, DELTA)
    reserve(population, "third", MANY, 200)
    assert len(population.entries(DELTA)) == 3


def test_a_run_can_be_checked_before_it_has_a_directory(store: UserStore) -> None:
    population = Population.of(store)
    plan: dict[str, Any] = {"steps": 200, "adjacency": Adjacency.ADD_REMOVE}
    plan["event"] = events.repeated(MANY, 200)
    population.check(**plan)
    assert not population.path.exists()
    population.set_limit(library((MANY, 200)) * 1.001, DELTA)
    before = contents(population.path)
    population.check(**plan)
    for options in (
        {"paid": [Paid(what="tuning", event=LOOK)]},
        {"earlier": [earlier("elsewhere")]},
        {"event": None},
    ):
        with pytest.raises(BudgetExhaustedError):
            population.check(**plan | options)
    with pytest.raises(InputError, match="at least one step"):
        population.check(**plan | {"steps": 0})
    assert contents(population.path) == before


def test_the_latest_limit_holds_and_wrong_ones_are_refused(store: UserStore) -> None:
    population = Population.of(store)
    for epsilon, delta in ((0.0, 1e-6), (-1.0, 1e-6), (math.nan, 1e-6), (math.inf, 1e-6)):
        with pytest.raises(InputError, match="epsilon"):
            population.set_limit(epsilon, delta)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(InputError, match="delta"):
            population.set_limit(1.0, delta)
    assert not population.path.exists()
    population.set_limit(8.0, 1e-6)
    population.set_limit(2.0, 1e-7)
    limit = population.limit
    assert limit is not None
    assert (limit.epsilon, limit.delta) == (2.0, 1e-7)
    assert population.spent().delta == 1e-7


def test_other_adjacencies_cannot_be_added_up(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 100)
    reserve(population, "second", MANY, 100, adjacency=Adjacency.REPLACE)
    found = population.spent(DELTA)
    assert found.epsilon is None
    assert "add-remove (epsilon=1" in found.problems[0]
    assert "cannot be added up" in found.problems[0]
    words, together = population.others("first", DELTA, Adjacency.ADD_REMOVE)
    assert together == math.inf
    assert any("cannot be added up" in one for one in words)


def test_with_a_limit_another_adjacency_is_wrong_input(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 10)
    population.set_limit(100.0, DELTA)
    before = contents(population.path)
    with pytest.raises(InputError, match="cannot be added up"):
        reserve(population, "second", MANY, 1, adjacency=Adjacency.REPLACE)
    assert contents(population.path) == before


def test_a_run_without_privacy_leaves_no_epsilon(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", None, 10)
    reserve(population, "second", MANY, 10)
    found = population.spent(DELTA)
    assert (found.epsilon, found.problems) == (math.inf, (NOT_PRIVATE,))
    assert population.entries(DELTA)[0]["epsilon"] == math.inf
    population.settle("first", 3, None)
    population.settle("first", 0, None)
    assert population.entries(DELTA)[0]["steps"] == 3
    assert population.spent(DELTA).epsilon == math.inf


def test_a_run_without_privacy_that_took_no_step_costs_nothing(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", None, 10)
    reserve(population, "second", MANY, 10)
    population.settle("first", 0, None)
    assert spent(population) == pytest.approx(library((MANY, 10)), rel=1e-3)
    reserve(population, "third", None, 10)
    population.settle("third", 3, None)
    # What was settled is not settled for less: a ledger may have been cut since.
    population.settle("third", 0, None)
    assert population.spent(DELTA).epsilon == math.inf


def test_a_fixed_seed_and_doubts_are_cautions(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 10, fixed_seed=True)
    assert population.spent(DELTA).cautions == (FIXED_SEED,)
    assert spent(population) == pytest.approx(library((MANY, 10)), rel=1e-3)
    population.settle("first", 10, events.repeated(MANY, 10), doubts=["paths differ"])
    reserve(population, "first", MANY, 20, fixed_seed=True)
    population.settle("first", 20, events.repeated(MANY, 20))
    assert population.cautions == (FIXED_SEED, "of a release: paths differ")
    words, _ = population.others("second", DELTA, Adjacency.ADD_REMOVE)
    assert "of another release: paths differ" in words


@pytest.mark.parametrize("change", ["none", "event", "adjacency", "name", "unnamed"])
def test_a_look_is_counted_once_under_its_name(store: UserStore, change: str) -> None:
    population = Population.of(store)
    looked = Adjacency.REPLACE if change == "adjacency" else Adjacency.ADD_REMOVE
    entry = population.debit("a median", LOOK, looked)
    item = Paid(
        what="a median",
        event=dp_event.GaussianDpEvent(7.0) if change == "event" else LOOK,
        entry={"name": "0" * 32, "unnamed": None}.get(change, entry),
    )
    for run in ("first", "second"):
        reserve(population, run, MANY, 10, paid=[item])
    looks = [one for one in population.entries(DELTA) if one["what"] == "a median"]
    assert len(looks) == (1 if change == "none" else 3)


def test_two_looks_of_the_same_words_and_price_are_two(store: UserStore) -> None:
    population = Population.of(store)
    entry = population.debit("a median", LOOK, Adjacency.ADD_REMOVE)
    known, other = (Paid(what="a median", event=LOOK, entry=name) for name in (entry, None))
    for _ in range(2):
        reserve(population, "first", MANY, 10, paid=[known, other])
    assert spent(population) == pytest.approx(library((MANY, 10), (LOOK, 2)), rel=1e-3)


def earlier(run: str, *, people: int = 0, steps: int = 30, private: bool = True) -> Earlier:
    return Earlier(
        run=run,
        data="elsewhere",
        plan={},
        event=events.repeated(FEW, steps) if private else None,
        steps=steps,
        adjacency=Adjacency.ADD_REMOVE,
        fixed_seed=False,
        paid=(Paid(what="tuning", event=LOOK),),
        people=people,
    )


def test_runs_behind_the_weights_are_counted_once(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "here", MANY, 50)
    past = [earlier("here"), earlier("elsewhere"), earlier("others", people=1)]
    for run in ("first", "second"):
        reserve(population, run, MANY, 100, earlier=past)
    expected = library((MANY, 250), (FEW, 30), (LOOK, 1))
    assert spent(population) == pytest.approx(expected, rel=1e-3)
    words, together = population.others("first", DELTA, Adjacency.ADD_REMOVE, named=["elsewhere"])
    assert together == spent(population)
    assert [word.partition(":")[0] for word in words] == [
        "training, 50 steps",
        "training, 100 steps",
    ]
    # More steps of a run are behind the weights than are counted for it: then those count, too.
    reserve(population, "third", MANY, 1, earlier=[earlier("here", steps=60)])
    expected = library((MANY, 251), (FEW, 90), (LOOK, 2))
    assert spent(population) == pytest.approx(expected, rel=1e-3)
    reserve(population, "fourth", MANY, 1, earlier=[earlier("bare", private=False)])
    assert population.spent(DELTA).epsilon == math.inf


def test_a_statement_names_the_other_releases_and_everything_together(store: UserStore) -> None:
    population = Population.of(store)
    mine = population.debit("my median", LOOK, Adjacency.ADD_REMOVE)
    population.debit("another look", LOOK, Adjacency.ADD_REMOVE)
    paid = [Paid(what="my median", event=LOOK, entry=mine), Paid(what="tuning", event=LOOK)]
    reserve(population, "first", MANY, 100, paid=paid)
    for number in range(3):
        reserve(population, f"later {number}", FEW, 20)
    words, together = population.others("first", DELTA, Adjacency.ADD_REMOVE)
    assert [word.rpartition(" alone ")[0] for word in words] == [
        "another look:",
        "3 times: training, 20 steps:",
    ]
    assert not any("runs/" in word for word in words)
    # Runs whose events differ are one line if what is printed of them does not.
    hardly = events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=3.0 + 1e-9)
    reserve(population, "hardly another", hardly, 20)
    words, together = population.others("first", DELTA, Adjacency.ADD_REMOVE)
    assert words[1].startswith("4 times: training, 20 steps: alone epsilon=")
    assert together == pytest.approx(library((LOOK, 3), (MANY, 100), (FEW, 80)), rel=1e-3)
    words, together = population.others("first", DELTA, Adjacency.REPLACE)
    assert together == math.inf
    assert "another adjacency than replace" in words[-1]


def test_many_other_releases_are_named_in_part(store: UserStore) -> None:
    population = Population.of(store)
    for number in range(25):
        population.debit(f"look {number}", LOOK, Adjacency.ADD_REMOVE)
    population.debit("look 0", LOOK, Adjacency.ADD_REMOVE)
    words, _ = population.others("none", DELTA, Adjacency.ADD_REMOVE)
    assert len(words) == 21
    assert words[0].startswith("2 times: look 0: alone epsilon=")
    assert words[-1] == "and 5 more kinds of releases"


@pytest.mark.parametrize("what", ["", "two\nlines", "x" * 200])
def test_a_look_is_named_in_one_short_line(store: UserStore, what: str) -> None:
    population = Population.of(store)
    with pytest.raises(InputError, match="printable line"):
        population.debit(what, LOOK, Adjacency.ADD_REMOVE)
    assert not population.path.exists()


def _drop(name: str) -> Callable[[Row], Row]:
    return lambda row: {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    "change",
    [
        _drop("event"),
        _drop("steps"),
        lambda row: row | {"kind": "refund"},
        lambda row: row | {"adjacency": "none"},
        lambda row: row | {"event": {"type": "os.system"}},
        lambda row: row | {"event": {"type": "GaussianDpEvent", "noise_multiplier": -1.0}},
        lambda row: row | {"kind": "settle", "run": "unknown", "doubts": []},
    ],
)
def test_rows_that_make_no_sense_are_refused_though_the_chain_holds(
    store: UserStore, change: Callable[[Row], Row]
) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 10)
    file = population._home.file
    row = {key: value for key, value in file.rows()[1].items() if key not in ("hash", "tag")}
    with file.adding() as adding:
        adding.add(change(row | {"run": "second"}) if "kind" in row else row)
    with pytest.raises(LedgerError, match="row 3 of a population's budget"):
        population.spent(DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_runs_looks_and_ends_counts_what_was_planned_or_taken(
    store: UserStore, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    planned: dict[str, int] = {}
    known: dict[str, int] = {}
    looks = 0
    for _ in range(40):
        # Found anew each time, as another process would.
        population = Population.of(store)
        run, steps = str(rng.choice(["a", "b", "c"])), int(rng.integers(1, 50))
        act = rng.choice(["reserve", "settle", "debit"])
        if act == "debit":
            population.debit("a look", LOOK, Adjacency.ADD_REMOVE)
            looks += 1
        elif act == "reserve":
            reserve(population, run, MANY, steps)
            if steps > planned.get(run, 0):
                planned[run] = steps
        elif run not in planned or steps > planned[run]:
            with pytest.raises(LedgerError):
                population.settle(run, steps, events.repeated(MANY, steps))
            if run in planned:
                planned[run] = known[run] = steps
        else:
            taken = steps // 4
            population.settle(run, taken, events.repeated(MANY, taken) if taken else None)
            if taken >= known.get(run, 0):
                planned[run] = known[run] = taken
    found = Population.of(store)._read().entries
    counted = {one.run: one.steps for one in found if one.run is not None}
    assert counted == {run: steps for run, steps in planned.items() if steps}
    assert sum(one.run is None for one in found) == looks
    for one in found:
        assert one.event == (LOOK if one.run is None else events.repeated(MANY, one.steps))


# Which population a store belongs to.


def halves(store: UserStore, root: Path) -> list[UserStore]:
    for name, records in (("a", np.arange(6)), ("b", np.arange(6, 12))):
        split.write_subset(store, records, root / name)
    return [UserStore.open(root / name) for name in ("a", "b")]


def test_parts_of_a_store_share_its_budget(store: UserStore, tmp_path: Path) -> None:
    one, other = halves(store, tmp_path)
    split.write_subset(one, np.arange(2), tmp_path / "deeper")
    deeper = UserStore.open(tmp_path / "deeper")
    for number, part in enumerate((store, one, other, deeper)):
        reserve(Population.of(part), f"run {number}", MANY, 10)
    for part in (store, one, other, deeper):
        assert len(Population.of(part).entries(DELTA)) == 4
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["store.population"]


def test_a_budget_survives_a_new_import(store: UserStore) -> None:
    reserve(Population.of(store), "first", MANY, 10)
    shutil.rmtree(store.path)
    again = make(store.path)
    assert len(Population.of(again).entries(DELTA)) == 1
    reserve(Population.of(again), "second", MANY, 10)
    assert len(Population.of(again).entries(DELTA)) == 2


def test_stores_moved_with_their_budget_keep_it(store: UserStore, tmp_path: Path) -> None:
    halves(store, tmp_path)
    reserve(Population.of(store), "first", MANY, 10)
    (tmp_path / "away").mkdir()
    for name in ("store", "store.population", "a"):
        (tmp_path / name).rename(tmp_path / "away" / name)
    for name in ("store", "a"):
        moved = UserStore.open(tmp_path / "away" / name)
        assert len(Population.of(moved).entries(DELTA)) == 1


@pytest.mark.parametrize("name", ["store", "a"])
def test_a_store_moved_from_its_budget_is_refused_until_declared(
    store: UserStore, tmp_path: Path, name: str
) -> None:
    halves(store, tmp_path)
    reserve(Population.of(store), "first", MANY, 10)
    with pytest.raises(LedgerError, match="nothing is lost"):
        Population.begin_anew(UserStore.open(tmp_path / name))
    (tmp_path / "away").mkdir()
    (tmp_path / name).rename(tmp_path / "away" / name)
    moved = UserStore.open(tmp_path / "away" / name)
    # As long as the budget is where it was, it counts.
    assert len(Population.of(moved).entries(DELTA)) == 1
    (tmp_path / "store.population").rename(tmp_path / "lost")
    with pytest.raises(LedgerError, match=r"not there: .* Move .* or declare a new start"):
        Population.of(moved)
    with pytest.raises(LedgerError, match="not there"):
        split.write_subset(moved, np.arange(2), tmp_path / "part")
    population = Population.begin_anew(moved)
    assert population.spent().cautions == (NEW_START,)
    reserve(Population.of(moved), "second", MANY, 10)
    assert Population.of(moved).cautions == (NEW_START,)
    with pytest.raises(LedgerError, match="nothing is lost"):
        Population.begin_anew(moved)
    split.write_subset(moved, np.arange(2), tmp_path / "part")
    assert len(Population.of(UserStore.open(tmp_path / "part")).entries(DELTA)) == 1


@pytest.mark.parametrize("name", ["store", "a"])
def test_a_copy_of_a_store_shares_its_budget(store: UserStore, tmp_path: Path, name: str) -> None:
    halves(store, tmp_path)
    reserve(Population.of(store), "first", MANY, 10)
    Population.of(UserStore.open(tmp_path / name)).debit("a look", MANY, Adjacency.ADD_REMOVE)
    (tmp_path / "away").mkdir()
    shutil.copytree(tmp_path / name, tmp_path / "away" / name)
    copied = Population.of(UserStore.open(tmp_path / "away" / name))
    assert copied.path == Population.of(store).path
    # With the budget copied as well, each copy counts by itself: nobody can see the other.
    if name == "store":
        shutil.copytree(tmp_path / "store.population", tmp_path / "away" / "store.population")
        apart = Population.of(UserStore.open(tmp_path / "away" / name))
        assert apart.path != Population.of(store).path


@pytest.mark.parametrize("name", ["store", "a"])
def test_the_budget_of_another_population_is_refused(
    store: UserStore, tmp_path: Path, name: str
) -> None:
    halves(store, tmp_path)
    other = make(tmp_path / "other")
    reserve(Population.of(other), "first", MANY, 10)
    (tmp_path / "store.population").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "other.population", tmp_path / "store.population")
    part = UserStore.open(tmp_path / name)
    with pytest.raises(LedgerError, match="the budget of another one"):
        Population.of(part)
    with pytest.raises(LedgerError, match="Move it away first"):
        Population.begin_anew(part)


def test_two_budgets_of_one_store_are_refused(store: UserStore, tmp_path: Path) -> None:
    part = halves(store, tmp_path)[0]
    (tmp_path / "store.population").rename(tmp_path / "kept")
    reserve(Population.begin_anew(part), "first", MANY, 10)
    (tmp_path / "kept").rename(tmp_path / "store.population")
    with pytest.raises(LedgerError, match="Move one of them away"):
        Population.of(part)


def test_a_damaged_note_or_file_is_refused(store: UserStore) -> None:
    population = Population.of(store)
    reserve(population, "first", MANY, 10)
    note = store.path / "population.json"
    whole = note.read_bytes()
    for content in (b"", b"{}", b"[]", b"\xff"):
        note.write_bytes(content)
        with pytest.raises(LedgerError, match=r"population\.json: damaged"):
            Population.of(store)
    note.write_bytes(whole)
    (population.path / "budget.jsonl").unlink()
    with pytest.raises(LedgerError, match="cannot be opened"):
        Population.of(store)


def test_a_read_only_place_is_one_line(store: UserStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuses)
    with pytest.raises(LedgerError, match=r"cannot be written \(Permission denied\)"):
        reserve(Population.of(store), "first", MANY, 10)
