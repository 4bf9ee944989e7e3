"""A look at the users' data that is not a step, and its price: a phrase and an event.

A look may be a private quantile for the group size, a sweep, or a count. Each is written down as
what was learnt, in a short public phrase, and the event that prices it. The ledger is charged for
all looks before the first step. The statement's epsilon is that of the looks and the steps
together.

Public: everything here. The event's noise hides what the look read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from userdp.accounting import events
from userdp.errors import InputError, LedgerError

FORMAT = 1

# Fields of events that count something.
_WHOLE = (
    *("count", "dataset_size", "truncated_batch_size"),
    *("steps", "participations", "num_users", "cohort_size", "bins"),
)

# Chances were rounded when they were written, so their sum may differ from 1 by this.
_SUM_ERROR = 1e-9

# Fields of events that hold several values.
_LISTS = ("events", "sensitivities", "sampling_probs", "gram")

LARGEST_COUNT = 2**63

# The phrase is for a table. It is not a place to leave data.
LONGEST_PHRASE = 120


@dataclass(frozen=True, kw_only=True)
class Paid:
    """One look at the data: `what` was learnt, in a public phrase, and the `event` it cost.

    >>> from userdp.accounting.quantile import private_quantile
    >>> import numpy as np
    >>> found = private_quantile([3.0] * 90, thresholds=[1, 2, 4], quantile=0.5,
    ...                          noise_multiplier=5.0, rng=np.random.default_rng(0))
    >>> Paid(what="group size by private quantile", event=found.event).to_json()["event"]
    {'type': 'GaussianDpEvent', 'noise_multiplier': 5.0}

    `entry` names the look in the budget of its population, if it was counted there already. A run
    that pays for the look then does not count it there a second time.
    """

    what: str
    event: events.DpEvent
    entry: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.what.strip() or len(self.what) > LONGEST_PHRASE or not self.what.isprintable():
            raise InputError(
                f"what was paid for must be one printable line of 1 to {LONGEST_PHRASE} "
                "characters: it is shown in the statement."
            )
        check_numbers(events.to_json(self.event))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a ledger or a file. The `entry` is in the file alone."""
        return {"what": self.what, "event": events.to_json(self.event)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Paid:
        """What `to_json` wrote; anything that would be priced as something else is refused."""
        try:
            what, written = data["what"], dict[str, Any](data["event"].items())
            event = events.from_json(written)
            same = events.to_json(event) == written
        except (KeyError, TypeError, AttributeError):
            raise LedgerError("a paid item needs `what` and an `event` with its fields.") from None
        if not isinstance(what, str) or not same:
            raise LedgerError("a paid item's phrase or event is not as it was written.")
        return Paid(what=what, event=event)


def write_paid(path: Path, paid: Paid, *, value: float) -> None:
    """Write a paid item and the value it bought. An old file is kept, since each look costs."""
    data: dict[str, Any] = {"format": FORMAT, **paid.to_json(), "value": value}
    if paid.entry is not None:
        data["entry"] = paid.entry
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    except FileExistsError:
        raise InputError(
            f"{path} is there already, and a look it pays for must not be forgotten: name another "
            "file."
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None


def read_paid(path: Path) -> Paid:
    """The item that `write_paid` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{path}: no such file; `userdp quantile --out` writes it.") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not a paid item; `userdp quantile --out` writes one.") from None
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("format") != FORMAT:
        raise InputError(f"{path}: not a paid item; `userdp quantile --out` writes one.")
    written = cast("dict[str, Any]", data)
    entry = written.get("entry")
    if entry is not None and not isinstance(entry, str):
        raise InputError(f"{path}: `entry` must be the name that a population's budget gave it.")
    try:
        return replace(Paid.from_json(written), entry=entry)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def all_events(paid: Sequence[Paid]) -> list[events.DpEvent]:
    """The events alone."""
    return [item.event for item in paid]


def check_numbers(data: Any) -> None:
    """Refuse numbers that no mechanism has. The accountants would take them and ask too little."""
    if isinstance(data, list):
        for entry in cast("list[Any]", data):
            check_numbers(entry)
    elif isinstance(data, dict):
        _check_lists(cast("dict[str, Any]", data))
        for name, value in cast("dict[str, Any]", data).items():
            _check_shape(name, value)
            is_chance = name.startswith("sampling_prob") or name == "delta"
            largest = 1.0 if is_chance else math.inf
            # A probability may be zero, and so may a shift of the sum; counts and noise may not.
            above_zero = name in ("count", "noise_multiplier", "standard_deviation")
            for number in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if isinstance(number, (dict, list)):
                    check_numbers(number)
                elif name == "shape" and number == "inf":
                    continue  # a Poisson number of runs
                elif name != "type" and not _is_sound(number, above_zero, largest):
                    raise LedgerError(
                        f"{name}={number!r} in a paid event is not a number a mechanism can have."
                    )
            if name == "mean" and not (isinstance(value, (int, float)) and value >= 1):
                raise LedgerError(f"mean={value!r} runs in a paid event: at least one is needed.")
            if name in _WHOLE and not (isinstance(value, int) and value >= 1):
                raise LedgerError(
                    f"{name}={value!r} in a paid event is not a whole number above 0."
                )


def _check_shape(name: str, value: Any) -> None:
    """Refuse a list, an event or a number where an event of dp_accounting has something else."""
    entries = cast("list[Any]", value) if isinstance(value, list) else [value]
    are_events = [isinstance(entry, dict) for entry in entries]
    is_right = all(are_events) if name in ("event", "events") else not any(are_events)
    is_right = is_right and not any(isinstance(entry, list) for entry in entries)
    if isinstance(value, list) != (name in _LISTS) or not is_right:
        raise LedgerError(f"{name} in a paid event is not of the kind that an event has.")


def _check_lists(data: dict[str, Any]) -> None:
    """Refuse a mixture unless each move has a chance, and the chances sum to 1."""
    if data.get("type") != "MixtureOfGaussiansDpEvent":
        return
    moves, chances = data.get("sensitivities"), data.get("sampling_probs")
    if not (isinstance(moves, list) and isinstance(chances, list)):
        raise LedgerError("sensitivities and sampling_probs in a paid event must be lists.")
    moves, chances = cast("list[Any]", moves), cast("list[Any]", chances)
    if not moves or len(moves) != len(chances):
        raise LedgerError(
            f"{len(moves)} sensitivities and {len(chances)} sampling_probs in a paid event: there "
            "must be as many of each, and at least one."
        )
    if all(_is_sound(one, above_zero=False, largest=1.0) for one in chances):
        total = math.fsum(chances)
        if abs(total - 1) > _SUM_ERROR:
            raise LedgerError(
                f"sampling_probs in a paid event sum to {total!r}: chances of all moves sum to 1."
            )


def _is_sound(number: Any, above_zero: bool, largest: float) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    if isinstance(number, int) and abs(number) >= LARGEST_COUNT:
        # Whole numbers are unlimited in Python, but not in an accountant.
        return False
    if not math.isfinite(number) or number > largest:
        return False
    return number > 0 if above_zero else number >= 0
