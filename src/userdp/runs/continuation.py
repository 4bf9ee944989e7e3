"""A new process that goes on with a run: from which step on it draws numbers of its own.

Copies of one run may go on, each by itself. With the same noise, the difference of what they
release would show the data without noise. So steps that were never taken before have other noise in
each of them: the ledger names a nonce, and the noise depends on it.

Who takes part is drawn anew, too, where each step is drawn by itself. Two releases of one cohort
cost more than two releases of two. Where people are dealt out once, they are not dealt again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from userdp.ledger.book import Ledger
from userdp.noise.draw import PURPOSES_OF_STEPS
from userdp.runs.repeated_sums import AnySums, RepeatedSums

# The draws of a step that decide who takes part, and with which rows.
_OF_PEOPLE = frozenset({"cohort", "rows"})


@dataclass
class Continuation:
    """The first step with numbers of its own, and the nonce; none for a run that is new."""

    first: int = 0
    nonce: str = ""

    @staticmethod
    def of(ledger: Ledger, sums: AnySums) -> Continuation:
        """For a process that goes on. With a fixed seed everything is repeated."""
        if ledger.fixed_seed:
            return Continuation()
        # Steps that were charged and never taken have released nothing: they are the first.
        untaken = sums.untaken if isinstance(sums, RepeatedSums) else 0
        return Continuation(ledger.steps - untaken, secrets.token_hex(16))

    def changes(self, ledger: Ledger, purpose: str) -> list[tuple[int, str]]:
        """The steps where the numbers for this purpose change, each with the nonce that counts."""
        is_of_people = purpose in _OF_PEOPLE and ledger.plan.drawn_once is None
        if purpose not in PURPOSES_OF_STEPS and not is_of_people:
            return []
        return [*ledger.continuations, *[(self.first, self.nonce)] * bool(self.nonce)]

    def record_if_due(self, ledger: Ledger, step: int) -> None:
        """Write the nonce before the first step that depends on it is taken."""
        if self.nonce and step >= self.first:
            ledger.go_on(self.first, self.nonce)
            self.nonce = ""
