"""A run as it is counted before its first step: its plan, and what of its past is not counted yet.

Its past is what it paid for, such as a private quantile or tuning, and the runs behind the weights
that it starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from userdp.accounting import events
from userdp.accounting.events import DpEvent
from userdp.budget.spending import Spending, is_at_most, together
from userdp.errors import InputError
from userdp.files.chain import Row
from userdp.prices.earlier import Earlier
from userdp.prices.paid import LONGEST_PHRASE, Paid
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What a run will spend: `steps` steps that cost `event`, which is None without privacy."""

    run: str
    event: DpEvent | None
    steps: int
    adjacency: Adjacency
    what: str = ""
    where: str = ""
    fixed_seed: bool = False
    paid: Sequence[Paid] = ()
    earlier: Sequence[Earlier] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps={self.steps}: a run has at least one step.")

    def row(self, found: Spending) -> Row:
        """The row that counts the run, given what is counted already."""
        new_paid, looks = _uncounted(found, self.run, self.paid, self.adjacency)
        return {
            "kind": "reserve",
            "run": self.run,
            "what": phrase(self.what),
            "where": phrase(self.where),
            "event": None if self.event is None else events.to_json(self.event),
            "steps": self.steps,
            "adjacency": self.adjacency.value,
            "fixed_seed": self.fixed_seed,
            "paid": [item.to_json() for item in new_paid],
            "looks": looks,
            "earlier": [_earlier_row(item) for item in _new_runs(found, self.run, self.earlier)],
        }


def phrase(text: str) -> str:
    """The text as one short printable line, as it is kept and shown.

    >>> phrase("run\\n2")
    'run?2'
    """
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return shown[:LONGEST_PHRASE]


def _earlier_row(item: Earlier) -> Row:
    """A run behind the weights, as a row of the run that inherits it."""
    return {
        "run": item.run,
        "what": f"{item.steps:,} steps behind the weights of a later run",
        "event": None if (event := _past_event(item)) is None else events.to_json(event),
        "steps": item.steps,
        "adjacency": item.adjacency.value,
        "fixed_seed": item.fixed_seed,
        "doubts": list(item.doubts),
    }


def _uncounted(
    found: Spending, run: str, paid: Sequence[Paid], adjacency: Adjacency
) -> tuple[list[Paid], list[str]]:
    """The paid looks that are not counted yet, and the names of those that are."""
    looks = [item for item in paid if found.knows(item, adjacency)]
    # A run that is resumed has counted some of its looks together with itself.
    mine = list(found.paid_by.get(run, ()))
    new: list[Paid] = []
    for item in paid:
        # Asked of each one: a second look may have the same words and the same price.
        if found.knows(item, adjacency):
            continue
        if item in mine:
            mine.remove(item)
        else:
            new.append(item)
    names = {item.entry for item in looks if item.entry is not None}
    return new, sorted(names | found.own_looks.get(run, frozenset()))


def _past_event(item: Earlier) -> DpEvent | None:
    return None if item.non_private else together(item.events())


def _new_runs(found: Spending, run: str, earlier: Sequence[Earlier]) -> list[Earlier]:
    """The runs behind the weights that were on these people and are not counted yet."""
    return [
        item
        for item in earlier
        if item.people == 0 and item.run != run and not _is_counted(found, item)
    ]


def _is_counted(found: Spending, item: Earlier) -> bool:
    """Whether all of a run behind the weights is counted, and not only its first steps."""
    if found.counts(item.run, item.steps):
        return True
    known, event = found.inherited.get(item.run), _past_event(item)
    if known is None:
        return False
    return known.event is None or (event is not None and is_at_most(event, known.event))
