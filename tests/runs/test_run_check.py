"""Whether a record is whole, closed and of these weights: every cut and every byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recorded_run import write_run
from userdp.files import chain
from userdp.history import ANCESTRY_FILE
from userdp.ledger.book import Ledger
from userdp.runs.check import _says_as_much, check_run
from userdp.runs.files import model_files
from userdp.statement import Statement

RECORD = ("ledger.jsonl", "statement.json", f"model/{ANCESTRY_FILE}", "config.toml")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=2)


def test_a_finished_run_is_whole(run: Path) -> None:
    found = check_run(run)
    assert found.to_json() == {
        "run": str(run),
        "ok": True,
        "steps": 2,
        "earlier_steps": 0,
        "closed": True,
        "problems": [],
        "notes": [],
    }


@pytest.fixture
def priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers of equal rows share their statement: thousands of times the price takes long."""
    statement = Ledger.statement
    known: dict[tuple[object, ...], Statement] = {}

    def shared(ledger: Ledger, *, unfinished: bool = False) -> Statement:
        name = (ledger.head, ledger.is_verified, unfinished)
        if name not in known:
            known[name] = statement(ledger, unfinished=unfinished)
        return known[name]

    monkeypatch.setattr(Ledger, "statement", shared)


def positions(content: bytes, request: pytest.FixtureRequest) -> range:
    """Every byte of the ledger and, where slow tests run, of all files; else every fifth."""
    everything = "not slow" not in request.config.getoption("markexpr")
    is_ledger = content.startswith(b'{"bound_to"')
    return range(0, len(content), 1 if everything or is_ledger else 5)


@pytest.mark.usefixtures("priced_once")
@pytest.mark.parametrize(
    ("name", "with_key"),
    [
        *((name, True) for name in RECORD),
        pytest.param("statement.json", False, marks=pytest.mark.slow),
    ],
)
def test_every_edited_byte_of_the_record_is_found(
    run: Path, name: str, with_key: bool, request: pytest.FixtureRequest
) -> None:
    if not with_key:
        chain.key_path(run / "ledger.jsonl").unlink()
    assert check_run(run).ok
    path = run / name
    content = path.read_bytes()
    for position in positions(content, request):
        edited = bytearray(content)
        # A tab for a space is the same JSON, and still not the byte that was written.
        edited[position] = ord("\t") if edited[position] == ord(" ") else edited[position] ^ 1
        path.write_bytes(bytes(edited))
        assert not check_run(run).ok, position


@pytest.mark.usefixtures("priced_once")
@pytest.mark.parametrize("name", RECORD)
def test_every_cut_of_the_record_is_found(
    run: Path, name: str, request: pytest.FixtureRequest
) -> None:
    path = run / name
    content = path.read_bytes()
    for length in positions(content, request):
        path.write_bytes(content[:length])
        assert not check_run(run).ok, length


def test_every_file_of_the_model_is_compared_and_all_that_changed_are_named(run: Path) -> None:
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "tokenizer.json").unlink()
    (run / "model" / "more.json").write_text("{}")
    problems = check_run(run).problems
    assert [problem.split()[0] for problem in problems] == [
        "model/config.json",
        "model/more.json",
        "model/tokenizer.json",
        # The statement promised, and cannot any more.
        str(run / "statement.json"),
    ]


def test_an_unfinished_run_is_not_ok_and_says_how_far_it_came(tmp_path: Path) -> None:
    found = check_run(write_run(tmp_path / "run", finish=False))
    assert (found.ok, found.closed, found.steps) == (False, False, 3)
    assert "no closing row" in found.problems[0]


def test_an_open_run_names_the_process_that_has_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finish=False)
    ledger = Ledger.open(run / "ledger.jsonl")
    notes = check_run(run).notes
    ledger.close()
    assert any("opened by process" in note for note in notes)
    assert check_run(run).notes == ()


def test_without_the_key_the_writer_is_not_verified_and_the_record_is_ok(run: Path) -> None:
    shutil.rmtree(run / "secret")
    found = check_run(run)
    assert found.ok
    assert len(found.notes) == 1
    assert "who wrote this record is not verified" in found.notes[0]


def test_a_key_of_another_run_is_a_problem(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other")
    shutil.copy(other / "secret" / "ledger.key", run / "secret" / "ledger.key")
    assert "not written with the run's key" in check_run(run).problems[0]


def test_a_run_that_promises_nothing_is_whole_and_noted(tmp_path: Path) -> None:
    found = check_run(write_run(tmp_path / "run", fixed_seed=True))
    assert found.ok
    assert any("No privacy guarantee: a fixed seed" in note for note in found.notes)


def test_a_missing_statement_is_a_note(run: Path) -> None:
    (run / "statement.json").unlink()
    found = check_run(run)
    assert found.ok
    assert "userdp report writes it" in found.notes[0]


def _lower_epsilon(told: dict[str, object]) -> None:
    told["epsilon"] = 0.1


def _drop_cautions(told: dict[str, object]) -> None:
    told["assumptions"] = []


@pytest.mark.parametrize("edit", [_lower_epsilon, _drop_cautions])
def test_a_statement_that_is_not_the_ledgers_is_a_problem(
    run: Path, edit: Callable[[dict[str, object]], None]
) -> None:
    path = run / "statement.json"
    told = json.loads(path.read_text())
    edit(told)
    path.write_text(json.dumps(told, indent=1) + "\n")
    assert "is not what the ledger says" in check_run(run).problems[0]


def test_a_past_that_is_not_the_ledgers_is_a_problem_even_if_the_closing_row_names_it(
    tmp_path: Path,
) -> None:
    cheaper = json.dumps({"format": 2, "runs": [{"run": "x", "steps": 1}]}).encode()
    run = write_run(tmp_path / "run")
    # The owner of the key could close a run on any files.
    path = run / "model" / ANCESTRY_FILE
    path.write_bytes(cheaper)
    place = run / "ledger.jsonl"
    rows = list(chain.rows_of(chain.read_content(place), place, None))
    key = chain.read_key(run / "ledger.jsonl")
    assert key is not None
    end = {name: value for name, value in rows[-1].items() if name not in ("tag", "hash")}
    end["model_files"][ANCESTRY_FILE] = hashlib.sha256(cheaper).hexdigest()
    lines = [chain.canonical(row) for row in rows[:-1]]
    lines.append(chain.canonical(chain.sealed(rows[-2]["hash"], end, key)))
    (run / "ledger.jsonl").write_text("".join(line + "\n" for line in lines))
    problems = check_run(run).problems
    assert len(problems) == 1
    assert "does not say what the ledger says was spent" in problems[0]


def test_a_doubt_that_came_up_later_may_stand_in_the_past_and_none_may_be_missing() -> None:
    recorded = {"run": "x", "steps": 3}
    doubted = recorded | {"doubts": ["a"]}
    assert _says_as_much(recorded, recorded)
    assert _says_as_much(doubted, recorded)
    assert _says_as_much(doubted | {"doubts": ["b", "a"]}, doubted)
    assert not _says_as_much(recorded, doubted)
    assert not _says_as_much(doubted | {"doubts": ["b"]}, doubted)
    assert not _says_as_much(doubted | {"steps": 2}, recorded)


def test_what_is_no_run_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "ledger.jsonl").mkdir(parents=True)
    for name in ("nowhere", "file", "empty", "folder"):
        found = check_run(tmp_path / name)
        assert (found.ok, found.steps, found.closed) == (False, None, False)
        assert "is this the directory of a run" in found.problems[0]


def test_half_a_card_of_a_killed_process_is_no_file_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = model_files(tmp_path)
    (tmp_path / ".README.md.partial").write_text("# Mod")
    assert model_files(tmp_path) == before
    (tmp_path / ".model.safetensors.partial").write_bytes(b"wei")
    assert model_files(tmp_path) != before


def test_a_past_that_was_written_before_rows_were_named_in_it_is_not_a_problem() -> None:
    # Runs of earlier versions, and what was published of them, stay as they are.
    recorded = {"run": "x", "steps": 3, "chose_rows": True}
    assert _says_as_much({"run": "x", "steps": 3}, recorded)
    assert _says_as_much(recorded, recorded)
    assert not _says_as_much(recorded, {"run": "x", "steps": 3})
    assert not _says_as_much({"run": "x", "steps": 2}, recorded)
