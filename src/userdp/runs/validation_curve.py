"""The points of a validation curve, and the file that they are kept in.

Every point is about other people than those trained on. Naming a store for evaluation declares that
its people agree to the release of these numbers, or that their records are public. Then the file is
`RUN/validation.jsonl`, and reports, cards and trackers show it. Otherwise it is
`RUN/secret/validation.jsonl`, and nothing else has these numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_FILE, write_file

PUBLIC = Path("validation.jsonl")
SECRET = Path("secret", "validation.jsonl")


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured after `step` steps of a run. A number that is not finite is None.

    `data` names the store, by its keyed fingerprint.
    """

    step: int
    data: str
    loss: float | None
    perplexity: float | None
    accuracy_top1: float
    mean_user_loss: float | None
    worst_decile_loss: float | None
    tokens: int
    users: int

    @property
    def in_words(self) -> str:
        """What is told of it in a line."""
        return "held-out loss " + ("not finite" if self.loss is None else f"{self.loss:.4f}")

    def numbers(self) -> dict[str, float]:
        """What a tracker shows of it."""
        named = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "accuracy_top1": self.accuracy_top1,
            "mean_user_loss": self.mean_user_loss,
            "worst_decile_loss": self.worst_decile_loss,
        }
        return {f"validation/{name}": value for name, value in named.items() if value is not None}


def write_points(place: Path, points: Sequence[Point]) -> None:
    """Replace the file at `place`, whole or not at all."""
    lines = [json.dumps(dataclasses.asdict(point), allow_nan=False) + "\n" for point in points]
    # What a run keeps in its secret directory is for its owner alone.
    mode = OWNER_ONLY_FILE if place.parent.name == SECRET.parent.name else 0o644
    write_file(place, "".join(lines).encode(), mode=mode)


def read_points(place: Path) -> list[Point]:
    """The points in a file, in order; none if there is no file."""
    if not place.is_file():
        return []
    found: list[Point] = []
    for number, line in enumerate(place.read_bytes().splitlines(), start=1):
        try:
            found.append(_point(json.loads(line)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f"{place}, line {number}: not a point of a validation curve. Restore the file, or "
                "delete it."
            ) from None
    return found


def released_curve(run: Path) -> list[Point]:
    """The points of a run that may be shown: all those of the store of the last point."""
    points = read_points(run / PUBLIC)
    return [point for point in points if point.data == points[-1].data]


def _point(row: Any) -> Point:
    point = Point(**row)
    kinds = {"int": int, "str": str, "float": int | float, "float | None": int | float | None}
    for field in dataclasses.fields(Point):
        value = getattr(point, field.name)
        if not isinstance(value, kinds[str(field.type)]) or isinstance(value, bool):
            raise TypeError(field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(field.name)
    return point
