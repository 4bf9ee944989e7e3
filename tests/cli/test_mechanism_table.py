"""The part of `userdp plan` that compares samplers and noises (`cli/mechanism_table.py`)."""

from __future__ import annotations

import pytest

from cli_runner import userdp
from userdp.cli import mechanism_table
from userdp.planner.mechanisms import MechanismChoice

pytestmark = pytest.mark.usefixtures("_mechanisms_are_compared_once")
OPTIONS = ("--users", 400, "--records-per-user", 4, "--steps", 20, "--compute", 64)


def test_plan_names_the_best_mechanism_and_its_keys() -> None:
    data = userdp("plan", *OPTIONS, "--epsilon", 20, "--noise-memory", 3, "--json").json
    errors = [choice["error"] for choice in data["mechanisms"]]
    assert errors == sorted(errors)
    told = userdp("plan", *OPTIONS, "--epsilon", 20, "--noise-memory", 3).out
    best = mechanism_table.as_configuration(MechanismChoice(**data["mechanisms"][0]))
    assert f"[privacy] {best}" in told
    # One line for each mechanism, and one star for the best.
    lines = [line for line in told.splitlines() if line.startswith("* ")]
    assert len(lines) == 2  # the best split, and the best mechanism
    assert data["mechanisms"][0]["sampler"] in lines[1]


def test_records_that_are_sampled_have_no_such_table() -> None:
    assert mechanism_table.in_words([]) == []


def test_without_memory_no_noise_is_correlated() -> None:
    data = userdp("plan", *OPTIONS, "--epsilon", 20, "--noise-memory", 0, "--json").json
    assert {choice["noise"] for choice in data["mechanisms"]} == {"gaussian"}
