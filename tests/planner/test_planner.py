"""The planner against exhaustive search, on the settings of Charles et al. 2024, Fig. 2 and 9."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from userdp import defaults
from userdp.errors import InputError
from userdp.planner import norms as norm_models
from userdp.planner import search as planner
from userdp.planner.search import ELS, ULS, Planner, Setting, recommend


def figure_2(epsilon: float, compute: int, **changes) -> Setting:
    return Setting(
        num_users=1024, group_size_els=32, epsilon=epsilon, delta=1e-6, steps=1000,
        compute=compute, largest_group=32, **changes,
    )  # fmt: skip


NORMS = {"same": norm_models.same_direction(10.0), "orthogonal": norm_models.orthogonal(10.0)}


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    "compute",
    [16, 128, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64, 256, 512))],
)
def test_estimate_and_double_finds_the_best_split_on_figures_2_and_9(norms, epsilon, compute):
    machine = Planner(figure_2(epsilon, compute), NORMS[norms])
    splits = machine.splits()
    best = planner.exhaustive(splits, machine.objective)
    assert machine.estimate_and_double() == best


def test_recommendation_is_the_least_noise_of_all_candidates():
    found = recommend(figure_2(4.0, 64), NORMS["orthogonal"])
    assert found.best.noise_stddev == min(one.noise_stddev for one in found.candidates)
    assert found.best.method == ULS
    assert any("comparison (7)" in reason for reason in found.reasons)


def test_comparison_7_decides_between_els_and_uls():
    machine = Planner(figure_2(4.0, 64), NORMS["orthogonal"])
    els = machine.els()
    assert els is not None
    for split in machine.splits():
        uls = machine.uls(split)
        left = machine.norms(1) * els.noise_multiplier
        right = split[0] * machine.norms(split[0]) * uls.noise_multiplier
        assert (left <= right) == (els.noise_stddev <= uls.noise_stddev)


def test_at_the_largest_group_els_is_never_worse_when_gradients_agree():
    # Conjecture 1 at this point: sigma_ELS <= K sigma_ULS for G_ELS = G_ULS = K, p = q.
    machine = Planner(figure_2(4.0, 512), NORMS["same"])
    els = machine.els()
    assert els is not None
    assert els.noise_stddev <= machine.uls((32, 16)).noise_stddev


@pytest.mark.parametrize(
    ("k", "p", "steps", "epsilon"),
    [(2, 0.01, 100, 1.0), (8, 0.05, 300, 4.0), (32, 0.001, 1000, 16.0), (4, 0.5, 10, 0.5)],
)
def test_conjecture_1_holds_on_a_grid(k, p, steps, epsilon):
    from oracles_planner import noise

    assert noise(k, p, steps, epsilon) <= k * noise(1, p, steps, epsilon) * 1.0002


@pytest.mark.slow
def test_noise_falls_when_there_are_more_users_and_is_marked_hypothetical():
    found = recommend(figure_2(4.0, 64), NORMS["same"], user_factors=(10, 100))
    assert len(found.hypothetical) == 4
    assert all(one.hypothetical for one in found.hypothetical)
    assert not any(one.hypothetical for one in found.candidates)
    uls = [one.noise_stddev for one in found.hypothetical if one.method == ULS]
    assert uls[1] < uls[0] < found.best.noise_stddev


def test_other_run_lengths_spend_the_same_compute():
    found = recommend(figure_2(4.0, 64), NORMS["same"])
    for one in found.other_steps:
        gradients = one.cohort_size * (1 if one.method == ELS else one.group_size)
        assert gradients * one.steps == 64 * 1000


def test_strategies_of_appendix_f_are_splits_of_the_budget():
    found = recommend(figure_2(4.0, 64), NORMS["orthogonal"])
    assert set(found.strategies) == {
        "exhaustive", "estimate-and-double", "greedy-oracle", "random", "max-cohort", "max-group",
    }  # fmt: skip
    assert all(g * m == 64 for g, m in found.strategies.values())
    assert found.strategies["max-cohort"] == (1, 64)
    assert found.strategies["max-group"] == (32, 2)
    assert found.strategies["greedy-oracle"] == found.strategies["exhaustive"]


def test_random_split_is_reproducible_by_its_generator():
    splits = [(1, 8), (2, 4), (4, 2)]
    drawn = [planner.random_split(splits, np.random.default_rng(3)) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_estimated_norms_pass_through_their_points():
    norms = norm_models.estimated({1: 4.0, 4: 2.0, 16: 1.5})
    assert [norms(1), norms(4), norms(16), norms(64)] == pytest.approx([4.0, 2.0, 1.5, 1.5])
    assert norms(2) == pytest.approx(math.sqrt(8.0))


@pytest.mark.parametrize("norms", [{}, {2: 1.0}, {1: -1.0}, {0: 1.0}])
def test_impossible_norms_are_refused(norms):
    with pytest.raises(InputError):
        norm_models.estimated(norms)


@pytest.mark.parametrize(
    "wrong", [{"num_users": 1}, {"compute": 0}, {"compute": 10**6}, {"steps": 0}]
)
def test_impossible_settings_are_refused(wrong):
    values = {
        "num_users": 100, "group_size_els": 4, "epsilon": 1.0, "delta": 1e-6, "steps": 10,
        "compute": 16, "largest_group": 4,
    }  # fmt: skip
    with pytest.raises(InputError):
        Setting(**(values | wrong))


def test_more_users_have_the_delta_of_so_many():
    # A delta of 5e-4 protects none of a million people, and asks for hardly any noise.
    few = replace(figure_2(4.0, 64), delta=5e-4)
    people = few.num_users * 1000
    many = replace(few, num_users=people, delta=defaults.delta(people))
    (best,) = (one for one in recommend(many, NORMS["same"]).candidates if one.method == ELS)
    (found,) = (
        one
        for one in recommend(few, NORMS["same"], user_factors=(1000,)).hypothetical
        if one.method == ELS
    )
    assert found.noise_multiplier == best.noise_multiplier
