"""A run that promises nothing by choice never looks like one that does, whatever is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runner import userdp as command
from tiny import make_model, make_store
from userdp.budget.population import Population
from userdp.data.store import UserStore
from userdp.errors import InputError, LedgerError
from userdp.files import chain
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.report.card import model_card
from userdp.runs.facts import of_config

RECORDS = 'unit = "record"\nexpected_batch_size = 10\nrecord_level = true\n'
MARKS = {
    "capped": RECORDS + "group_size = 2\n",
    "unbounded": RECORDS + "num_records = 40\n",
    "hypothetical": "expected_cohort_size = 10\ngroup_size = 2\nhypothetical_users = 100000\n"
    "hypothetical_cohort_size = 100\n",
    "unclaimed": "expected_cohort_size = 10\ngroup_size = 2\nnon_private = true\n",
}
FIRST_WORDS = {
    "capped": "guarantee: none at user level. No privacy guarantee for the people",
    "unbounded": "guarantee: none at user level. No privacy guarantee for the people",
    "hypothetical": "HYPOTHETICAL: priced as if there were 100,000 users and cohorts of 100; the "
    "run had 20 users and cohorts of 10. No privacy guarantee for the people",
    "unclaimed": "trained with noise, no guarantee claimed. No privacy guarantee for the people",
}
REASSURING = ("is protected", "To a user you may say", "user-level-privacy", "What is left to an")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("marks")
    make_model(root / "base")
    return root


def trained(base: Path, name: str, privacy: str, *options: object, steps: int = 3) -> Any:
    if not (base / name).is_dir():
        make_store(base / name / "store", [2] * 20)
    place = base / name
    (place / "run.toml").write_text(
        f'[data]\nstore = "{place}/store"\nsequence_length = 16\n[model]\npath = "{base}/base"\n'
        f"[privacy]\nnum_users = 20\nclip_norm = 1.0\ndelta = 1e-3\n{privacy}"
        f'[training]\nsteps = {steps}\npath = "plain"\n'
    )
    return command("train", place / "run.toml", "--out", place / "run", "--json", *options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name == "capped" else []) for name in MARKS
    ],
)
def marked(request: pytest.FixtureRequest, base: Path) -> tuple[str, Path, dict[str, Any]]:
    name = request.param
    result = trained(base, name, MARKS[name] + "noise_multiplier = 8.0\n")
    return name, base / name, result.json


def test_no_text_of_a_marked_run_promises_anything(
    marked: tuple[str, Path, dict[str, Any]],
) -> None:
    name, place, told = marked
    run = place / "run"
    statement = json.loads((run / "statement.json").read_text())
    account = command("account", run, "--json").json
    if name == "capped":
        by_rdp = command("account", run, "--accountant", "rdp", "--json").json
        assert by_rdp["epsilon"] is None
        assert by_rdp["planned_epsilon"] > by_rdp["epsilon_pld"] > 0
    for data in (told, account, statement):
        assert data["guarantee"] is False
        assert data["epsilon"] is None
        assert FIRST_WORDS[name].startswith(data["mark"])
    assert statement["promise"] == ""
    assert (statement["record_level_epsilon"] is not None) == (name in ("capped", "unbounded"))
    assert (statement["hypothetical_epsilon"] is not None) == (name == "hypothetical")
    assert command("account", run).out.startswith(FIRST_WORDS[name])
    files = command("report", run, "--json").json
    assert command("export", run, "--out", place / "export", "--base", "x/y").code == 0
    texts = [Path(files[kind]).read_text() for kind in ("html", "card")]
    texts.append((place / "export" / "README.md").read_text())
    for text in texts:
        assert FIRST_WORDS[name] in text
        assert not any(words in text for words in REASSURING)
    assert (place / "export" / "statement.json").read_bytes() == (
        run / "statement.json"
    ).read_bytes()


def test_the_budget_is_charged_what_the_run_really_cost(
    marked: tuple[str, Path, dict[str, Any]],
) -> None:
    name, place, told = marked
    spent = Population.of(UserStore.open(place / "store")).spent(1e-3).epsilon
    assert spent is not None
    if name in ("unbounded", "unclaimed"):
        assert spent == float("inf")
    else:
        assert spent == pytest.approx(told["planned_epsilon"])
    if name == "hypothetical":
        assert spent > 50 * told["hypothetical_epsilon"]
    if name == "capped":
        assert spent > told["record_level_epsilon"] / 2


@pytest.mark.slow
def test_a_mark_cannot_be_put_down_by_going_on(
    marked: tuple[str, Path, dict[str, Any]], base: Path
) -> None:
    name, _, _ = marked
    privacy = "expected_cohort_size = 10\ngroup_size = 2\nnoise_multiplier = 8.0\n"
    forked = trained(base, name, privacy, "--fork", steps=6)
    if name in ("unbounded", "unclaimed"):
        assert forked.code == 2
        assert "without privacy" in forked.err
    else:
        # What the marked steps really cost is composed: this promise is a true one.
        assert forked.json["guarantee"] is True
        alone = trained(base, f"alone {name}", privacy).json
        assert forked.json["epsilon"] > alone["epsilon"]


def plan_of(kind: str) -> Plan:
    from userdp.prices.marks import Hypothetical, RecordLevel

    common: dict[str, Any] = {
        "num_users": 100, "steps": 4, "clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-3,
    }  # fmt: skip
    if kind == "hypothetical":
        mark = Hypothetical(num_users=10_000, expected_groups=200)
        return Plan.sample_users(expected_cohort_size=10, group_size=2, mark=mark, **common)
    return Plan.sample_records(
        expected_batch_size=10, group_size=None if kind == "unbounded" else 3, num_records=200,
        mark=RecordLevel(), **common,
    )  # fmt: skip


def forged(path: Path, change: Any) -> Ledger:
    """The ledger with its rows changed and chained anew, by somebody without the key."""
    head, lines = "", []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for name in ("hash", "tag"):
            row.pop(name)
        change(row)
        row = chain.sealed(head, row, bytes(32))
        head = row["hash"]
        lines.append(chain.canonical(row))
    other = path.parent / "forged" / "ledger.jsonl"
    other.parent.mkdir()
    other.write_text("\n".join(lines) + "\n")
    return Ledger.read(other)


@pytest.mark.parametrize("kind", ["capped", "unbounded", "hypothetical"])
def test_a_ledger_without_its_mark_says_at_most_what_is_true(kind: str, tmp_path: Path) -> None:
    plan = plan_of(kind)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan, path=path, bound_to={}, fixed_seed=False)
    for _ in range(plan.steps):
        ledger.charge_step()
    ledger.finish({})
    whole = ledger.statement()

    def unmark(row: dict[str, Any]) -> None:
        if row["kind"] == "run":
            del row["plan"]["mark"]

    original = path.read_text()
    path.write_text(original.replace('"mark":', '"remark":'))
    with pytest.raises(LedgerError):
        Ledger.read(path)
    path.write_text(original)
    if kind == "unbounded":
        with pytest.raises(InputError):
            forged(path, unmark)
        return
    found = forged(path, unmark).statement()
    assert found.epsilon == whole.epsilon
    assert any("not verified" in caution for caution in found.cautions)


@pytest.mark.parametrize("kind", ["capped", "unbounded", "hypothetical"])
def test_a_mark_is_in_the_card_of_any_statement(kind: str, tmp_path: Path) -> None:
    from userdp.config.file import load_config

    (tmp_path / "run.toml").write_text(
        '[data]\nstore = "s"\n[model]\npath = "m"\n[privacy]\nnum_users = 20\ndelta = 1e-3\n'
        "[training]\nsteps = 1\nupdate = 'gradient'\n".replace("delta", "clip_norm = 1.0\ndelta")
    )
    config = load_config(tmp_path / "run.toml")
    for changes in ({}, {"fixed_seed": True}, {"unfinished": True}, {"doubts": ["x is wrong"]}):
        statement = plan_of(kind).statement(**changes)  # type: ignore[arg-type]
        card = model_card(statement, of_config(config), base="")
        assert statement.mark in card
        assert str(statement).startswith(statement.mark)
        assert "No privacy guarantee" in card
        assert not any(words in card for words in REASSURING)
        if changes:
            assert "Only planned, for" in card
            assert " For one record alone" not in card
