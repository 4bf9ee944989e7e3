"""Parts of a mechanism that are known by one (epsilon, delta) only: they are added to the rest.

By basic composition a mechanism with such a part costs the part's epsilon more, and its delta is
taken from what the rest may use. That holds where the part comes before or after the rest. Where
both take turns, as the test of a filter and the steps do, docs/accounting.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dp_accounting import dp_event

from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent, EpsilonDeltaDpEvent, combined, repeated


@dataclass(frozen=True, kw_only=True)
class Split:
    """`rest` without the parts that are added, and what these cost together."""

    rest: DpEvent | None
    epsilon: float
    delta: float

    def evaluated(
        self, evaluate: Callable[[DpEvent, float], Evaluation], delta: float
    ) -> Evaluation:
        """The whole at `delta`; `evaluate` prices the rest at what is left of it."""
        left = delta - self.delta
        if left <= 0:
            return Evaluation(epsilon=math.inf, certified_by="nobody", error_bound=0.0)
        if self.rest is None:
            return Evaluation(
                epsilon=self.epsilon, certified_by="basic composition", error_bound=0.0
            )
        found = evaluate(self.rest, left)
        return replace(
            found,
            epsilon=found.epsilon + self.epsilon,
            certified_by=f"{found.certified_by}; basic composition with "
            f"({self.epsilon:g}, {self.delta:g})",
        )


def split(event: DpEvent) -> Split | None:
    """The event and what is added to it; None if there is nothing of that kind in it."""
    found = _split(event)
    return found if found.epsilon or found.delta else None


def _split(event: DpEvent) -> Split:
    if isinstance(event, EpsilonDeltaDpEvent):
        return Split(rest=None, epsilon=event.epsilon, delta=event.delta)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        inner = _split(event.event)
        return Split(
            rest=None if inner.rest is None else repeated(inner.rest, event.count),
            epsilon=inner.epsilon * event.count,
            delta=inner.delta * event.count,
        )
    if isinstance(event, dp_event.ComposedDpEvent):
        parts = [_split(part) for part in event.events]
        rests = [part.rest for part in parts if part.rest is not None]
        return Split(
            rest=combined(rests) if rests else None,
            epsilon=math.fsum(part.epsilon for part in parts),
            delta=math.fsum(part.delta for part in parts),
        )
    return Split(rest=event, epsilon=0.0, delta=0.0)
