"""The demo: the whole story on a tiny scenario, and the bar on the full one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from cli_runner import userdp
from userdp import quickstart
from userdp.plan import Plan
from userdp.quickstart import Scenario
from userdp.runs.record import OnStep

CONTRACT_KEYS = {
    "epsilon",
    "delta",
    "loss_before",
    "loss_private",
    "loss_non_private",
    "secrets_leaked_private",
    "secrets_leaked_non_private",
    "report",
}

TINY = Scenario(
    num_users=30,
    num_held_out=4,
    num_secret_users=3,
    epsilon=4.0,
    delta=1e-2,
    steps=3,
    expected_cohort_size=4,
    group_size=2,
    ordinary_batch=8,
    sequence_length=48,
    pretrain_texts=64,
    pretrain_steps=3,
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], list[str]]:
    out = tmp_path_factory.mktemp("demo")
    stages: list[str] = []

    @contextmanager
    def progress(title: str, work: Plan | int | None) -> Iterator[OnStep]:
        stages.append(title)
        yield lambda done: None

    outcome = quickstart.run(out, seed=1, progress=progress, scenario=TINY)
    return out, asdict(outcome), stages


def test_outcome_has_the_keys_of_the_contract(
    told: tuple[Path, dict[str, object], list[str]],
) -> None:
    out, outcome, _ = told
    assert set(outcome) >= CONTRACT_KEYS
    assert outcome["epsilon"] <= 4.0  # type: ignore[operator]
    assert outcome["secrets_planted"] == 3
    assert json.loads((out / "outcome.json").read_text()) == outcome


def test_story_passes_through_its_stages(told: tuple[Path, dict[str, object], list[str]]) -> None:
    _, _, stages = told
    assert any("ordinary" in stage for stage in stages)
    assert any("user-level privacy" in stage for stage in stages)
    assert len(stages) >= 6


def test_report_and_run_are_there(told: tuple[Path, dict[str, object], list[str]]) -> None:
    out, outcome, _ = told
    page = Path(str(outcome["report"])).read_text()
    assert "differential privacy at user level" in page
    assert page.count("<svg") >= 4
    assert "of 3" in page
    run = out / "private"
    assert (run / "ledger.jsonl").is_file()
    assert json.loads((run / "statement.json").read_text())["steps"] == 3
    assert userdp("account", run, "--json").json["epsilon"] == outcome["epsilon"]


def test_report_shows_no_secret(told: tuple[Path, dict[str, object], list[str]]) -> None:
    from userdp.data import synthetic

    _, outcome, _ = told
    page = Path(str(outcome["report"])).read_text()
    messages = synthetic.messages(seed=1, num_users=30, num_held_out=4, num_secret_users=3)
    assert not any(secret.code in page for secret in messages.secrets)


def test_demo_never_clears_a_directory_that_is_not_a_demo(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = userdp("quickstart", "--out", tmp_path)
    assert result.code == 2
    assert "choose another --out" in result.err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_command_prints_one_json_object(
    told: tuple[Path, dict[str, object], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, outcome, _ = told
    monkeypatch.setattr(
        quickstart,
        "run",
        lambda *arguments, **options: quickstart.Outcome(**outcome),  # type: ignore
    )
    assert userdp("quickstart", "--out", tmp_path / "demo", "--json").json == outcome
    words = userdp("quickstart", "--out", tmp_path / "demo")
    assert "secrets given away" in words.out
    assert f"report: {outcome['report']}" in words.out


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_full_demo_meets_its_bar(seed: int, tmp_path: Path) -> None:
    data = userdp("quickstart", "--out", tmp_path / "demo", "--seed", seed, "--json").json
    gap = data["loss_before"] - data["loss_non_private"]
    assert gap > 0
    assert data["loss_before"] - data["loss_private"] >= 0.5 * gap
    assert data["secrets_leaked_private"] == 0
    assert data["secrets_planted"] >= 40
    assert data["secrets_leaked_non_private"] >= 0.5 * data["secrets_planted"]
    assert data["epsilon"] <= 8
    assert data["delta"] < 1 / Scenario().num_users
    assert Path(data["report"]).is_file()
