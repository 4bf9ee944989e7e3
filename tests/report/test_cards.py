"""Whatever folder a run leaves with weights has a card, and no card leaves out the run's mark."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from cli_runner import userdp as command
from tiny import make_model, make_store
from userdp.ledger.book import Ledger
from userdp.models.adapters import Lora, add_lora
from userdp.prices.earlier import Earlier
from userdp.prices.marks import Hypothetical, RecordLevel
from userdp.report.closing import unfinished_card
from userdp.runs.check import check_run
from userdp.statement import epsilon_text

PLAN = userdp.Plan.sample_users(
    num_users=12,
    expected_cohort_size=4,
    group_size=2,
    steps=2,
    clip_norm=1.0,
    noise_multiplier=2.0,
    delta=1e-3,
)
MARKS = {
    "": None,
    "guarantee: none at user level. ": RecordLevel(),
    "HYPOTHETICAL: priced as if there were 5,000 users": Hypothetical(
        num_users=5_000, expected_groups=4
    ),
}
HYPOTHETICAL = "hypothetical_users = 5000\n"


def plan_of(mark: Any) -> userdp.Plan:
    if not isinstance(mark, RecordLevel):
        return dataclasses.replace(PLAN, mark=mark)
    return userdp.Plan.sample_records(
        num_users=12,
        expected_batch_size=4,
        group_size=2,
        steps=2,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-3,
        mark=mark,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> userdp.UserStore:
    return make_store(tmp_path_factory.mktemp("cards") / "store", [2] * 12)


def trained(
    store: userdp.UserStore, place: Path, plan: userdp.Plan, *, lora: bool = False, **more: Any
) -> userdp.Run:
    model, tokenizer = make_model(place / "base")
    if lora:
        torch.manual_seed(0)
        model = add_lora(model, Lora(rank=2))
    return userdp.train(
        model, tokenizer, store, plan, sequence_length=16, out=place / "run", **more
    )


def first_line(folder: Path) -> str:
    """The first line of a card's text."""
    _, _, text = (folder / "README.md").read_text().partition("# Model card\n\n")
    return text.splitlines()[0]


@pytest.mark.parametrize(
    ("mark", "lora"),
    [
        pytest.param(mark, lora, marks=pytest.mark.slow if lora == bool(mark) else [])
        for mark in MARKS
        for lora in (True, False)
    ],
)
def test_a_run_from_python_leaves_its_card(
    store: userdp.UserStore, tmp_path: Path, mark: str, lora: bool
) -> None:
    run = trained(store, tmp_path, plan_of(MARKS[mark]), lora=lora)
    model = tmp_path / "run" / "model"
    assert first_line(model) == run.statement.sentence
    assert first_line(model).startswith(mark)
    card = (model / "README.md").read_text()
    assert ("library_name: peft" in card) == lora
    assert ("user-level-privacy" in card) == (not mark)
    assert str(tmp_path) not in card
    if not mark:
        assert f"epsilon={epsilon_text(run.statement.epsilon)}, delta=0.001" in first_line(model)
    assert check_run(tmp_path / "run").ok
    # `report` has nothing to add.
    assert command("report", tmp_path / "run").code == 0
    assert (model / "README.md").read_text() == card


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param("", id="full", marks=pytest.mark.slow),
        pytest.param("lora = { rank = 2 }\n", id="lora"),
    ],
)
def test_a_run_from_a_configuration_leaves_its_card(tmp_path: Path, lora: str) -> None:
    make_model(tmp_path / "base")
    make_store(tmp_path / "store", [2] * 12)

    def ran(privacy: str, out: str, *options: object) -> Any:
        config = tmp_path / "run.toml"
        config.write_text(
            f'[data]\nstore = "{tmp_path}/store"\nsequence_length = 16\n'
            f'[model]\npath = "{tmp_path}/base"\n{lora}'
            "[privacy]\nnum_users = 12\nexpected_cohort_size = 4\ngroup_size = 2\n"
            f"clip_norm = 1.0\nnoise_multiplier = 2.0\ndelta = 1e-3\n{privacy}"
            "[training]\nsteps = 2\n"
        )
        found = command("train", config, "--out", tmp_path / out, "--json", *options)
        assert found.code == 0, found.err
        return found.json

    ran(HYPOTHETICAL, "marked")
    assert first_line(tmp_path / "marked" / "model").startswith("HYPOTHETICAL: priced as if")
    told = ran("", "plain")
    words = f"(epsilon={epsilon_text(told['epsilon'])}, delta=0.001) differential privacy"
    assert first_line(tmp_path / "plain" / "model").startswith(words)
    # A run that was killed at its very end gets its card when it is resumed.
    card = tmp_path / "marked" / "model" / "README.md"
    whole = card.read_bytes()
    card.write_text("of weights that were written before the run had ended")
    (tmp_path / "marked" / "statement.json").unlink()
    ran(HYPOTHETICAL, "marked", "--resume")
    assert card.read_bytes() == whole


@pytest.mark.parametrize("mark", MARKS)
def test_weights_of_a_run_that_never_ended_promise_nothing(
    store: userdp.UserStore, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(MARKS[mark])

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("the machine is gone")

    monkeypatch.setattr(Ledger, "finish", killed)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        trained(store, tmp_path, plan, lora=True)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert card == unfinished_card(plan)
    line = first_line(tmp_path / "run" / "model")
    assert line.startswith(f"{mark}" if mark else "No privacy guarantee")
    assert "No privacy guarantee" in line
    assert "no-privacy-guarantee" in card
    assert "epsilon" not in card


@pytest.mark.parametrize(
    "mark",
    [pytest.param(mark, marks=pytest.mark.slow if "HYP" in mark else []) for mark in MARKS],
)
def test_a_loop_of_ones_own_leaves_its_card(tmp_path: Path, mark: str) -> None:
    from userdp.clipping.settings import StepSettings
    from userdp.index import UserIndex
    from userdp.runs.record import RunRecord

    plan = plan_of(MARKS[mark])
    model, tokenizer = make_model(tmp_path / "base")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = RunRecord.create(
        plan, model, optimizer, settings=StepSettings(), path=tmp_path / "run"
    )
    record.begin(plan, model, optimizer, UserIndex.from_owners([0, 1]))
    for _ in range(plan.steps):
        record.charge_step()
    record.finish(model, tokenizer)
    record.ledger.close()
    statement = record.statement()
    assert first_line(tmp_path / "run" / "model") == statement.sentence
    assert statement.sentence.startswith(mark)
    assert check_run(tmp_path / "run").ok


@pytest.mark.parametrize(
    "mark",
    [pytest.param(mark, marks=pytest.mark.slow if "HYP" in mark else []) for mark in MARKS],
)
def test_the_mark_of_an_earlier_run_stays_with_its_weights(
    store: userdp.UserStore, tmp_path: Path, mark: str
) -> None:
    trained(store, tmp_path / "first", plan_of(MARKS[mark]))
    model, tokenizer = userdp.load_model(tmp_path / "first" / "run" / "model")
    run = tmp_path / "second"
    statement = userdp.train(model, tokenizer, store, PLAN, sequence_length=16, out=run).statement
    assert command("report", run).code == 0
    why = f" that promised nothing ({mark}" if mark else ", alone epsilon="
    for text in (
        str(statement),
        (run / "model" / "README.md").read_text(),
        (run / "report.html").read_text(),
        (run / "statement.json").read_text(),
    ):
        assert f"2 steps of an earlier run{why.removesuffix('. ')}" in text
        assert ("promised nothing" in text) == bool(mark)


def test_an_earlier_run_without_a_guarantee_says_so() -> None:
    before = Earlier(
        run="x",
        data="y",
        plan=PLAN.to_json(),
        event=PLAN.event(2),
        steps=2,
        adjacency=PLAN.adjacency,
        fixed_seed=False,
    )
    unclaimed = dataclasses.replace(PLAN, non_private=True)
    free = dataclasses.replace(before, plan=unclaimed.to_json(), event=None)
    for changed, why in (
        (free, "no guarantee claimed"),
        (dataclasses.replace(before, fixed_seed=True), "a fixed seed was used"),
        (dataclasses.replace(before, doubts=("x was written without noise",)), "x was written"),
    ):
        statement = unclaimed.statement(earlier=[changed])
        assert f"2 steps of an earlier run that promised nothing ({why}" in statement.earlier[0]
    assert "promised nothing" not in PLAN.statement(earlier=[before]).earlier[0]
