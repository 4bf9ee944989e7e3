"""The end of a run's secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded_run import write_run
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.runs.check import check_run
from userdp.runs.finalize import finalize

DESTROYED = (
    "secret/noise.key",
    "checkpoints/step-1/manifest.json",
    "checkpoints/step-1/model.safetensors",
)


def test_secret_and_checkpoints_are_destroyed_and_everything_else_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    done = finalize(run)
    after = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert done.files == DESTROYED
    assert before - after == set(DESTROYED)
    assert after < before
    assert "secret/ledger.key" in after
    assert not (run / "checkpoints").exists()
    assert done.statement == Ledger.read(run / "ledger.jsonl").statement()
    assert done.statement.guarantee
    assert check_run(run).ok


def test_a_second_time_destroys_nothing_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    first = finalize(run)
    again = finalize(run)
    assert again.files == ()
    assert again.statement == first.statement


def test_the_bytes_of_the_secret_are_overwritten_before_its_name_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    # Another name of the same bytes shows what becomes of them.
    other = tmp_path / "other"
    other.hardlink_to(run / "secret" / "noise.key")
    before = other.read_bytes()
    finalize(run)
    assert len(other.read_bytes()) == len(before)
    assert other.read_bytes() != before


@pytest.mark.parametrize("torn", [b"", b'{"kind'])
def test_an_unfinished_run_is_given_up_only_if_asked(tmp_path: Path, torn: bytes) -> None:
    run = write_run(tmp_path / "run", finish=False)
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(torn)
    with pytest.raises(InputError, match="not finished" if not torn else "cut short"):
        finalize(run)
    assert (run / "secret" / "noise.key").exists()
    assert (run / "checkpoints").exists()
    done = finalize(run, unfinished=True)
    assert done.files == DESTROYED
    # What was spent stays spent, and nothing is promised.
    assert done.statement.steps == 3
    assert not done.statement.guarantee


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finish=False)
    ledger = Ledger.open(run / "ledger.jsonl")
    try:
        with pytest.raises(LedgerError, match="open already"):
            finalize(run, unfinished=True)
    finally:
        ledger.close()
    assert (run / "secret" / "noise.key").exists()


@pytest.mark.parametrize("name", ["secret/noise.key", "checkpoints"])
def test_what_a_link_leads_to_is_not_destroyed(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    place = run / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        finalize(run)
    assert (tmp_path / "elsewhere").exists()
    assert (run / "secret" / "noise.key").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is this the directory of a run"):
        finalize(tmp_path)
