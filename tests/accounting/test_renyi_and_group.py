"""The papers' own numbers: McMahan et al. 2018, Tables 1 and 2; black-box group privacy."""

from __future__ import annotations

import json

import pytest
from dp_accounting import dp_event
from oracles import binomial

from shared import SHARED, needs_shared
from userdp.accounting import events, group, renyi, search
from userdp.errors import InputError
from userdp.units import Adjacency

# McMahan et al. 2018, Table 1: users, sampled users, noise; epsilon after 1, 10, ... 10^6 rounds.
TABLE_1 = [
    (1e5, 1e2, 1.0, (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50)),
    (1e6, 1e1, 1.0, (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73)),
    (1e6, 1e3, 1.0, (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13)),
    (1e6, 1e4, 1.0, (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01)),
    (1e6, 1e3, 3.0, (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95)),
    (1e9, 1e3, 1.0, (0.84, 0.84, 0.84, 0.85, 0.88, 0.88, 0.88)),
]
# Table 2: users, sampled users, epsilon at delta = 1e-9 after 5,000 rounds with noise 1.
TABLE_2 = [
    (763_430, 5000, 4.634), (763_430, 1667, 2.314), (763_430, 1250, 2.038),
    (1e8, 5000, 1.152), (1e8, 1667, 0.991), (1e8, 1250, 0.987),
]  # fmt: skip


@pytest.mark.parametrize(("users", "sampled", "noise", "printed"), TABLE_1)
def test_moments_accountant_gives_mcmahan_2018_table_1_to_the_printed_digits(
    users, sampled, noise, printed
):
    for power, expected in enumerate(printed):
        found = renyi.moments_epsilon(
            user_sampling_prob=sampled / users,
            noise_multiplier=noise,
            steps=10**power,
            delta=users**-1.1,
        )
        assert found == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(("users", "sampled", "expected"), TABLE_2)
def test_moments_accountant_gives_mcmahan_2018_table_2_to_the_printed_digits(
    users, sampled, expected
):
    found = renyi.moments_epsilon(
        user_sampling_prob=sampled / users, noise_multiplier=1.0, steps=5000, delta=1e-9
    )
    assert found == pytest.approx(expected, abs=0.00051)


@pytest.mark.parametrize(("users", "sampled", "expected"), TABLE_2)
def test_pld_epsilon_is_at_most_mcmahan_2018_table_2(users, sampled, expected):
    assert search.epsilon_bound([binomial(1.0, 1, sampled / users, 5000)], 1e-9) < expected


@needs_shared
def test_pld_values_beside_mcmahan_tables_match_golden():
    data = json.loads((SHARED / "golden" / "accounting.json").read_text())["d"]
    for row in data["table1"]:
        if row["pld_fast"] is not None:
            found = search.epsilon_bound([binomial(row["z"], 1, row["q"], row["T"])], row["delta"])
            assert found == pytest.approx(row["pld_fast"], rel=1e-3)


@needs_shared
def test_group_privacy_matches_golden():
    data = json.loads((SHARED / "golden" / "accounting.json").read_text())["a"]
    rows = [row for row in data["rows"] if row["eps_group_blackbox"] and row["G"] > 1]
    for row in rows:
        found = group.group_epsilon(
            [binomial(row["sigma"], 1, row["p"], row["T"])],
            group_size=row["G"],
            delta=row["delta"],
        )
        assert found == pytest.approx(row["eps_group_blackbox"], rel=data["rtol_group"])
        assert found >= row["eps_mog"] * 0.999


def test_group_privacy_that_diverges_says_so():
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(0.5))
    with pytest.raises(InputError, match="no finite epsilon"):
        group.evaluation(events.repeated(step, 2000), group_size=32, delta=1e-6)


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
