"""Which population a store belongs to, and where that population's spending is counted.

The budget of a store lies beside it, in STORE.population, so that it survives when the data is
imported again. A store that was made of another's records names the other's population in its
history, by id and by path. So both count in one file.

A store that was once counted has a note of its population inside: the id, and where the budget lay.
A copy of the store finds the budget there and shares it. If the budget is gone from there, the note
shows that something is missing. A store in object storage has the note there, too, so that a second
home of it begins no budget of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from userdp.budget.file import BudgetFile
from userdp.data import remote
from userdp.data.store import UserStore
from userdp.errors import LedgerError
from userdp.files import durable
from userdp.files.chain import Row

SUFFIX = ".population"
NOTE = "population.json"


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where the spending on a store's people is counted. The file may not be there yet.

    `named` is the id that the store gives for its population, if it gives one.
    """

    store: Path
    file: BudgetFile
    named: str | None

    def ensure(self) -> None:
        """Make the file unless it is there, and leave the note in the store."""
        if not self.file.exists:
            self.file.create({"id": secrets.token_hex(16), "instead_of": None})
        if self.named is None:
            _leave_note(self.store, self.file)


def home_of(store: UserStore) -> Home:
    """Where the spending on the people of this store is counted.

    Raises if the store names a population whose file is not there, or is that of another.
    """
    place = store.path.resolve()
    beside = BudgetFile(_beside(place))
    link, note = store.population, _noted(place)
    named = _name_of(link or note)
    if named is None:
        return Home(store=place, file=beside, named=None)
    usual = BudgetFile((place / link["path"]).resolve()) if link else beside
    # A copy of the store alone may lie anywhere: the budget is where it was.
    lay = [BudgetFile(Path(one["lay"])) for one in (link, note) if one and "lay" in one]
    found = _standing_for(named, usual, beside) or _standing_for(named, *lay)[:1]
    if len(found) > 1:
        raise LedgerError(
            f"{place}: its spending is counted in {found[0].directory} and, after a new start, in "
            f"{found[1].directory}. Move one of them away; what it counts is then forgotten."
        )
    if not found:
        raise LedgerError(
            f"{place} belongs to a population whose budget should lie in {usual.directory}, and "
            f"that is {'the budget of another one' if usual.exists else 'not there'}: what was "
            "spent on these people is not known. Move the .population directory along with the "
            f"store it lies beside, or declare a new start with `userdp budget {place} --new`."
        )
    return Home(store=place, file=found[0], named=named)


def begin_anew(store: UserStore) -> Home:
    """A new, empty budget in place of one that is lost. Every statement will say so."""
    place = store.path.resolve()
    link = store.population
    named = _name_of(link or _noted(place))
    try:
        found = home_of(store)
    except LedgerError:
        found = None
    if found is not None or named is None:
        raise LedgerError(
            f"{place}: nothing is lost, so there is nothing to begin anew; what was spent on these "
            "people stays spent."
        )
    file = BudgetFile(_beside(place))
    usual = (place / link["path"]).resolve() if link else file.directory
    for old in (usual, file.directory):
        if old.exists():
            raise LedgerError(
                f"{old} is there, and is damaged or the budget of another population. Move it away "
                "first."
            )
    file.create({"id": secrets.token_hex(16), "instead_of": named})
    return Home(store=place, file=file, named=named)


def link_to(store: UserStore, out: Path) -> dict[str, str]:
    """How a store at `out`, made of this store's records, names the population of both."""
    home = home_of(store)
    home.ensure()
    place = out.parent.resolve() / out.name
    return {
        "id": home.file.rows()[0]["id"],
        "path": os.path.relpath(home.file.directory, place),
        "lay": str(home.file.directory),
    }


def _beside(place: Path) -> Path:
    # Two paths of one store, by a link, must give one budget; so `place` has no links in it.
    return place.with_name(place.name + SUFFIX).resolve()


def _name_of(told: dict[str, str] | None) -> str | None:
    return told["id"] if told else None


def _standing_for(named: str, *files: BudgetFile) -> list[BudgetFile]:
    """Those of the files, each once, that count for the population of this name."""
    each = {file.directory: file for file in files if file.exists}.values()
    return [file for file in each if _stands_for(file.rows()[0], named)]


def _stands_for(first: Row, named: str) -> bool:
    return named in (first.get("id"), first.get("instead_of"))


def _noted(place: Path) -> dict[str, str] | None:
    own = place / NOTE
    try:
        # Another home of the store may have been counted since this one was made.
        content = own.read_bytes() if own.exists() else remote.small_file(place, NOTE)
        if content is None:
            return None
        found: Any = json.loads(content)
        return {"id": str(found["id"]), "lay": str(found["lay"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(
            f"{place / NOTE}: damaged; it names the population of this store. Take it away only if "
            f"the budget in {_beside(place)} is this store's."
        ) from None


def _leave_note(place: Path, budget: BudgetFile) -> None:
    note = {"id": budget.rows()[0]["id"], "lay": str(budget.directory)}
    if _noted(place) == note:
        return
    content = json.dumps(note).encode() + b"\n"
    # Either may be read-only. Then moving it away from its budget is not noticed.
    with contextlib.suppress(OSError):
        durable.write_file(place / NOTE, content, mode=durable.OWNER_ONLY_FILE)
    with contextlib.suppress(OSError):
        remote.put_small_file(place, NOTE, content)
