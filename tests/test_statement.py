"""The statement: never less than what was spent, and plain about what is not promised."""

from __future__ import annotations

import json
import math
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from userdp.plan import Plan
from userdp.statement import Statement, round_up


def statement(**changes: object) -> Statement:
    fields: dict[str, object] = {
        "epsilon": 1.2345,
        "delta": 1e-6,
        "adjacency": "add-remove",
        "neighbours": "all of one user's records are present or absent",
        "promise": "nearly what they would have concluded without",
        "sampler": "Poisson sampling of users",
        "noise": "Gaussian",
        "mechanism": "clip_norm=1",
        "steps": 1234,
        "num_users": 10,
        "certified_by": "somebody",
    }
    return Statement(**(fields | changes))  # type: ignore[arg-type]


@hypothesis.given(st.floats(1e-300, 1e300))
@hypothesis.example(10000.014)
@hypothesis.example(1e28)
@hypothesis.example(0.1 + 0.2)
def test_epsilon_is_rounded_up_by_at_most_one_percent_or_a_cent(epsilon: float) -> None:
    rounded = round_up(epsilon)
    assert rounded >= epsilon
    assert rounded - epsilon <= max(0.01 * epsilon, 1e-300)


@hypothesis.given(st.floats(1e-300, 1e300))
@hypothesis.example(12345.62)
def test_printed_epsilon_is_never_below_the_epsilon_spent(epsilon: float) -> None:
    text = statement(epsilon=epsilon).sentence
    found = re.search(r"epsilon=([^,]+),", text)
    assert found is not None
    assert float(found[1]) >= epsilon
    assert statement(epsilon=epsilon).to_json()["epsilon"] >= epsilon


def test_zero_and_infinite_epsilon_stay_what_they_are() -> None:
    assert round_up(0.0) == 0.0
    assert round_up(math.inf) == math.inf


def test_statement_names_guarantee_unit_adjacency_steps_and_who_certifies() -> None:
    text = str(statement(cautions=("mind",), assumptions=("given",), not_covered=("this",)))
    assert "(epsilon=1.24, delta=1e-06) differential privacy at user level, add-remove" in text
    assert "1,234 steps, Poisson sampling of users, clip_norm=1" in text
    assert "certified by somebody" in text
    for line in ("caution: mind", "assumes: given", "not covered: this"):
        assert line in text.splitlines()


def test_non_private_statement_says_no_guarantee_and_no_number() -> None:
    plan = Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        group_size=1,
        steps=10,
        clip_norm=1.0,
        noise_multiplier=0.0,
        delta=1e-3,
        non_private=True,
    )
    said = plan.statement()
    assert said.sentence == "No privacy guarantee."
    assert "epsilon" not in str(said)
    assert "certified" not in str(said)
    data = said.to_json()
    assert data["guarantee"] is False
    assert data["epsilon"] is None
    json.dumps(data, allow_nan=False)


def test_fixed_seed_is_said_in_the_statement() -> None:
    plan = Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        group_size=1,
        steps=10,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-3,
    )
    assert any("fixed seed" in caution for caution in plan.statement(fixed_seed=True).cautions)
    assert plan.statement().cautions == ()


@pytest.mark.parametrize("unit", ["users", "records"])
def test_statement_says_what_the_contract_asks(unit: str) -> None:
    settings = {
        "num_users": 1000,
        "group_size": 3,
        "steps": 10,
        "clip_norm": 0.5,
        "noise_multiplier": 2.0,
        "delta": 1e-4,
    }
    plan = (
        Plan.sample_users(expected_cohort_size=20, **settings)
        if unit == "users"
        else Plan.sample_records(expected_batch_size=20, **settings)
    )
    data = plan.statement().to_json()
    assert data["unit"] == "user"
    assert data["adjacency"] == "add-remove"
    assert f"Poisson sampling of {unit}" in data["sampler"]
    assert "at most 3 records" in data["sampler"]
    assert data["mechanism"] == "clip_norm=0.5, noise_multiplier=2, divisor=20"
    assert data["num_users"] == 1000
    assert data["assumptions"]
    assert any("hyper-parameters" in entry for entry in data["not_covered"])
    assert any("floating-point" in entry for entry in data["not_covered"])
    assert data["epsilon"] >= plan.epsilon()
