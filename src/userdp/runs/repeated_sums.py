"""Whether a step that is taken again adds up to the sum that it had the first time.

A run that goes on takes the steps behind its checkpoint again, with the same noise. If their sums
were other ones, the difference of the two releases would show the data without noise. Digests tell
early what has changed (`digests`), as far as it can be described. Here the sums themselves are
compared, so it does not matter what changed them: a callback, a file that a loss reads, a patch.

Of each sum a few totals with random signs are kept in the run's directory of secrets, beside the
key of its noise, until the run is finalized. A difference of length d changes each of them by
about d. What the noise is scaled by is kept as well.

The totals of the last steps may be lost where a machine loses its power. Such a step is judged by
the digests alone.

Secret: the totals, and whether they agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from userdp.errors import FORK, InputError, LedgerError
from userdp.files.chain import write_private
from userdp.files.remembered import SUMS

# Values are first added up in so many columns, and then these with random signs.
_COLUMNS = 4_096
_TOTALS = 16
# How far the sums may be apart, in bounds of one update. On one machine CPUs repeat every bit. GPUs
# do not, unless they are told to, and later steps repeat the differences of earlier ones.
_TOLERANCE = {"cpu": 1e-4}
_USUAL_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What is kept of a step: the numbers that must be the same, and the totals."""

    numbers: list[str]
    totals: list[float]


class RepeatedSums:
    """The sums of a run's steps, as far as they are kept in its directory."""

    def __init__(self, run: Path, key: bytes, known: dict[int, _Row]) -> None:
        self._place = run / SUMS
        self._known = known
        seed = np.frombuffer(hashlib.sha256(b"userdp signs of sums\n" + key).digest(), np.uint32)
        signs = np.random.default_rng(seed).integers(0, 2, (_TOTALS, _COLUMNS)) * 2.0 - 1.0
        self._signs = torch.from_numpy(signs)
        # The totals that a GPU has not computed yet.
        self._waiting: _Waiting | None = None

    @staticmethod
    def begun(run: Path, key: bytes) -> RepeatedSums:
        """Of a run that is about to begin."""
        write_private(run / SUMS, b"")
        return RepeatedSums(run, key, {})

    @staticmethod
    def opened(run: Path, key: bytes, *, after: int) -> RepeatedSums:
        """Of a run that goes on after so many steps."""
        place = run / SUMS
        if not place.is_file() or place.is_symlink():
            raise LedgerError(
                f"{place} is not there: without it nobody can tell whether steps that are taken "
                f"again are the same as before. Restore it, or say {FORK}."
            )
        content = place.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if torn:
            # The process was stopped while it wrote. Nobody has seen a weight of that step.
            with place.open("r+b") as file:
                file.truncate(len(content) - len(torn))
        known: dict[int, _Row] = {}
        try:
            for line in whole.splitlines():
                row = json.loads(line)
                if row["step"] >= after:
                    totals = list(map(float.fromhex, row["totals"]))
                    known[row["step"]] = _Row(numbers=row["numbers"], totals=totals)
        except (KeyError, TypeError, ValueError):
            raise LedgerError(f"{place}: this is no list of sums; restore it.") from None
        return RepeatedSums(run, key, known)

    def of_step(self, step: int, numbers: Sequence[float], *, bound: float) -> SumOfStep:
        """The sum of one step, to be shown piece by piece. `numbers` scale it and its noise."""
        return SumOfStep(self, step, [float(number).hex() for number in numbers], bound)

    def settle(self, seen: SumOfStep) -> None:
        """Keep what was seen of a step, or refuse it if it is not what it was."""
        columns = seen.columns
        assert columns is not None
        before = self._known.pop(seen.step, None)
        if before is None:
            self.flush()
            self._waiting = _Waiting(seen, columns)
            if not columns.is_cuda:
                self.flush()
            return
        now = self._totals(columns.cpu())
        apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(now, before.totals, strict=True)))
        tolerance = _TOLERANCE.get(columns.device.type, _USUAL_TOLERANCE)
        # "Not at most" is also true where a number is not finite.
        is_same = apart / math.sqrt(_TOTALS) <= tolerance * seen.bound
        if not is_same or before.numbers != seen.numbers:
            raise InputError(
                f"step {seen.step + 1} is taken again, and its sum is not the one that it had: "
                "something that decides it has changed since, such as what a callback, a loss or a "
                "file does. With the same noise the difference would show the data, so the step is "
                f"not taken. Put everything back, or say {FORK} to go on with new noise."
            )

    def flush(self) -> None:
        """Write what is waiting for a GPU."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            totals = [total.hex() for total in self._totals(waiting.columns())]
            row = {"step": waiting.step, "numbers": waiting.numbers, "totals": totals}
            # A file that somebody took away is not made anew: others could read it.
            file = os.open(self._place, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, json.dumps(row).encode() + b"\n")
            finally:
                os.close(file)

    def close(self) -> None:
        """Write the rest."""
        # The machine may be the reason why the run ends.
        with contextlib.suppress(OSError, RuntimeError):
            self.flush()

    def _totals(self, columns: Tensor) -> list[float]:
        return (self._signs @ columns).tolist()


class NoSums:
    """Of a run that nobody can go on with, or with a fixed seed: nothing is kept."""

    def of_step(self, step: int, numbers: Sequence[float], *, bound: float) -> None:
        """Nobody looks at the sum."""

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class SumOfStep:
    """What is seen of the sum of one step before it gets its noise."""

    def __init__(self, kept: RepeatedSums, step: int, numbers: list[str], bound: float) -> None:
        self._kept = kept
        self.step, self.numbers, self.bound = step, numbers, bound
        self.columns: Tensor | None = None

    def see(self, values: Tensor) -> None:
        """A piece of the sum, flat. The same pieces come each time."""
        if self.columns is None:
            self.columns = values.new_zeros(_COLUMNS, dtype=torch.float64)
        whole = len(values) - len(values) % _COLUMNS
        self.columns += values[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.float64)
        self.columns[: len(values) - whole] += values[whole:]

    def settle(self) -> None:
        """Everything was seen: raises `InputError` if the step was taken before with another."""
        if self.columns is not None:
            self._kept.settle(self)


class _Waiting:
    """Columns on their way from a GPU, which nobody waits for."""

    def __init__(self, seen: SumOfStep, columns: Tensor) -> None:
        self.step, self.numbers = seen.step, seen.numbers
        self._copied: Any = None
        self._columns = columns
        if columns.is_cuda:
            self._columns = torch.empty(columns.shape, dtype=columns.dtype, pin_memory=True)
            self._columns.copy_(columns, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def columns(self) -> Tensor:
        """The columns, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._columns
