"""The ledger: append-only, chained, on disk before anything is visible."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from userdp.errors import LedgerError
from userdp.files import chain
from userdp.ledger.book import Ledger
from userdp.plan import Plan


def plan(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 100,
        "expected_cohort_size": 10,
        "group_size": 2,
        "steps": 8,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(), path=path, bound_to={"data": "abc"}, fixed_seed=False)
    for _ in range(5):
        ledger.charge_step()
    ledger.finish({"final_weights": "def"})
    return path


def test_ledger_reads_back_as_it_was_written(written: Path) -> None:
    ledger = Ledger.read(written)
    assert ledger.steps == 5
    assert ledger.plan == plan()
    assert not ledger.fixed_seed
    # It was closed before its last step. The whole plan is priced: who closed it may have looked.
    assert ledger.statement() == plan().statement()


def _edit(row: int, change: Callable[[dict[str, object]], object]) -> Callable[[list[str]], None]:
    def apply(lines: list[str]) -> None:
        data = json.loads(lines[row])
        change(data)
        lines[row] = json.dumps(data, sort_keys=True)

    return apply


def _cheaper(data: dict[str, object]) -> None:
    data["plan"]["noise"]["noise_multiplier"] = 9.0  # type: ignore[index]


TAMPERING: dict[str, Callable[[list[str]], object]] = {
    "plan edited": _edit(0, _cheaper),
    "step edited": _edit(2, lambda row: row.update(step=7)),
    "field added": _edit(2, lambda row: row.update(note="x")),
    "seed hidden": _edit(0, lambda row: row.update(fixed_seed=True)),
    "hash edited": _edit(3, lambda row: row.update(hash="0" * 64)),
    "row removed": lambda lines: lines.pop(3),
    "first row removed": lambda lines: lines.pop(0),
    "rows reordered": lambda lines: lines.insert(2, lines.pop(3)),
    "row repeated": lambda lines: lines.insert(3, lines[3]),
    "row cut": lambda lines: lines.__setitem__(-1, lines[-1][:20]),
    "not JSON": lambda lines: lines.__setitem__(2, "step 2"),
    "not an object": lambda lines: lines.__setitem__(2, "[1, 2]"),
    "a number": lambda lines: lines.__setitem__(2, "3"),
    "no hash": _edit(2, lambda row: row.pop("hash")),
    "emptied": lambda lines: lines.clear(),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_tampered_ledger_is_refused(written: Path, how: str) -> None:
    lines = written.read_text().splitlines()
    TAMPERING[how](lines)
    written.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(LedgerError, match="ledger"):
        Ledger.read(written)


def test_ledger_that_is_no_text_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(LedgerError):
        Ledger.read(written)


def _rechained(path: Path, change: Callable[[list[dict[str, object]]], None]) -> None:
    """What a careful owner of the key could write: content changed, tags and hashes made anew."""
    key = chain.read_key(path)
    assert key is not None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["hash"], row["tag"]
    change(rows)
    before, lines = "", []
    for row in rows:
        sealed = chain.sealed(before, row, key)
        before = sealed["hash"]
        lines.append(json.dumps(sealed, sort_keys=True) + "\n")
    path.write_text("".join(lines))


def test_event_that_is_not_the_plans_is_refused_even_with_good_hashes(written: Path) -> None:
    def change(rows: list[dict[str, object]]) -> None:
        rows[0]["event"]["event"]["event"]["noise_multiplier"] = 9.0  # type: ignore[index]

    _rechained(written, change)
    with pytest.raises(LedgerError, match="not the one of the recorded plan"):
        Ledger.read(written)


def test_missing_step_is_refused_even_with_good_hashes(written: Path) -> None:
    _rechained(written, lambda rows: rows.pop(2))  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="consecutive"):
        Ledger.read(written)


def test_a_phase_that_the_plan_does_not_have_is_refused(written: Path) -> None:
    _rechained(written, lambda rows: rows[2].update(clip_norm=0.1))
    with pytest.raises(LedgerError, match="a phase begins that the plan does not have"):
        Ledger.read(written)


def test_newer_format_is_refused(written: Path) -> None:
    _rechained(written, lambda rows: rows[0].update(format=99))
    with pytest.raises(LedgerError, match="format"):
        Ledger.read(written)


def test_ledger_of_a_run_is_never_overwritten(written: Path) -> None:
    before = written.read_bytes()
    with pytest.raises(LedgerError, match="already holds a run"):
        Ledger.create(plan(), path=written, bound_to={}, fixed_seed=False)
    assert written.read_bytes() == before


def test_missing_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is this the directory of a run"):
        Ledger.read(tmp_path / "ledger.jsonl")


def test_charged_step_is_on_disk_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    synced: list[int] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(len(path.read_text().splitlines()))

    monkeypatch.setattr(os, "fsync", watched)
    ledger = Ledger.create(plan(), path=path, bound_to={}, fixed_seed=False)
    for _ in range(3):
        ledger.charge_step()
    ledger.close()
    # The new file's name and its key are on the disk before the first row, then each row is.
    assert synced == [0, 0, 0, 1, 2, 3, 4]


def test_ledger_holds_public_fields_only(written: Path) -> None:
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert set(rows[0]) == {
        "kind",
        "format",
        "plan",
        "event",
        "bound_to",
        "fixed_seed",
        "model_check",
        "data_cautions",
        "nonce",
        "tag",
        "hash",
    }
    assert all(set(row) == {"kind", "step", "tag", "hash"} for row in rows[1:-1])
    assert set(rows[-1]) == {
        "kind",
        "steps",
        "event",
        "digests",
        "model_files",
        "people",
        "tag",
        "hash",
    }


def test_ledger_names_what_it_is_bound_to() -> None:
    digests = {
        Ledger.create(p, bound_to=bound, fixed_seed=False).run_digest
        for p in (plan(), plan(delta=2e-3))
        for bound in ({"data": "a"}, {"data": "b"})
    }
    assert len(digests) == 4


def test_non_private_run_is_recorded_as_such() -> None:
    chosen = plan(noise_multiplier=0.0, clip_norm=float("inf"), non_private=True)
    ledger = Ledger.create(chosen, bound_to={}, fixed_seed=False)
    ledger.charge_step()
    assert ledger.plan == chosen
    assert ledger.statement().sentence == "No privacy guarantee."


def test_reading_has_no_side_effect(written: Path) -> None:
    before = written.read_bytes()
    ledger = Ledger.read(written)
    first = ledger.statement()
    assert ledger.statement() == first
    assert ledger.steps == 5
    assert written.read_bytes() == before


def test_steps_are_counted_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(steps=500), path=path, bound_to={}, fixed_seed=False)
    for _ in range(500):
        ledger.charge_step()
    written = len(ledger._kept.rows)
    ledger.close()
    read = Ledger.read(path)
    assert (written, len(read._kept.rows)) == (1, 1)
    assert (ledger.steps, read.steps) == (500, 500)
    assert ledger.head == read.head == json.loads(path.read_text().splitlines()[-1])["hash"]


def _refusal(path: Path, remembered: tuple[int, str]) -> str:
    """Why the ledger is not opened for a checkpoint; empty if it is."""
    try:
        Ledger.open(path, remembered=remembered).close()
    except LedgerError as error:
        return str(error)
    return ""


def test_a_ledger_without_the_remembered_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(), path=path, bound_to={}, fixed_seed=False)
    positions = [(ledger.steps, ledger.head)]
    for step in range(4):
        ledger.charge_step()
        positions.append((ledger.steps, ledger.head))
        if step == 1:
            ledger.doubt("a reason")
            positions.append((ledger.steps, ledger.head))
    ledger.close()
    assert [steps for steps, _ in positions] == [0, 1, 2, 2, 3, 4]
    lines = path.read_text().splitlines(keepends=True)
    for whole, position in enumerate(positions, start=1):
        # Cut anywhere behind the remembered row, the ledger is taken; cut before it, it is not.
        for length in range(1, len(lines) + 1):
            path.write_text("".join(lines[:length]))
            is_cut = "cut off or replaced since the checkpoint" in _refusal(path, position)
            assert is_cut == (length < whole)
    # The right row, and another number of steps.
    assert "cut off or replaced" in _refusal(path, (1, positions[-1][1]))


def test_a_row_torn_anywhere_is_cut_off_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(), path=path, bound_to={}, fixed_seed=False)
    for _ in range(3):
        ledger.charge_step()
    ledger.close()
    content = path.read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(LedgerError, match="cut short"):
            Ledger.read(path)
        opened = Ledger.open(path)
        assert path.read_bytes() == content[:start]
        assert opened.steps == 2
        opened.charge_step()
        opened.close()
        # The same rows give the same bytes.
        assert path.read_bytes() == content


def test_a_row_that_lacks_only_its_newline_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(), path=path, bound_to={}, fixed_seed=False)
    for _ in range(3):
        ledger.charge_step()
    ledger.close()
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    opened = Ledger.open(path)
    assert opened.steps == 3
    opened.close()
    assert path.read_bytes() == content


def test_a_refused_ledger_is_left_as_it_is(tmp_path: Path, written: Path) -> None:
    torn = written.read_bytes() + b'{"kind": "st'
    written.write_bytes(torn)
    with pytest.raises(LedgerError, match="closed"):
        Ledger.open(written)
    chain.key_path(written).unlink()
    with pytest.raises(LedgerError, match="without the run's key"):
        Ledger.open(written)
    assert written.read_bytes() == torn
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "secret"]


def test_a_ledger_without_a_whole_row_says_that_nothing_was_spent(written: Path) -> None:
    for content in (b"", b'{"bound'):
        written.write_bytes(content)
        with pytest.raises(LedgerError, match="nothing was spent"):
            Ledger.open(written)


def test_after_a_failed_write_nothing_is_charged_and_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan(), path=path, bound_to={}, fixed_seed=False)
    ledger.charge_step()
    content = path.read_bytes()
    write = os.write
    left = [20]

    def full(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, left[0] = left[0], 0
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.charge_step()
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert ledger.steps == 1
    with contextlib.closing(ledger), pytest.raises(LedgerError, match=r"Ledger\.open"):
        ledger.charge_step()
    opened = Ledger.open(path)
    opened.charge_step()
    opened.close()
    assert Ledger.read(path).steps == 2
