"""The end of a run's secret: nobody can compute its noise again, so nobody can take it out.

Whoever has the noise secret and the steps' weights can subtract the noise. While a run may be
resumed, the secret has to exist. Afterwards it is only a risk.

What is destroyed: the secret of the noise, and the checkpoints, of this run and of the runs that it
was forked from. What is kept: the key of the ledger and the lists of training users, because both
are needed to say who wrote the record and who was trained on. The secret is overwritten before its
name is removed. A solid-state disk, a file system that copies on write, a snapshot or a backup may
still hold the old bytes, and nothing here can reach those.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from userdp.errors import InputError
from userdp.files.durable import sync_directory
from userdp.files.remembered import CHECKPOINTS, SUMS
from userdp.files.rows import RowsFile
from userdp.ledger.book import Ledger
from userdp.runs.files import EARLIER, NOISE_KEY, missing_rows, problems_of
from userdp.statement import Statement


@dataclass(frozen=True, kw_only=True)
class Finalized:
    """What was destroyed, by name inside the run; `statement` says what the run may say."""

    files: tuple[str, ...]
    statement: Statement
    is_finished: bool
    rows_are_missing: bool


def finalize(run: Path, *, unfinished: bool = False) -> Finalized:
    """Destroy the run's noise secret and its checkpoints. It cannot be resumed afterwards.

    An unfinished run is refused, unless `unfinished` says to give up the rest of it. Its whole plan
    stays spent. Calling this again destroys nothing more.
    """
    path = run / "ledger.jsonl"
    # Nobody may take a step while the secret goes.
    file = RowsFile.open(path)
    try:
        ledger = Ledger.read(path, without_torn_row=unfinished)
        if not ledger.is_finished and not unfinished:
            raise InputError(
                f"{run} is not finished, and without its secret it can never be: train --resume "
                "finishes it. Say --unfinished to give up the rest of the run."
            )
        # Asked before the checkpoints go, which show it.
        is_cut = missing_rows(run, ledger) is not None
        files = tuple(
            name
            # The runs that this one was forked from cannot go on, so nobody needs their secrets.
            for place in (run, *sorted((run / EARLIER).glob("[0-9]*")))
            for name in _destroy(run, place)
        )
    finally:
        file.close()
    problems = problems_of(run, ledger)
    statement = ledger.statement(unfinished=bool(problems))
    return Finalized(
        files=files,
        statement=statement,
        is_finished=ledger.is_finished,
        rows_are_missing=is_cut,
    )


def _destroy(run: Path, place: Path) -> list[str]:
    """Destroy the secrets in `place`, which is the run or lies in it; gives their names."""
    keys, checkpoints = [place / NOISE_KEY, place / SUMS], place / CHECKPOINTS
    for one in (*keys, checkpoints):
        if one.is_symlink():
            raise InputError(
                f"{one} is a link, and what it leads to may be somebody else's: destroy that "
                "yourself, then remove the link."
            )
    destroyed: list[str] = []
    for key in keys:
        if key.is_file():
            _overwrite(key)
            key.unlink()
            sync_directory(key.parent)
            destroyed.append(key.relative_to(run).as_posix())
    if checkpoints.is_dir():
        found = (path for path in checkpoints.rglob("*") if not path.is_dir())
        destroyed += sorted(path.relative_to(run).as_posix() for path in found)
        shutil.rmtree(checkpoints)
        sync_directory(place)
    return destroyed


def _overwrite(path: Path) -> None:
    """Put other bytes in the place of a file's bytes, as far as the file system allows it."""
    with path.open("r+b") as file:
        file.write(secrets.token_bytes(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
