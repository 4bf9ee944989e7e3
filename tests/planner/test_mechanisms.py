"""Samplers and noises compared at the same guarantee."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from userdp.accounting import accountant, events
from userdp.errors import InputError
from userdp.noise import Banded
from userdp.planner.mechanisms import MechanismSetting, _tried, compare
from userdp.sampling.contract import PublicNumbers
from userdp.units import Adjacency

SMALL: dict[str, Any] = {"num_users": 640, "cohort_size": 64, "steps": 40, "delta": 1e-4}


def setting(**given: Any) -> MechanismSetting:
    return MechanismSetting(**(SMALL | {"epsilon": 4.0, "memory": 9} | given))


def test_the_error_is_that_of_the_noise_written_out() -> None:
    # Independent of the recursions: C^-1 as a matrix, and the prefix sums of its rows.
    for choice in compare(setting()):
        mixing = np.eye(40)
        if choice.noise == "banded":
            noise = Banded.configured(steps=40, bands=choice.bands, strategy="toeplitz")
            mixing = noise.mixing(40)
        rows = np.linalg.norm(np.cumsum(mixing, axis=0), axis=1)
        users = 640 * choice.participations / 40
        scale = choice.noise_multiplier / users
        assert choice.error == pytest.approx(scale * math.sqrt(np.mean(rows**2)), rel=1e-6)
        assert choice.final_error == pytest.approx(scale * rows[-1], rel=1e-6)


def test_each_multiplier_meets_the_target_and_hardly_more() -> None:
    (poisson,) = (choice for choice in compare(setting()) if choice.sampler == "poisson")
    step = events.poisson_users_gaussian(
        user_sampling_prob=0.1, noise_multiplier=poisson.noise_multiplier
    )
    epsilon = accountant.epsilon(
        events.repeated(step, 40), delta=1e-4, adjacency=Adjacency.ADD_REMOVE
    )
    assert 4.0 * 0.998 <= epsilon <= 4.0


def test_which_mechanism_wins_depends_on_epsilon() -> None:
    # Ganesh et al. 2025, Sec. 5.3: amplification at small epsilon, correlation at large epsilon.
    assert compare(setting(epsilon=0.3))[0].noise == "gaussian"
    assert compare(setting(epsilon=30.0))[0].noise == "banded"


def test_memory_limits_the_bands_and_none_leaves_correlation_out() -> None:
    assert max(choice.vectors for choice in compare(setting(memory=3))) == 3
    assert {choice.noise for choice in compare(setting(memory=0))} == {"gaussian"}


def test_a_run_shorter_than_a_round_has_no_rounds() -> None:
    found = {choice.sampler for choice in compare(setting(steps=5, memory=0))}
    assert found == {"poisson", "allocation"}


def test_under_replace_only_what_has_a_price_is_compared() -> None:
    found = {choice.sampler for choice in compare(setting(adjacency=Adjacency.REPLACE, memory=0))}
    assert found == {"poisson"}


@pytest.mark.parametrize("wrong", [{"cohort_size": 0.5}, {"cohort_size": 641}, {"memory": -1}])
def test_numbers_that_make_no_run_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        setting(**wrong)


@pytest.mark.parametrize("cohort_size", [64, 190, 250, 400, 640])
def test_what_is_compared_is_what_its_keys_would_run(cohort_size: int) -> None:
    # 400 of 640: two parts of 320 users cannot give 400 a step, which training would refuse.
    public = PublicNumbers(
        num_users=640, num_records=640, expected_groups=cohort_size, group_size=1, steps=40
    )
    for tried in _tried(setting(cohort_size=cohort_size)):
        keys = {name: getattr(tried.sampler, field) for name, field in tried.sampler.keys.items()}
        assert type(tried.sampler).configured(public, **keys) == tried.sampler
