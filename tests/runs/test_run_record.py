"""The record of a run: whose noise it is, and what it writes before anybody can look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.errors import InputError, LedgerError
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.runs.record import RunRecord
from userdp.streams import RunSecret

INDEX = UserIndex.from_owners([0, 0, 1, 1, 2])


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 4,
        "expected_cohort_size": 2,
        "group_size": 2,
        "steps": 3,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(settings | changes))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def begun(
    chosen: Plan | None = None,
    *,
    seed: int = 0,
    lr: float = 0.1,
    index: UserIndex = INDEX,
    **options: Any,
) -> RunRecord:
    chosen, trained = chosen or plan(), model(seed)
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
    options = {"secret": RunSecret.fixed_for_tests(1)} | options
    record = RunRecord.create(chosen, trained, optimizer, settings=StepSettings(), **options)
    record.begin(chosen, trained, optimizer, index)
    return record


def numbers(record: RunRecord, purpose: str = "noise") -> list[float]:
    return record.streams(purpose).rng(0).standard_normal(4).tolist()


def test_noise_is_bound_to_the_run() -> None:
    runs = {
        "as it is": begun(),
        "another plan": begun(plan(delta=2e-2)),
        "other weights": begun(seed=1),
        "another optimizer": begun(lr=0.2),
        "other data": begun(bound_to={"data": "x"}),
        "another secret": begun(secret=RunSecret.fixed_for_tests(2)),
    }
    found = {name: tuple(numbers(record)) for name, record in runs.items()}
    assert len(set(found.values())) == len(found)
    assert tuple(numbers(begun())) == found["as it is"]
    # What the record was given is not what it draws from.
    given = RunSecret.fixed_for_tests(1).streams("noise").rng(0).standard_normal(4).tolist()
    assert tuple(given) not in found.values()


def test_a_ledger_that_names_nothing_is_bound_to_weights_optimizer_and_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Were the system's randomness to repeat, these would still tell two runs apart.
    monkeypatch.setattr("userdp.runs.record.secrets.token_hex", lambda count: "0" * 2 * count)
    keys: list[bytes] = []
    rows = UserIndex.from_owners([0, 1, 1, 1, 2])
    same = (0, 0.1, INDEX)
    for seed, lr, index in (same, (1, 0.1, INDEX), (0, 0.2, INDEX), (0, 0.1, rows), same):
        trained = model(seed)
        ledger = Ledger.create(plan(), bound_to={}, fixed_seed=False, key=b"k" * 32)
        record = RunRecord(ledger, RunSecret(key=b"k" * 32, fixed_seed=False))
        optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
        record.begin(plan(), trained, optimizer, index)
        keys.append(record.streams("noise").key(0))
    assert len(set(keys)) == 4
    assert keys[0] == keys[-1]


def test_purposes_share_no_stream() -> None:
    record = begun()
    assert numbers(record, "noise") != numbers(record, "cohort")


def test_a_ledger_of_another_plan_or_kind_of_seed_is_refused() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    secret = RunSecret.fixed_for_tests(1)
    for chosen, fixed_seed in ((plan(steps=9), True), (plan(), False)):
        ledger = Ledger.create(chosen, bound_to={}, fixed_seed=fixed_seed)
        with pytest.raises(InputError, match="another plan or another kind of seed"):
            RunRecord(ledger, secret).begin(plan(), trained, optimizer, INDEX)


def test_a_charged_step_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    told: list[int] = []
    record = begun(path=tmp_path / "run", on_step=told.append)
    ledger = tmp_path / "run" / "ledger.jsonl"
    for steps in (1, 2):
        record.charge_step()
        kinds = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()]
        assert kinds == ["run", *["step"] * steps]
        record.step_done()
    assert record.steps == 2
    # Whoever watches is told how many steps are done, and nothing else.
    assert told == [1, 2]
    record.ledger.close()


def test_the_ledger_is_closed_whatever_happens(tmp_path: Path) -> None:
    record = begun(path=tmp_path / "run")
    with pytest.raises(RuntimeError, match="out of memory"), record.closing():
        raise RuntimeError("out of memory")
    try:
        with pytest.raises(LedgerError, match="closed"):
            record.charge_step()
    finally:
        record.ledger.close()


def test_the_first_row_names_weights_optimizer_code_and_what_is_given() -> None:
    named = begun(bound_to={"data": "x"}).ledger.bound_to
    assert named.keys() >= {"initial_weights", "optimizer", "code", "data"}
    assert all(named.values())


def test_a_finished_record_takes_no_further_step() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    record = RunRecord.create(plan(), trained, optimizer, settings=StepSettings())
    record.begin(plan(), trained, optimizer, INDEX)
    record.charge_step()
    record.finish(trained)
    assert record.ledger.is_finished
    # Ended before its last step, it costs its plan.
    assert record.statement().steps == plan().steps
    with pytest.raises(LedgerError, match="closed"):
        record.charge_step()
