"""One budget for all that is released about the same people.

Every store belongs to a population. Whatever reads its people's data is written down in the
population's file before it happens: runs, forks, continued runs, private quantiles, paid tuning.
What all of it costs together is the composition of the events, never a sum of epsilons. With a
limit, a release that would pass it is refused before anything is read or written.

A run reserves the event of all its planned steps before the first one, and settles the steps that
it took when it ends. A run that was killed counts as planned until it is resumed and settles.

What it cannot see: copies of the data elsewhere, and the same people in a store that was imported
under another name.
"""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from userdp.accounting import accountant, events
from userdp.accounting.events import DpEvent
from userdp.budget import spending
from userdp.budget.reservation import Reservation
from userdp.budget.spending import Entry, Limit, Spending, Spent
from userdp.data import belonging
from userdp.data.belonging import Home
from userdp.data.store import UserStore
from userdp.errors import BudgetExhaustedError, InputError, LedgerError
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.statement import epsilon_text
from userdp.units import Adjacency

__all__ = ["DEFAULT_DELTA", "Limit", "Population", "Spent"]

# For a population without a limit: what is told then depends on nobody's plan.
DEFAULT_DELTA = 1e-6

# A statement names this many other releases, and counts the rest.
MOST_NAMED = 20


class Population:
    """The people of a store, and everything that was spent on them.

    `of` finds the population of a store. Reading it spends nothing. It has no state of its own:
    each call reads the file, so several processes may share it.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    @staticmethod
    def of(store: UserStore) -> Population:
        """The population that this store belongs to, alone or with the stores it was made of.

        Raises if what was spent on it is not known, because its file is lost, damaged or that of
        another population.
        """
        found = Population(belonging.home_of(store))
        found._read()
        return found

    @staticmethod
    def begin_anew(store: UserStore) -> Population:
        """A new, empty budget for a store whose budget is lost.

        Every statement of a run on this population then carries a caution: what was spent before is
        not counted.
        """
        return Population(belonging.begin_anew(store))

    @property
    def path(self) -> Path:
        """The directory of the population. It may not be there yet."""
        return self._home.file.directory

    @property
    def id(self) -> str | None:
        """The population's random name; None before anything was spent on it."""
        return self._home.file.rows()[0]["id"] if self._home.file.exists else None

    @property
    def limit(self) -> Limit | None:
        """What all releases may cost together; None if nobody has said so."""
        return self._read().limit

    def set_limit(self, epsilon: float, delta: float) -> None:
        """Say what all releases may cost together. The latest limit holds."""
        accountant.check_epsilon(epsilon)
        accountant.check_delta(delta)
        self._home.ensure()
        with self._home.file.adding() as file:
            file.add({"kind": "limit", "epsilon": float(epsilon), "delta": float(delta)})

    def spent(self, delta: float | None = None) -> Spent:
        """What all releases cost together: by default at the limit's delta, or at 1e-6."""
        found = self._read()
        if delta is None:
            delta = found.limit.delta if found.limit else DEFAULT_DELTA
        return spending.price(found.entries, delta, is_new_start=found.is_new_start)

    def entries(self, delta: float) -> list[dict[str, Any]]:
        """Every release: `what` it was, its `run` if it was one, and the `epsilon` it costs alone.

        The epsilons do not add up to what is spent: events are composed, not epsilons.
        """
        accountant.check_delta(delta)
        priced = _Alone(delta)
        return [
            {
                "what": entry.label,
                "run": entry.run,
                "epsilon": priced.epsilon(entry),
                "where": entry.where,
                "steps": entry.steps,
                "is_planned": entry.is_planned,
                "adjacency": entry.adjacency.value,
                "fixed_seed": entry.fixed_seed,
                "entry": entry.entry,
            }
            for entry in self._read().entries
        ]

    def debit(self, what: str, event: DpEvent, adjacency: Adjacency) -> str:
        """Count a look at the data that is not a run; returns its name once it is on disk.

        `what` is a short public phrase. Call it before the look: raises `BudgetExhaustedError` if
        the limit would be passed, and then nothing is written.
        """
        item = Paid(what=what, event=event)
        self._home.ensure()
        with self._home.file.adding() as file:
            found = spending.read(file.rows)
            new = Entry(what=what, event=event, adjacency=adjacency)
            self._refuse(found, [*found.entries, new], "this look")
            entry = secrets.token_hex(16)
            file.add(
                {
                    "kind": "debit",
                    "entry": entry,
                    "adjacency": adjacency.value,
                    **item.to_json(),
                }
            )
        return entry

    def counts(self, run: str) -> bool:
        """Whether the run with this digest is counted here."""
        return run in self._read().runs

    def check(
        self,
        *,
        event: DpEvent | None,
        steps: int,
        adjacency: Adjacency,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> None:
        """Raise what `reserve` would raise for a new run like this. Nothing is written.

        For the time before a run has a directory; `reserve` still decides.
        """
        if not self._home.file.exists:
            return
        rows = self._home.file.rows()
        found = spending.read(rows)
        plan = Reservation(
            run="", event=event, steps=steps, adjacency=adjacency, paid=paid, earlier=earlier
        )
        self._refuse(found, spending.read([*rows, plan.row(found)]).entries, _this_run(steps))

    def reserve(
        self,
        *,
        run: str,
        what: str,
        where: str,
        event: DpEvent | None,
        steps: int,
        adjacency: Adjacency,
        fixed_seed: bool = False,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> None:
        """Count a run before its first step: all `steps` planned steps, which cost `event`.

        `run` is the digest of the run's first row, and `event` is None for a run without privacy.
        `paid` looks that are not counted yet are counted with it. So are `earlier` runs behind the
        weights, unless they are counted here already or were on people declared to be others.

        A run that is counted already, because it is resumed, is not counted again. If it now plans
        more than what is counted, the larger plan takes the place of the smaller.

        Raises `BudgetExhaustedError` if the limit would be passed, and `InputError` under another
        adjacency than what the limit is for. Then nothing is written.
        """
        planned = Reservation(
            run=run,
            what=what,
            where=where,
            event=event,
            steps=steps,
            adjacency=adjacency,
            fixed_seed=fixed_seed,
            paid=paid,
            earlier=earlier,
        )
        self._home.ensure()
        with self._home.file.adding() as file:
            found = spending.read(file.rows)
            row = planned.row(found)
            # Read back before it is written, so that nothing is written that cannot be read.
            after = spending.read([*file.rows, row])
            before, plan = found.runs.get(run), after.runs[run]
            if before is not None:
                has_more = bool(row["paid"] or row["earlier"])
                if not has_more and spending.covers(before, plan):
                    return
                if not spending.covers(plan, before):
                    raise LedgerError(
                        f"{self.path}: run {run[:12]} is counted there with other steps than it "
                        "now plans. A changed run is another run: fork it, or give it another "
                        "output directory."
                    )
            self._refuse(found, after.entries, _this_run(steps))
            file.add(row)

    def settle(
        self, run: str, steps: int, event: DpEvent | None, *, doubts: Sequence[str] = ()
    ) -> None:
        """Count the `steps` that a run really took, which cost `event`, instead of its plan.

        An event that is not surely smaller than the plan's leaves the plan's in place. At 0 steps
        the run costs nothing; what it paid for stays. A run that was settled is never settled at
        fewer steps. More steps than were planned are counted, and then it raises.
        `doubts` are what was seen to be wrong while the run went on.
        """
        unknown = LedgerError(
            f"{self.path}: no run {run[:12]} is counted there, so there is nothing to settle."
        )
        if not self._home.file.exists:
            raise unknown
        with self._home.file.adding() as file:
            found = spending.read(file.rows)
            before = found.runs.get(run)
            if before is None:
                raise unknown
            if steps < 0:
                raise LedgerError(f"{self.path}: run {run[:12]} cannot have taken {steps:,} steps.")
            # A doubt is never taken back.
            all_doubts = tuple(dict.fromkeys((*before.doubts, *doubts)))
            # If a copy of the run was settled while this one went on, what is released counts.
            is_more = steps > before.steps
            # Runs of one fixed seed have one digest, and so have copies of one run: that this one
            # took fewer steps says nothing of the others.
            if steps < before.taken or (before.fixed_seed and steps < before.steps):
                if all_doubts == before.doubts:
                    return
                steps, event = before.steps, before.event
            elif steps == 0:
                event = None
            elif not is_more and (
                event is None
                or before.event is None
                or not spending.is_at_most(event, before.event)
            ):
                event = before.event
            after = replace(
                before,
                steps=steps,
                event=event,
                is_planned=False,
                doubts=all_doubts,
                taken=max(steps, before.taken),
            )
            if after == before:
                return
            file.add(
                {
                    "kind": "settle",
                    "run": run,
                    "steps": steps,
                    "event": None if event is None else events.to_json(event),
                    "doubts": list(all_doubts),
                }
            )
        if is_more:
            raise LedgerError(
                f"{self.path}: run {run[:12]} took {steps:,} steps, and {before.steps:,} were "
                "counted, because a copy of it was given up or forked. All are counted now; "
                "release one of the copies only."
            )

    def others(
        self, run: str, delta: float, adjacency: Adjacency, *, named: Sequence[str] = ()
    ) -> tuple[tuple[str, ...], float]:
        """The other releases about these people, in words, and the epsilon of everything together.

        For the statement of `run`, which is included in the epsilon. `named` are runs that its
        statement names already, such as those behind its weights. Looks that the run paid for are
        not named again. The epsilon is infinite if a release has no privacy, or if the releases
        cannot be added up. Without another release there are no words, and no epsilon is computed.
        """
        found = self._read()
        own = found.own_looks.get(run, frozenset())
        told = {run, *named}
        others = [
            entry
            for entry in found.entries
            if (entry.run is None or entry.run not in told) and entry.entry not in own
        ]
        if not others:
            return (), 0.0
        priced = _Alone(delta)
        told_as = collections.Counter(priced.in_words(entry) for entry in others)
        words = [
            text if count == 1 else f"{count:,} times: {text}"
            for text, count in list(told_as.items())[:MOST_NAMED]
        ]
        if len(told_as) > MOST_NAMED:
            words.append(f"and {len(told_as) - MOST_NAMED:,} more kinds of releases")
        total = spending.price(found.entries, delta)
        words += total.problems
        words += [f"of another release: {doubt}" for entry in others for doubt in entry.doubts]
        if any(entry.adjacency is not adjacency for entry in found.entries) and not total.problems:
            words.append(f"they are under another adjacency than {adjacency.value}")
            return tuple(words), math.inf
        return tuple(words), math.inf if total.epsilon is None else total.epsilon

    @property
    def cautions(self) -> tuple[str, ...]:
        """What must be said beside every number of this population."""
        found = self._read()
        return spending.cautions(found.entries, is_new_start=found.is_new_start)

    def _read(self) -> Spending:
        return spending.read(self._home.file.rows() if self._home.file.exists else [])

    def _refuse(self, found: Spending, after: Sequence[Entry], what: str) -> None:
        """Raise if these releases together would pass the limit."""
        limit = found.limit
        if limit is None:
            return
        total = spending.price(after, limit.delta)
        if total.epsilon is None:
            raise InputError(
                f"{self.path}: {what} would be counted against a limit, and {total.problems[0]}. "
                "Use the adjacency and the kind of noise of the other releases on these people."
            )
        if total.epsilon > limit.epsilon:
            spent = spending.price(found.entries, limit.delta).epsilon
            spent_text = "an unknown epsilon" if spent is None else f"epsilon={epsilon_text(spent)}"
            store = self._home.store
            way_out = (
                "Take fewer steps or more noise, or raise the limit with `userdp budget "
                f"{store} --limit EPSILON --delta DELTA`."
                if math.isfinite(total.epsilon)
                else f"No limit holds without privacy: `userdp budget {store}` says what was spent."
            )
            raise BudgetExhaustedError(
                f"{spent_text} is spent on these people, of at most {limit.epsilon} at "
                f"delta={limit.delta:g}, and {what} would bring it to "
                f"{epsilon_text(total.epsilon)}: it was refused, and nothing was spent. {way_out}"
            )


class _Alone:
    """Prices of single releases. Equal ones are priced once."""

    def __init__(self, delta: float) -> None:
        self._delta = delta
        self._known: dict[str, float] = {}

    def epsilon(self, entry: Entry) -> float:
        """What the release costs alone; infinite if it has no privacy or no price."""
        name = _name(entry)
        if name not in self._known:
            self._known[name] = spending.alone_epsilon([entry], self._delta)
        return self._known[name]

    def in_words(self, entry: Entry) -> str:
        """A release and its price, without the directory it is in."""
        return f"{entry.label}: alone epsilon={epsilon_text(self.epsilon(entry))}"


def _name(entry: Entry) -> str:
    """A text that is equal for releases of the same price."""
    event = None if entry.event is None else events.to_json(entry.event)
    return f"{entry.adjacency.value} {event}"


def _this_run(steps: int) -> str:
    return f"this run ({steps:,} steps)"
