"""Whether a step that is taken again adds up to the sum that it had the first time.

A run that goes on takes the steps behind its checkpoint again, with the same noise. If their sums
were other ones, the difference of the two releases would show the data without noise. Digests tell
early what has changed (`digests`), as far as it can be described. Here the sums themselves are
compared, so it does not matter what changed them: a callback, a file that a loss reads, a patch.

What is known of each sum is kept in the run's directory of secrets, beside the key of its noise,
until the run is finalized. What the noise is scaled by is kept as well.

CPUs repeat every bit. There a keyed hash of the sum is kept, and any difference is refused. GPUs
do not. There a few totals with random factors are kept, and a difference of length d changes each
of them by about d. A small difference passes. It is released without noise, so a step is taken
again only a few times.

A process may be stopped between the charge of a step and its sum. The last step may thus lack its
sum: it was not taken, and it gets new noise. No other step may: it was seen, and with new noise it
would be released twice for one charge. On a GPU the last sum is on its way while its step is taken:
such a step is judged by the digests alone. The rest of a run that ended early is never taken.

Secret: the totals, and whether they agree.
"""

from __future__ import annotations

import base64
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
from numpy.typing import NDArray
from torch import Tensor

from userdp.errors import FORK, InputError, LedgerError
from userdp.files.chain import write_private
from userdp.files.remembered import SUMS
from userdp.ranks import Ranks

# A sum is written in rows of this many values. Every row and every column has factors of its own:
# where gradients add up to zero along one of the two, as those of an output layer do, the other
# still shows a difference.
_WIDTH = 4_096
# How many choices of factors there are for the rows, and for the columns with each of them.
_BY_ROW, _BY_COLUMN = 16, 4
# How many rows are converted to float64 at a time.
_ROWS_AT_ONCE = 1_024
# Devices that repeat every bit.
_EXACT = frozenset({"cpu"})
# How many numbers of 32 bits a hash has.
_WORDS = 8
# How far the sums may be apart on other devices, in bounds of one update.
_TOLERANCE = 1e-2
# How often a step is taken again where small differences pass.
_MOST_REPEATS = 10


@dataclass(kw_only=True)
class _Row:
    """What is kept of a step: the numbers that must be the same, and the totals."""

    numbers: list[str]
    totals: NDArray[np.float64]
    repeats: int = 0


class Factors:
    """Random factors for the rows and columns of a sum, the same in each process of a run.

    They are normal numbers. Of random signs, those of two rows would be the same now and then, and
    nobody would see that these two were swapped.
    """

    def __init__(self, key: bytes, rank: int = 0) -> None:
        self._key = hashlib.sha256(b"userdp factors of sums\n" + key).digest()
        self._rank = rank
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def _of(self, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        name = (place, shape, like.device, like.dtype)
        if name not in self._made:
            words = np.frombuffer(self._key, np.uint32).tolist()
            drawn = np.random.default_rng([*words, self._rank, place]).standard_normal(shape)
            self._made[name] = torch.from_numpy(drawn).to(like)
        return self._made[name]

    def of_rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """Those of some rows. The same rows are asked for at each step."""
        return self._of(1 + first, (_BY_ROW, count), like)

    def of_columns(self, like: Tensor) -> Tensor:
        """Those of the columns."""
        return self._of(0, (_BY_ROW, _WIDTH, _BY_COLUMN), like)

    def new_hash(self) -> Any:
        """A hash that only a process of the run can compute."""
        return hashlib.blake2b(key=self._key, person=str(self._rank).encode(), digest_size=32)


class SumOfStep:
    """What is seen of the sum of one step before it gets its noise."""

    def __init__(
        self, factors: Factors, step: int, numbers: Sequence[float], bound: float, device: str
    ) -> None:
        self.step, self.bound = step, bound
        self.numbers = [float(number).hex() for number in numbers]
        # Whether the device repeats every bit.
        self.is_exact = device in _EXACT
        self._factors = factors
        self._hash: Any = None
        self._rows = 0
        # The rows added up with their factors.
        self._folded: Tensor | None = None

    @property
    def size(self) -> int:
        """How many totals there are."""
        return _WORDS if self.is_exact else _BY_ROW * _BY_COLUMN

    def see(self, values: Tensor) -> None:
        """A piece of the sum, flat. The same pieces come each time."""
        if self.is_exact:
            self._hash = self._hash or self._factors.new_hash()
            self._hash.update(values.detach().contiguous().numpy())
            return
        whole = len(values) - len(values) % _WIDTH
        self._add(values[:whole].view(-1, _WIDTH))
        if whole < len(values):
            last = values.new_zeros(1, _WIDTH)
            last[0, : len(values) - whole] = values[whole:]
            self._add(last)

    def _add(self, rows: Tensor) -> None:
        is_wide = rows.device.type == "cpu" or rows.dtype == torch.float64
        dtype = torch.float64 if is_wide else torch.float32
        if self._folded is None:
            self._folded = rows.new_zeros((_BY_ROW, _WIDTH), dtype=dtype)
        # A conversion needs memory, so it is done in parts.
        parts = [rows] if rows.dtype == dtype else rows.split(_ROWS_AT_ONCE)
        for part in parts:
            wide = part.to(dtype)
            self._folded += self._factors.of_rows(self._rows, len(wide), wide) @ wide
            self._rows += len(wide)

    def totals(self) -> Tensor | None:
        """The totals, or the hash as numbers, where the sum is; None if nothing was seen."""
        if self._hash is not None:
            words = np.frombuffer(self._hash.digest(), np.uint32)
            return torch.from_numpy(words.astype(np.float64))
        if self._folded is None:
            return None
        factors = self._factors.of_columns(self._folded)
        return torch.einsum("iw,iwc->ic", self._folded, factors).flatten()


class RepeatedSums:
    """The sums of a run's steps, as far as they are kept in its directory."""

    def __init__(self, run: Path, key: bytes, known: dict[int, _Row], *, untaken: int = 0) -> None:
        self._place = run / SUMS
        self._known = known
        # 1 if the step that was charged last was never taken, else 0.
        self.untaken = untaken
        self._factors = Factors(key)
        # The totals that a GPU has not computed yet.
        self._waiting: _Waiting | None = None

    @staticmethod
    def begun(run: Path, key: bytes) -> RepeatedSums:
        """Of a run that is about to begin."""
        write_private(run / SUMS, b"")
        return RepeatedSums(run, key, {})

    @staticmethod
    def opened(
        run: Path, key: bytes, steps: tuple[int, int], device: str, *, is_settled: bool = False
    ) -> RepeatedSums:
        """The sums of a run that goes on. `steps` are those of its checkpoint and those begun.

        `is_settled`: rows after the last of them show that its sum was kept.
        """
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
                if "repeats" in row:
                    if row["step"] in known:
                        known[row["step"]].repeats = int(row["repeats"])
                elif steps[0] <= row["step"] < steps[1]:
                    totals = np.frombuffer(base64.b64decode(row["totals"]), np.float64)
                    known[row["step"]] = _Row(numbers=row["numbers"], totals=totals)
        except (KeyError, TypeError, ValueError):
            raise LedgerError(f"{place}: this is no list of sums; restore it.") from None
        lost = [step for step in range(*steps) if step not in known]
        # A step is charged after the sum of the step before is written, so only the last may lack
        # its own.
        if lost and (is_settled or lost != [steps[1] - 1]):
            raise LedgerError(
                f"{place} lacks the sum of step {lost[0] + 1}, which was charged: nobody can tell "
                f"whether it is the same when it is taken again. Restore the file, or say {FORK}."
            )
        # On a CPU a sum is written before anybody sees a weight of its step. On a GPU the last one
        # may come later: that step may have been seen, and with other noise it would be seen twice.
        untaken = len(lost) if device in _EXACT else 0
        return RepeatedSums(run, key, known, untaken=untaken)

    def of_step(
        self, step: int, numbers: Sequence[float], *, bound: float, device: str
    ) -> SumOfStep:
        """The sum of one step, to be shown piece by piece. `numbers` scale it and its noise."""
        return SumOfStep(self._factors, step, numbers, bound, device)

    def settle(self, seen: SumOfStep, totals: Tensor) -> None:
        """Keep what was seen of a step, or refuse it if it is not what it was."""
        before = self._known.pop(seen.step, None)
        if before is None:
            self.flush()
            self._waiting = _Waiting(seen, totals)
            if not totals.is_cuda:
                self.flush()
            return
        now = _numpy(totals)
        most = 0.0 if seen.is_exact else _TOLERANCE * seen.bound
        is_same = now.shape == before.totals.shape and before.numbers == seen.numbers
        apart = math.sqrt(np.mean((now - before.totals) ** 2)) if is_same else math.inf
        # "Not at most" is also true where a number is not finite.
        if not apart <= most:
            raise InputError(
                f"step {seen.step + 1} is taken again, and its sum is not the one that it had: "
                "something that decides it has changed since, such as what a callback, a loss or a "
                "file does, or the machine. With the same noise the difference would show the "
                f"data, so the step is not taken. Put everything back, or say {FORK} to go on with "
                "new noise."
            )
        if apart > 0:
            self._count(seen.step, before.repeats + 1)

    def _count(self, step: int, repeats: int) -> None:
        if repeats > _MOST_REPEATS:
            raise InputError(
                f"step {step + 1} was taken again {_MOST_REPEATS} times. This device rounds "
                "differently each time, and each time a little is released without noise. Say "
                f"{FORK} to go on with new noise, and save more often."
            )
        self._write({"step": step, "repeats": repeats})

    def flush(self) -> None:
        """Write what is waiting for a GPU."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            totals = base64.b64encode(waiting.totals().tobytes()).decode()
            self._write({"step": waiting.step, "numbers": waiting.numbers, "totals": totals})

    def _write(self, row: dict[str, Any]) -> None:
        left = json.dumps(row).encode() + b"\n"
        # A file that somebody took away is not made anew: others could read it.
        file = os.open(self._place, os.O_WRONLY | os.O_APPEND)
        try:
            # A disk that is nearly full takes a part first, and then raises.
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        """Write the rest."""
        # The machine may be the reason why the run ends.
        with contextlib.suppress(OSError, RuntimeError):
            self.flush()


class FollowedSums:
    """On a rank that writes nothing: it tells the first rank the totals of its own part."""

    def __init__(self, key: bytes, rank: int) -> None:
        self._factors = Factors(key, rank)

    def of_step(
        self, step: int, numbers: Sequence[float], *, bound: float, device: str
    ) -> SumOfStep:
        """This rank's part of the sum of one step."""
        return SumOfStep(self._factors, step, numbers, bound, device)

    def settle(self, seen: SumOfStep, totals: Tensor) -> None:
        """The first rank compares."""

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class NoSums:
    """For a run that nobody can go on with, or that has a fixed seed: nothing is kept."""

    def of_step(self, step: int, numbers: Sequence[float], *, bound: float, device: str) -> None:
        """Nobody looks at the sum."""

    def settle(self, seen: SumOfStep, totals: Tensor) -> None:
        """Nothing was seen."""

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


AnySums = RepeatedSums | FollowedSums | NoSums


def settled_together(
    sums: AnySums, seen: SumOfStep | None, ranks: Ranks, *, in_parts: bool, is_repeated: bool
) -> None:
    """Settle a step on all ranks: what one of them refuses, none of them takes.

    `in_parts`: every rank has seen a part of the sum, and not all of it.
    """
    if seen is None:
        return
    totals = seen.totals()
    if in_parts and ranks.count > 1:
        own = np.zeros(seen.size) if totals is None else _numpy(totals)
        totals = torch.from_numpy(ranks.numbers(own.tolist()).sum(0))
    # All ranks come here, also those that saw nothing. Without its totals on the disk a step counts
    # as never taken, so nobody takes it before. Where they come later, nobody waits for new steps.
    is_waited_for = is_repeated or seen.is_exact
    with ranks.together() if is_waited_for else contextlib.nullcontext():
        if totals is not None:
            sums.settle(seen, totals)


def _numpy(totals: Tensor) -> NDArray[np.float64]:
    return totals.detach().double().cpu().numpy()


class _Waiting:
    """Totals on their way from a GPU, which nobody waits for."""

    def __init__(self, seen: SumOfStep, totals: Tensor) -> None:
        self.step, self.numbers = seen.step, seen.numbers
        self._copied: Any = None
        self._totals = totals
        if totals.is_cuda:
            self._totals = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
            self._totals.copy_(totals, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def totals(self) -> NDArray[np.float64]:
        """The totals, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return _numpy(self._totals)
