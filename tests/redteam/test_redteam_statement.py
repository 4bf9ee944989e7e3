"""What is said never promises more than what is true: fixed seeds, large epsilons, rounding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import userdp
from cli_runner import userdp as command
from tiny import make_model, make_store
from userdp.cli import common
from userdp.plan import Plan
from userdp.plans.words import promise_in_words
from userdp.statement import epsilon_text
from userdp.units import Adjacency

SOURCE = Path(userdp.__file__).parent


def the_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 60,
        "expected_cohort_size": 30,
        "group_size": 3,
        "steps": 10,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(**(settings | changes))


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with little noise and a fixed seed, and what `train --json` said."""
    root = tmp_path_factory.mktemp("statement")
    make_store(root / "store", [2] * 20)
    make_model(root / "base")
    (root / "run.toml").write_text(
        f'[data]\nstore = "{root}/store"\nsequence_length = 16\n[model]\npath = "{root}/base"\n'
        "[privacy]\nnum_users = 20\nexpected_cohort_size = 10\ngroup_size = 2\nclip_norm = 1.0\n"
        'noise_multiplier = 0.3\ndelta = 1e-3\n[training]\nsteps = 5\npath = "plain"\n'
        "fixed_seed = 1\n"
    )
    told = command("train", root / "run.toml", "--out", root / "run", "--json").json
    return root / "run", told


def test_a_fixed_seed_promises_nothing_anywhere(fixed: tuple[Path, dict[str, Any]]) -> None:
    run, told = fixed
    account = command("account", run, "--json").json
    statement = json.loads((run / "statement.json").read_text())
    for data in (told, account, statement):
        assert data["guarantee"] is False
        assert data["planned_epsilon"] > 30
        assert any("fixed seed" in caution for caution in data["cautions"])
    assert {"steps", "epsilon", "delta", "loss", "run"} <= set(told)
    assert statement["promise"] == ""
    assert statement["epsilon"] is None
    assert "No privacy guarantee" in statement["sentence"]
    files = command("report", run, "--json").json
    for name in ("card", "html"):
        text = Path(files[name]).read_text()
        assert "No privacy guarantee" in text
        assert "is protected" not in text
        assert "To a user you may say" not in text
        assert "What is left to an attacker" not in text


def test_a_huge_epsilon_is_called_hardly_any_protection_wherever_it_is_stated() -> None:
    options = ("--rate", 0.5, "--steps", 50, "--delta", 1e-3, "--noise-multiplier")
    for noise, is_huge in ((0.3, True), (20.0, False)):
        statement = the_plan(noise_multiplier=noise).statement()
        assert (statement.epsilon > 10) == is_huge
        assert ("hardly any protection" in str(statement)) == is_huge
        assert (
            any(
                "hardly any" in one
                for one in command("account", *options, noise, "--json").json["cautions"]
            )
            == is_huge
        )
        assert (
            "caution: an epsilon above 10" in command("account", *options, noise).out
        ) == is_huge
    # What claims nothing has no price to warn of.
    assert "hardly any" not in str(the_plan(noise_multiplier=0.0, non_private=True).statement())


def test_the_words_of_the_promise_follow_epsilon() -> None:
    for adjacency in Adjacency:
        words = [promise_in_words(adjacency, epsilon) for epsilon in (0.1, 1.0, 1.1, 4.0, 9.9)]
        assert words[0] == words[1] == adjacency.promise
        assert words[2] == words[3]
        assert len(set(words)) == 3
        assert "moderate" in words[2]
        assert "weak" in words[4]
        assert "is protected" not in words[4]
        for epsilon in (10.1, 59.7, float("inf")):
            assert promise_in_words(adjacency, epsilon) == ""


def test_a_large_epsilon_has_no_reassuring_words() -> None:
    statement = the_plan(noise_multiplier=0.3).statement()
    assert statement.epsilon > 50
    assert statement.guarantee
    assert statement.promise == ""
    assert "protected" not in str(statement)
    assert "is protected" in the_plan(noise_multiplier=30.0).statement().promise


@pytest.mark.parametrize("changes", [{"fixed_seed": True}, {"unfinished": True}])
def test_without_a_guarantee_there_is_no_promise_and_the_plans_epsilon_is_named_so(
    changes: dict[str, bool],
) -> None:
    plan = the_plan(noise_multiplier=30.0)
    statement = plan.statement(**changes)
    data = statement.to_json()
    assert data["guarantee"] is False
    assert data["epsilon"] is None
    assert data["planned_epsilon"] >= plan.epsilon()
    assert statement.promise == ""
    assert statement.sentence.startswith("No privacy guarantee: ")
    assert "Only planned: (epsilon=" in statement.sentence


def test_the_unit_is_a_field_whatever_the_words_say() -> None:
    records = Plan.sample_records(
        num_users=60, expected_batch_size=30, group_size=3, steps=2, clip_norm=1.0,
        noise_multiplier=4.0, delta=1e-3,
    )  # fmt: skip
    assert records.statement().sampling == "record"
    assert records.statement().unit == "user"
    assert the_plan().statement().sampling == "user"


def test_how_the_model_was_checked_is_said() -> None:
    statement = the_plan().statement(model_check="checked by probe: 12 probes")
    assert statement.to_json()["model_check"] == "checked by probe: 12 probes"
    assert "checked by probe" in str(statement)
    ledger = userdp.Ledger.create(
        the_plan(), bound_to={}, fixed_seed=False, model_check="architecture proven by tests"
    )
    assert ledger.statement().model_check == "architecture proven by tests"


def test_printed_epsilon_is_never_below_what_was_spent() -> None:
    for epsilon in (3.000157, 0.0123456, 7.991, 12345.62, 59.738833):
        assert float(epsilon_text(epsilon)) >= epsilon
    assert epsilon_text(3.000157) == "3.01"
    told = common.promised(the_plan().statement())
    assert told["epsilon"] >= the_plan().epsilon()


def test_every_epsilon_in_the_source_is_printed_by_one_function() -> None:
    """A format of an epsilon that may round to nearest is found by its text."""
    by_hand = re.compile(
        r"epsilon[a-z_]*(?:\(\))?\s*:\s*[.\d,]*[gfe]\}"  # {x.epsilon:.4g}
        r"|epsilon=\{(?!(?:common\.)?epsilon_text|round_up|target|epsilon[:}])"  # epsilon={reached}
        r"|%[.\d]*[gfe]'? % [a-z_.]*epsilon"  # jinja
        r"|\{\{[^}]*epsilon \| round"
    )
    # What the caller asked for is repeated as it was given; accounting names it in its errors.
    asked_for = {'f"epsilon={epsilon:g} leaves nothing for the steps: what was paid for or spent "'}
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for pattern in ("*.py", "*.jinja")
        for path in sorted(SOURCE.rglob(pattern))
        if "accounting" not in path.parts
        for line in path.read_text().splitlines()
        if by_hand.search(line) and line.strip() not in asked_for
    ]
    assert found == []
