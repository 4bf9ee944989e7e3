"""A run behind the weights that this run starts from, and what it cost.

A model that was trained privately carries its cost, and further training adds to it. The events of
all runs are composed, never their epsilons. Every run is taken to be on the same people, unless the
caller declares that they are others. Then each person is in one of the runs, and the statement
gives the largest epsilon of any run.

Public: everything here. `data` is a keyed digest: it names the data, and cannot be computed without
the store's key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from userdp.accounting import events
from userdp.errors import InputError, LedgerError
from userdp.prices.paid import Paid, all_events, check_numbers
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """One earlier run: `steps` steps that cost `event` (None: no price), and what was `paid`.

    `people` is 0 for the people of the run that inherits this; other numbers are people who were
    declared to be others, one number for each such declaration. `doubts` say why nothing is
    promised of the run, where that was seen. `chose_rows` says that a selection or a criterion
    decided which rows took part, or how often: then single records have no price in it.
    """

    run: str
    data: str
    plan: dict[str, Any]
    event: events.DpEvent | None
    steps: int
    adjacency: Adjacency
    fixed_seed: bool
    paid: tuple[Paid, ...] = ()
    people: int = 0
    doubts: tuple[str, ...] = ()
    chose_rows: bool = False

    @property
    def non_private(self) -> bool:
        """Whether the run released something without noise."""
        return self.event is None and self.steps > 0

    def events(self) -> list[events.DpEvent]:
        """Everything that the run used its people's data for."""
        parts = all_events(self.paid)
        if self.event is not None and self.steps > 0:
            parts.append(self.event)
        return parts

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a ledger or a model's directory."""
        return {
            "run": self.run,
            "data": self.data,
            "plan": self.plan,
            "event": None if self.event is None else events.to_json(self.event),
            "steps": self.steps,
            "adjacency": self.adjacency.value,
            "fixed_seed": self.fixed_seed,
            "paid": [item.to_json() for item in self.paid],
            "people": self.people,
            # Only where there are some: entries of runs without any stay as they were.
            **({"doubts": list(self.doubts)} if self.doubts else {}),
            **({"chose_rows": True} if self.chose_rows else {}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Earlier:
        """What `to_json` wrote; anything else is refused."""
        try:
            written = data["event"]
            found = Earlier(
                run=data["run"],
                data=data["data"],
                plan=data["plan"],
                event=None if written is None else events.from_json(written),
                steps=data["steps"],
                adjacency=Adjacency(data["adjacency"]),
                fixed_seed=data["fixed_seed"],
                paid=tuple(Paid.from_json(item) for item in cast("list[Any]", data["paid"])),
                people=data["people"],
                doubts=tuple(str(reason) for reason in cast("list[Any]", data.get("doubts", []))),
                chose_rows=data.get("chose_rows", False) is True,
            )
            same = found.to_json() == {name: data[name] for name in found.to_json()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise LedgerError("an earlier run's entry lacks a field or has a wrong one.") from None
        counts = (found.steps, found.people)
        if not same or any(type(count) is not int or count < 0 for count in counts):
            raise LedgerError("an earlier run's entry is not as it was written.")
        if not found.steps and not found.paid:
            # No run leaves such an entry: with it an edited file would hide what a run spent.
            raise LedgerError("an earlier run's entry says that nothing was spent.")
        if type(found.fixed_seed) is not bool:
            raise LedgerError("an earlier run's entry does not say whether its seed was fixed.")
        check_numbers(data["event"])
        return found


def chose_rows(bound_to: Mapping[str, str]) -> bool:
    """Whether a run that is bound to this did not take all rows alike."""
    return bool(bound_to.get("selection")) or bound_to.get("select", "random") != "random"


def inherited(before: Sequence[Earlier], *, other_people: bool) -> tuple[Earlier, ...]:
    """The runs behind some weights, as a run that starts from them sees them.

    Without a declaration, all of them were on the people of this run. With it, none of them was;
    what was declared among them before stays as it was.
    """
    return tuple(
        dataclasses.replace(item, people=item.people + 1 if other_people else 0) for item in before
    )


def by_people(earlier: Sequence[Earlier]) -> dict[int, list[events.DpEvent]]:
    """The events of each group of people. Group 0 is that of this run, and is always there."""
    groups: dict[int, list[events.DpEvent]] = {0: []}
    for item in earlier:
        groups.setdefault(item.people, []).extend(item.events())
    return groups
