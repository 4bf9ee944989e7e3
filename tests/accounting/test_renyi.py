"""The older accountants: the tables of McMahan et al. 2018, and RDP beside exact numbers."""

from __future__ import annotations

import json

import mcmahan
import pytest
from dp_accounting import dp_event
from oracles import binomial

from shared import SHARED, needs_shared
from userdp.accounting import events, gaussian, renyi, search
from userdp.errors import InputError
from userdp.units import Adjacency

ENTRIES = [*(entry for row in mcmahan.table_1() for entry in row), *mcmahan.table_2()]
# One of each row and each number of rounds, and two of Table 2: those whose certificate is quick.
HANDFUL = [ENTRIES[place] for place in (0, 8, 16, 24, 26, 32, 34, 36, 42, 47)]


def named(entry: mcmahan.Entry) -> str:
    return f"{entry.rate:.3g}-{entry.noise:g}-{entry.steps}"


@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_moments_accountant_gives_mcmahan_2018_to_the_printed_digits(entry: mcmahan.Entry):
    found = renyi.moments_evaluation(
        entry.event, delta=entry.delta, adjacency=Adjacency.ADD_REMOVE
    ).epsilon
    assert entry.as_printed(found) == entry.printed


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_pld_epsilon_is_below_mcmahan_2018_and_next_to_the_documented_one(entry: mcmahan.Entry):
    # Our own bound alone, which takes milliseconds; the documented value is the certified one.
    found = search.epsilon_bound([binomial(entry.noise, 1, entry.rate, entry.steps)], entry.delta)
    assert found < float(entry.printed)
    documented = dict(zip(ENTRIES, documented_pld(), strict=True))[entry]
    assert found * (1 - 1e-4) <= float(documented) <= max(1.012 * found, found + 0.0105)


def documented_pld() -> list[str]:
    """The PLD values in the docs, in the order of the entries."""
    cells = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in mcmahan.documented().splitlines()
    ]
    return [
        *(value for row in cells if "PLD" in row[3:4] for value in row[4:]),
        *(row[3] for row in cells if len(row) == 4 and row[0][:1].isdigit()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("entry", HANDFUL, ids=named)
def test_documented_pld_value_is_the_certified_one(entry: mcmahan.Entry):
    assert entry.pld() == dict(zip(ENTRIES, documented_pld(), strict=True))[entry]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_documented_tables_of_mcmahan_2018_are_what_is_computed():
    assert "".join(mcmahan.markdown()) == mcmahan.documented()


@needs_shared
def test_moments_and_pld_values_beside_mcmahan_tables_match_golden():
    data = json.loads((SHARED / "golden" / "accounting.json").read_text())["d"]
    golden = [(row, row["moments_int_orders_classic"]) for row in data["table1"]]
    golden += [(row, row["moments_classic"]) for row in data["table2"]]
    for entry, (row, moments) in zip(ENTRIES, golden, strict=True):
        assert float(entry.printed) == row["paper"]
        found = renyi.moments_evaluation(
            entry.event, delta=entry.delta, adjacency=Adjacency.ADD_REMOVE
        ).epsilon
        assert found == pytest.approx(moments, rel=1e-9)
        if row["pld_fast"] is not None:
            mixture = binomial(entry.noise, 1, entry.rate, entry.steps)
            exact = search.epsilon_bound([mixture], entry.delta)
            assert exact == pytest.approx(row["pld_fast"], rel=1e-3)


@pytest.mark.parametrize("size", [1, 8])
def test_rdp_is_above_pld(size: int):
    event = events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=0.01, group_size=size, noise_multiplier=2.0
        ),
        2000,
    )
    found = renyi.evaluation(event, delta=1e-6, adjacency=Adjacency.ADD_REMOVE).epsilon
    exact = search.epsilon_bound([binomial(2.0, size, 0.01, 2000)], 1e-6)
    assert exact < found < 1.2 * exact


def test_sampling_without_replacement_is_priced_by_rdp_under_replace():
    step = events.fixed_size_users_gaussian(num_users=1000, cohort_size=10, noise_multiplier=2.0)
    found = renyi.evaluation(events.repeated(step, 100), delta=1e-6, adjacency=Adjacency.REPLACE)
    assert 0 < found.epsilon < 5


def test_moments_accountant_refuses_records():
    event = events.poisson_records_gaussian(
        record_sampling_prob=0.01, group_size=4, noise_multiplier=1.0
    )
    with pytest.raises(InputError, match="--unit user"):
        renyi.moments_evaluation(event, delta=1e-6, adjacency=Adjacency.ADD_REMOVE)


DELTA = 1e-5


# Replacing moves the sum by two clip norms: the exact cost is that of half the noise.
@pytest.mark.parametrize(
    "event",
    [
        dp_event.GaussianDpEvent(8.0),
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(16.0), 4),
        dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(16.0)] * 4),
        # A cohort of everybody is no sampling at all.
        events.fixed_size_users_gaussian(num_users=50, cohort_size=50, noise_multiplier=8.0),
    ],
)
def test_rdp_under_replace_is_above_the_exact_cost_of_replacing(event: events.DpEvent):
    found = renyi.evaluation(event, delta=DELTA, adjacency=Adjacency.REPLACE).epsilon
    exact = gaussian.epsilon(2 / 8.0, DELTA)
    assert exact <= found <= 1.2 * exact


def test_laplace_under_replace_counts_twice_the_distance():
    # Pure epsilon 1/4 for adding a user, 1/2 for replacing one; a Laplace loss is bounded by it.
    found = renyi.evaluation(
        dp_event.LaplaceDpEvent(4.0), delta=1e-12, adjacency=Adjacency.REPLACE
    ).epsilon
    assert 0.49 <= found <= 0.55
