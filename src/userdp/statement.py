"""The privacy statement: what is promised, to whom, under which assumptions, and what is not.

A plan makes a statement from what the ledger says was done. Nothing else prints an epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any


def round_up(epsilon: float) -> float:
    """Epsilon as it is printed: two decimals, three to six significant digits, rounded up.

    The format `g` keeps six digits. With more, printing would round again, to nearest.

    >>> round_up(7.991), round_up(0.01234), round_up(8.0), round_up(0.0), round_up(12345.62)
    (8.0, 0.0124, 8.0, 0.0, 12345.7)
    """
    if not math.isfinite(epsilon) or epsilon == 0:
        return epsilon
    magnitude = math.floor(math.log10(epsilon))
    digits = min(max(2, 2 - magnitude), 5 - magnitude)
    step = Decimal(1).scaleb(-digits)
    return float(Decimal(repr(epsilon)).quantize(step, rounding=ROUND_CEILING))


def epsilon_text(epsilon: float) -> str:
    """Epsilon as text. It is printed this way everywhere, so that it never reads lower.

    >>> epsilon_text(3.000157), epsilon_text(8.0)
    ('3.01', '8')
    """
    return f"{round_up(epsilon):g}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What may be said about a model. `epsilon` is infinite if nothing was protected.

    `paid` lists every look at the users' data beside the steps, and `earlier` every run behind the
    weights this one started from; `epsilon` includes both. `unit` is who is protected, `sampling`
    what one coin decides. `epsilon` is what the record prices: it is promised only if `guarantee`
    holds. `others` are further releases about the same people, known when the run ended, and
    `epsilon_of_all` is that of all of them together with this one: None if there are none, or if
    they have no price together. `promise` is empty where no reassuring words go with it. `doubts`
    are what was seen to be wrong while the run went on, and a delta that protects nobody.

    A `mark` is why nothing is promised, by choice (`prices/marks.py`). It comes first in every
    text. `epsilon` is then still what all of a user's records cost, and `record_level_epsilon`,
    `hypothetical_epsilon` or `as_if_epsilon` is what the mark prices.
    """

    epsilon: float
    delta: float
    adjacency: str
    neighbours: str
    sampler: str
    noise: str
    mechanism: str
    steps: int
    num_users: int
    certified_by: str
    promise: str
    unit: str = "user"
    sampling: str = "user"
    mark: str = ""
    record_level_epsilon: float | None = None
    hypothetical_epsilon: float | None = None
    as_if_epsilon: float | None = None
    paid: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    epsilon_of_all: float | None = None
    model_check: str = ""
    fixed_seed: bool = False
    unfinished: bool = False
    doubts: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether everything that was recorded has a finite price."""
        return math.isfinite(self.epsilon)

    @property
    def guarantee(self) -> bool:
        """Whether anything is promised: not if the noise can be repeated or the record is cut.

        Nor if something was seen to be wrong, nor under a mark.
        """
        return self.is_private and not (self.mark or self._reasons)

    @property
    def sentence(self) -> str:
        """The guarantee in one sentence, or the reason why there is none."""
        priced = (
            f"(epsilon={epsilon_text(self.epsilon)}, delta={self.delta:g}) differential privacy at "
            f"{self.unit} level, {self.adjacency}: {self.neighbours}."
        )
        if self.guarantee:
            return priced
        if self.mark:
            return " ".join([f"{self.mark}.", *self._under_the_mark()])
        if not self.is_private:
            return "No privacy guarantee."
        return f"No privacy guarantee: {'; '.join(self._reasons)}. Only planned: {priced}"

    @property
    def _reasons(self) -> list[str]:
        """Why nothing is promised, though there is a price."""
        return [
            *["a fixed seed was used, and whoever knows it can remove the noise"] * self.fixed_seed,
            *["the record is unfinished, and what it leaves out is not counted"] * self.unfinished,
            *self.doubts,
        ]

    def _under_the_mark(self) -> list[str]:
        """What is said after the mark: nothing is promised, and what the mark prices."""
        why = f": {'; '.join(self._reasons)}" if self._reasons else " for the people in the data"
        said = [f"No privacy guarantee{why}."]
        planned = "Only planned, for" if self._reasons else "For"
        if self.record_level_epsilon is not None:
            said.append(
                f"{planned} one record alone, which is one row of tokens: "
                f"{self._numbers(self.record_level_epsilon)} at record level, {self.adjacency}. A "
                "user may have many."
            )
        if self.hypothetical_epsilon is not None:
            said.append(
                f"{planned} the hypothetical people: {self._numbers(self.hypothetical_epsilon)}."
            )
        if self.as_if_epsilon is not None:
            said.append(
                "As if the batches had been drawn by Poisson coins: "
                f"{self._numbers(self.as_if_epsilon)}, {self.adjacency}. That is not what ran."
            )
        if math.isfinite(self.epsilon):
            said.append(
                f"All records of a user in this data cost epsilon={epsilon_text(self.epsilon)}, "
                "which is not claimed."
            )
        return said

    def _numbers(self, epsilon: float) -> str:
        if not math.isfinite(epsilon):
            return "no finite epsilon"
        return f"(epsilon={epsilon_text(epsilon)}, delta={self.delta:g})"

    @property
    def _together(self) -> tuple[str, ...]:
        if not self.others:
            return ()
        if self.epsilon_of_all is None:
            return ("all of these have no epsilon together",)
        return (
            f"together with this model epsilon={epsilon_text(self.epsilon_of_all)}, "
            f"delta={self.delta:g}",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data. `epsilon` is null if nothing is promised, `planned_epsilon` is the price.

        All are rounded up. What is not finite is null.
        """
        data = dataclasses.asdict(self)
        priced = round_up(self.epsilon) if self.is_private else None
        data["epsilon"] = priced if self.guarantee else None
        data["planned_epsilon"] = priced
        for name in (
            "epsilon_of_all",
            "record_level_epsilon",
            "hypothetical_epsilon",
            "as_if_epsilon",
        ):
            value = data[name]
            if value is not None:
                data[name] = round_up(value) if math.isfinite(value) else None
        return {"guarantee": self.guarantee, "sentence": self.sentence} | data

    def __str__(self) -> str:
        lines = [self.sentence, f"{self.steps:,} steps, {self.sampler}, {self.mechanism}"]
        lines += [f"certified by {self.certified_by}"] if self.is_private else []
        lines += [f"model: {self.model_check}"] if self.model_check else []
        for title, entries in (
            ("includes", self.earlier),
            ("paid for", self.paid),
            ("also released", (*self.others, *self._together)),
            ("caution", self.cautions),
            ("assumes", self.assumptions),
            ("not covered", self.not_covered),
        ):
            lines += [f"{title}: {entry}" for entry in entries]
        return "\n".join(lines)
