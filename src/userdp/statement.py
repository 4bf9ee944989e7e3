"""The privacy statement: what is promised, to whom, under which assumptions, and what is not.

A statement is made by a plan from what a ledger says was done; nothing else prints an epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any


def round_up(epsilon: float) -> float:
    """Epsilon as printed: two decimals, three to six significant digits, never less.

    Six digits are what the format `g` keeps: with more, printing would round again, to nearest.

    >>> round_up(7.991), round_up(0.01234), round_up(8.0), round_up(0.0), round_up(12345.62)
    (8.0, 0.0124, 8.0, 0.0, 12345.7)
    """
    if not math.isfinite(epsilon) or epsilon == 0:
        return epsilon
    magnitude = math.floor(math.log10(epsilon))
    digits = min(max(2, 2 - magnitude), 5 - magnitude)
    step = Decimal(1).scaleb(-digits)
    return float(Decimal(repr(epsilon)).quantize(step, rounding=ROUND_CEILING))


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What may be said about a model. `epsilon` is infinite when nothing is promised.

    `paid` lists every look at the users' data beside the steps; `epsilon` includes them.
    """

    epsilon: float
    delta: float
    adjacency: str
    neighbours: str
    sampler: str
    mechanism: str
    steps: int
    num_users: int
    certified_by: str
    promise: str
    unit: str = "user"
    paid: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether anything is promised at all."""
        return math.isfinite(self.epsilon)

    @property
    def sentence(self) -> str:
        """The guarantee in one sentence."""
        if not self.is_private:
            return "No privacy guarantee."
        return (
            f"(epsilon={round_up(self.epsilon):g}, delta={self.delta:g}) differential privacy at "
            f"user level, {self.adjacency}: {self.neighbours}."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; epsilon rounded up, or null when nothing is promised."""
        data = dataclasses.asdict(self)
        data["epsilon"] = round_up(self.epsilon) if self.is_private else None
        return {"guarantee": self.is_private, "sentence": self.sentence} | data

    def __str__(self) -> str:
        lines = [self.sentence, f"{self.steps:,} steps, {self.sampler}, {self.mechanism}"]
        lines += [f"certified by {self.certified_by}"] if self.is_private else []
        for title, entries in (
            ("paid for", self.paid),
            ("caution", self.cautions),
            ("assumes", self.assumptions),
            ("not covered", self.not_covered),
        ):
            lines += [f"{title}: {entry}" for entry in entries]
        return "\n".join(lines)
