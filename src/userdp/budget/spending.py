"""What was spent on a population, from the rows of its budget, and what that comes to.

| row | says |
|---|---|
| `population` | the id; whether the budget takes the place of a lost one |
| `limit` | the epsilon, at a delta, that all releases together may cost; the latest one holds |
| `debit` | a look at the data that is not a run, and its event |
| `reserve` | a run, before its first step, and the event of all planned steps |
| `settle` | the steps that a run really took, and their event |

Events are composed, never epsilons. Everything here is public, except which directories runs are
in.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dp_accounting import dp_event

from userdp.accounting import accountant, added, events
from userdp.accounting.events import DpEvent
from userdp.errors import LedgerError, UnaccountedPlanError
from userdp.files.chain import Row
from userdp.prices.paid import Paid, check_numbers
from userdp.statement import epsilon_text
from userdp.units import Adjacency

FIXED_SEED = (
    "a run with a fixed seed is counted by its plan, and whoever knows the seed can remove its "
    "noise"
)
NEW_START = (
    "the budget of these people was lost and begun anew by declaration: what was spent on them "
    "before is not counted"
)
NOT_PRIVATE = "a run without privacy is among the releases: no epsilon covers it"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What all releases on a population may cost together: at most `epsilon`, at `delta`."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One release. `event` is None if it has no privacy.

    `run` is the digest of a run's first row, and `entry` the name of a look. `is_planned` says that
    the run did not say yet how many steps it took; `taken` is how many it said the last time.
    """

    what: str
    event: DpEvent | None
    adjacency: Adjacency
    run: str | None = None
    entry: str | None = None
    where: str = ""
    steps: int = 0
    fixed_seed: bool = False
    is_planned: bool = False
    taken: int = 0
    doubts: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What it is, and how many steps it took if they are not those that it planned."""
        taken = f"{self.steps:,} steps"
        if not self.steps or self.is_planned or f" {taken}" in f" {self.what}":
            return self.what
        return f"{self.what}, {taken} taken"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What all releases cost together at `delta`.

    `epsilon` is infinite if some release has no privacy, and None if the releases cannot be added
    up; `problems` then say why. `cautions` belong beside the number.
    """

    epsilon: float | None
    delta: float
    certified_by: str
    problems: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What the rows of a budget say, in the order in which it was spent.

    `runs` has the latest word on each run, also on those that took no step. `entries` are what
    counts.
    """

    limit: Limit | None
    runs: dict[str, Entry]
    looks: dict[str, Entry]
    paid_by: dict[str, list[Paid]]
    inherited: dict[str, Entry]
    own_looks: dict[str, frozenset[str]]
    is_new_start: bool

    @property
    def entries(self) -> list[Entry]:
        """Every release that counts. A run that took no step, and its event, does not."""
        found = list(self.looks.values())
        for run, entry in self.runs.items():
            found += [
                Entry(what=item.what, event=item.event, adjacency=entry.adjacency, run=run)
                for item in self.paid_by[run]
            ]
            found += [entry] if entry.steps else []
        return found + [
            entry for run, entry in self.inherited.items() if not self.counts(run, entry.steps)
        ]

    def counts(self, run: str, steps: int) -> bool:
        """Whether at least so many steps of a run on these people are counted."""
        return run in self.runs and self.runs[run].steps >= steps

    def knows(self, item: Paid, adjacency: Adjacency) -> bool:
        """Whether a paid look is counted already, under the name that it carries."""
        found = self.looks.get(item.entry or "")
        return found is not None and found.event == item.event and found.adjacency is adjacency


def read(rows: Sequence[Row]) -> Spending:
    """What the rows say. Rows that make no sense are refused, even if they are chained."""
    found = Spending(
        limit=None,
        runs={},
        looks={},
        paid_by={},
        inherited={},
        own_looks={},
        is_new_start=bool(rows) and rows[0].get("instead_of") is not None,
    )
    for number, row in enumerate(rows[1:], start=2):
        try:
            found = _after(found, row)
        except LedgerError as error:
            raise LedgerError(f"row {number} of a population's budget: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise LedgerError(
                f"row {number} of a population's budget lacks a field or has a wrong one."
            ) from None
    return found


def _after(found: Spending, row: Row) -> Spending:
    """What is known after one more row."""
    match row["kind"]:
        case "limit":
            return replace(found, limit=Limit(epsilon=row["epsilon"], delta=row["delta"]))
        case "debit":
            look = Entry(
                what=row["what"],
                event=event_of(row["event"]),
                adjacency=Adjacency(row["adjacency"]),
                entry=row["entry"],
            )
            found.looks[row["entry"]] = look
        case "reserve":
            run = row["run"]
            before = found.runs.get(run)
            found.runs[run] = Entry(
                what=row["what"],
                event=event_of(row["event"]),
                adjacency=Adjacency(row["adjacency"]),
                run=run,
                where=row["where"],
                steps=row["steps"],
                fixed_seed=row["fixed_seed"],
                is_planned=True,
                taken=before.taken if before else 0,
                doubts=before.doubts if before else (),
            )
            found.paid_by.setdefault(run, []).extend(Paid.from_json(item) for item in row["paid"])
            found.own_looks[run] = frozenset(row["looks"])
            for item in row["earlier"]:
                entry = Entry(
                    what=item["what"],
                    event=event_of(item["event"]),
                    adjacency=Adjacency(item["adjacency"]),
                    run=item["run"],
                    steps=item["steps"],
                    fixed_seed=item["fixed_seed"],
                    doubts=tuple(item["doubts"]),
                )
                found.inherited[item["run"]] = _larger(found.inherited.get(item["run"]), entry)
        case "settle":
            before = found.runs[row["run"]]
            found.runs[row["run"]] = replace(
                before,
                event=event_of(row["event"]),
                steps=row["steps"],
                is_planned=False,
                taken=max(before.taken, row["steps"]),
                doubts=tuple(row["doubts"]),
            )
        case other:
            raise LedgerError(f"{other!r} is not a kind of row this version can read.")
    return found


def _larger(known: Entry | None, new: Entry) -> Entry:
    """What is counted of a run that was inherited twice, maybe after more steps of it."""
    if known is None:
        return new
    doubts = tuple(dict.fromkeys((*known.doubts, *new.doubts)))
    if known.event is None or (new.event is not None and is_at_most(new.event, known.event)):
        return replace(known, steps=max(known.steps, new.steps), doubts=doubts)
    if new.event is not None and not is_at_most(known.event, new.event):
        # Neither includes the other, so both count.
        new = replace(new, event=together([known.event, new.event]))
    return replace(new, steps=max(known.steps, new.steps), doubts=doubts)


def event_of(written: dict[str, Any] | None) -> DpEvent | None:
    """The event in a row; None for a release without privacy."""
    if written is None:
        return None
    check_numbers(written)
    return events.from_json(written)


def price(entries: Sequence[Entry], delta: float, *, is_new_start: bool = False) -> Spent:
    """What the releases cost together: the exact composition of their events."""
    accountant.check_delta(delta)
    epsilon, certified_by, problems = _composed(entries, delta)
    return Spent(
        epsilon=epsilon,
        delta=delta,
        certified_by=certified_by,
        problems=problems,
        cautions=cautions(entries, is_new_start=is_new_start),
    )


def cautions(entries: Sequence[Entry], *, is_new_start: bool) -> tuple[str, ...]:
    """What belongs beside a number that covers these releases."""
    found = (NEW_START,) * is_new_start
    found += (FIXED_SEED,) * any(entry.fixed_seed for entry in entries)
    doubts = [f"of a release: {doubt}" for entry in entries for doubt in entry.doubts]
    return found + tuple(dict.fromkeys(doubts))


def _composed(entries: Sequence[Entry], delta: float) -> tuple[float | None, str, tuple[str, ...]]:
    if any(entry.event is None for entry in entries):
        return math.inf, "nobody", (NOT_PRIVATE,)
    if not entries:
        return 0.0, "nobody", ()
    kinds = {entry.adjacency: [] for entry in entries}
    for entry in entries:
        kinds[entry.adjacency].append(entry)
    if len(kinds) > 1:
        alone = " and ".join(
            f"{adjacency.value} (epsilon={epsilon_text(alone_epsilon(some, delta))})"
            for adjacency, some in kinds.items()
        )
        return None, "nobody", (f"releases under {alone} adjacency cannot be added up",)
    (adjacency,) = kinds
    event = together([entry.event for entry in entries if entry.event is not None])
    try:
        found = accountant.evaluate(event, delta=delta, adjacency=adjacency)
    except UnaccountedPlanError as error:
        return None, "nobody", (str(error),)
    return found.epsilon, found.certified_by, _problems(event, found.epsilon, delta)


def _problems(event: DpEvent, epsilon: float, delta: float) -> tuple[str, ...]:
    """Why there is no number, if there is none."""
    if math.isfinite(epsilon):
        return ()
    own = added.split(event)
    if own is None or own.delta < delta:
        return (NOT_PRIVATE,)
    return (
        f"the releases need delta={own.delta:g} for what is known by its delta alone, such as the "
        f"threshold of a dictionary: no epsilon covers them at delta={delta:g}, ask for a larger "
        "one",
    )


def alone_epsilon(entries: Sequence[Entry], delta: float) -> float:
    """The epsilon of some releases under one adjacency; infinite if they have no price."""
    epsilon = _composed(entries, delta)[0]
    return math.inf if epsilon is None else epsilon


def together(parts: Iterable[DpEvent]) -> DpEvent:
    """All events as one. Equal steps are counted, so that a hundred equal runs stay one part."""
    merged = [
        event if count == 1 else events.repeated(event, count)
        for event, count in _counted(parts).values()
    ]
    return events.combined(merged) if merged else dp_event.NoOpDpEvent()


def _counted(parts: Iterable[DpEvent]) -> dict[str, tuple[DpEvent, int]]:
    """The events that are neither composed nor repeated, and how often each happens."""
    counts: Counter[str] = Counter()
    atoms: dict[str, DpEvent] = {}

    def count(event: DpEvent, times: int) -> None:
        if isinstance(event, dp_event.ComposedDpEvent):
            for part in event.events:
                count(part, times)
        elif isinstance(event, dp_event.SelfComposedDpEvent):
            count(event.event, times * event.count)
        elif not isinstance(event, dp_event.NoOpDpEvent) and times > 0:
            name = json.dumps(events.to_json(event), sort_keys=True)
            atoms[name] = event
            counts[name] += times

    for part in parts:
        count(part, 1)
    return {name: (atoms[name], times) for name, times in counts.items()}


def covers(counted: Entry, plan: Entry) -> bool:
    """Whether what is counted for a run includes what it plans."""
    if counted.steps < plan.steps or counted.adjacency is not plan.adjacency:
        return False
    if plan.steps == 0 or counted.event is None:
        # Nothing costs more than a run without privacy, and nothing less than no step.
        return True
    return plan.event is not None and is_at_most(plan.event, counted.event)


def is_at_most(part: DpEvent, whole: DpEvent) -> bool:
    """Whether `part` surely costs no more than `whole`. False says only that this is not known.

    It does if it has no step that `whole` has not, or if both are one Gaussian and it has more
    noise.
    """
    if isinstance(part, dp_event.GaussianDpEvent) and isinstance(whole, dp_event.GaussianDpEvent):
        return part.noise_multiplier >= whole.noise_multiplier
    have = _counted([whole])
    return all(
        name in have and times <= have[name][1] for name, (_, times) in _counted([part]).items()
    )
