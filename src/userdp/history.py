"""What a model carries: the private runs behind its weights, on disk and in memory.

A run leaves `userdp_ancestry.json` in its model's directory. Whoever loads the model gets it as the
attribute `userdp_ancestry`. A model that is trained in memory gets the attribute, too. Training
such a model further adds to what was spent. Weights that are copied by hand into another model
carry nothing. Then the caller has to say what was spent.

The entries are plain data here; `prices/earlier.py` reads them. The entries are public. Where the
earlier runs keep their own records is private, and it is remembered in memory only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from userdp.errors import LedgerError

ANCESTRY_FILE = "userdp_ancestry.json"
ATTRIBUTE = "userdp_ancestry"
FORMAT = 2

Entry = dict[str, Any]


class Record(Protocol):
    """The part of a ledger that a model's history needs."""

    def as_entry(self) -> Entry | None:
        """What this run has released so far; None if nothing."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """The runs that ended (`entries`), and the one that may still go on (`record`).

    `homes` are the directories of those runs, where they are known; `loaded` are the directories
    that weights were read from. `watched` are the records of runs that the model was copied from
    while they went on: a doubt that comes up later is about the copy's steps, too.
    """

    entries: tuple[Entry, ...] = ()
    record: Record | None = None
    homes: tuple[Path, ...] = ()
    loaded: tuple[Path, ...] = ()
    watched: tuple[Record, ...] = ()

    def all_entries(self) -> tuple[Entry, ...]:
        """Every run behind the weights as they are now."""
        latest = self.record.as_entry() if self.record is not None else None
        own = self.entries if latest is None else (*self.entries, latest)
        now = [entry for record in self.watched if (entry := record.as_entry()) is not None]
        return tuple(_doubted(e, *(n for n in now if n["run"] == e["run"])) for e in own)

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        # A copy of the model stands where the model stands now; what comes later is not its own.
        ongoing = () if self.record is None else (self.record,)
        copied = _rebuilt(*self._fixed())
        return dataclasses.replace(copied, watched=(*self.watched, *ongoing))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._fixed()

    def _fixed(self) -> Fixed:
        return self.all_entries(), self.homes, self.loaded


Fixed = tuple[tuple[Entry, ...], tuple[Path, ...], tuple[Path, ...]]


def _rebuilt(
    entries: tuple[Entry, ...], homes: tuple[Path, ...], loaded: tuple[Path, ...]
) -> History:
    return History(entries=entries, homes=homes, loaded=loaded)


def _doubted(entry: Entry, *others: Entry) -> Entry:
    """The entry with all that it or another entry of the same run tells against it."""
    every = (entry, *others)
    doubts = dict.fromkeys(reason for e in every for reason in e.get("doubts", ()))
    told: Entry = {"doubts": list(doubts)} if doubts else {}
    # Files of earlier versions do not say whether a run chose its rows.
    if chose := next((e["chose_rows"] for e in every if e.get("chose_rows")), None):
        told["chose_rows"] = chose
    return entry | told


class Module(Protocol):
    """The part of a torch module that this file needs."""

    def modules(self) -> Iterable[Any]:
        """The module itself and everything in it."""
        ...


def history_of(model: Module) -> History:
    """What the model and every part of it carry, with each run once."""
    found: dict[int, History] = {}
    for module in model.modules():
        carried = vars(module).get(ATTRIBUTE)
        if isinstance(carried, History):
            found[id(carried)] = carried
    return merged(*found.values())


def merged(*histories: History) -> History:
    """Several histories as one, with each run once.

    `people` numbers say which runs were declared to have other people. They are valid within one
    history only. Numbers from two histories say nothing about each other. So unless one history
    holds all the runs, all of them count as having the same people.
    """
    entries: dict[str, Entry] = {}
    homes: dict[Path, None] = {}
    loaded: dict[Path, None] = {}
    watched: dict[int, Record] = {}
    for history in histories:
        homes.update(dict.fromkeys(history.homes))
        loaded.update(dict.fromkeys(history.loaded))
        watched.update({id(record): record for record in history.watched})
        for entry in history.all_entries():
            # The same run may be carried twice, by an adapter and its base: the longer one holds.
            known = entries.get(entry["run"], entry)
            longer = entry if known["steps"] <= entry["steps"] else known
            entries[entry["run"]] = _doubted(longer, known, entry)
    people = _people([history.all_entries() for history in histories], set(entries))
    return History(
        entries=tuple(e | {"people": people[e["run"]]} for e in entries.values()),
        homes=tuple(homes),
        loaded=tuple(loaded),
        watched=tuple(watched.values()),
    )


def _people(histories: Sequence[tuple[Entry, ...]], runs: set[str]) -> dict[str, Any]:
    """The number of each run's people, by run; 0 for all if the histories do not tell."""
    whole = [{e["run"]: e.get("people") for e in entries} for entries in histories]
    whole = [numbers for numbers in whole if set(numbers) == runs]
    if whole and all(numbers == whole[0] for numbers in whole):
        return whole[0]
    return dict.fromkeys(runs, 0)


def carry(model: Module, history: History) -> None:
    """Let the model and its parts carry `history`: a part may be taken out and trained further."""
    for module in model.modules():
        setattr(module, ATTRIBUTE, history)


def home_of(directory: Path) -> Path | None:
    """The run that a model's directory lies in, at any depth; None if there is none."""
    inside = (above for above in directory.parents if (above / "ledger.jsonl").is_file())
    return next(inside, None)


def read_history(directory: Path) -> History | None:
    """What a saved model says about its past; None if no run made it.

    A model in a run's directory that carries no history is refused.
    """
    path = directory / ANCESTRY_FILE
    home = directory.resolve().parent
    if not path.is_file():
        if directory.is_dir() and (home / "ledger.jsonl").is_file():
            raise LedgerError(
                f"{directory} is the model of a run and lacks {ANCESTRY_FILE}, which says what was "
                "spent on it: training on would forget that. Restore the file, or use a model from "
                "outside the run."
            )
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = cast("list[Entry]", data["runs"])
        sound = data["format"] == FORMAT and all(type(e["steps"]) is int for e in entries)
        sound = sound and all(isinstance(e["run"], str) for e in entries)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sound, entries = False, []
    if not sound or not entries:
        raise LedgerError(
            f"{path} cannot be read, so what was spent on this model is not known. Restore the "
            "file, or start from another model."
        )
    # A link may lead into a run or out of one: both ends are looked at.
    places = tuple(dict.fromkeys((directory.absolute(), directory.resolve())))
    homes = dict.fromkeys(home_of(place) or place.parent for place in places)
    return History(entries=tuple(entries), homes=tuple(homes), loaded=places)


def write_history(directory: Path, history: History) -> None:
    """Write into the directory of a saved model what was spent on it."""
    data = {"format": FORMAT, "runs": list(history.all_entries())}
    (directory / ANCESTRY_FILE).write_text(
        json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
