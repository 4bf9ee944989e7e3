"""Which new batch shapes are compared with the plain loop.

Every new shape is, unless the architecture is proven by tests. Then the first shape that runs newly
compiled code is compared. The same code runs the others: of all shapes the 1st, 2nd, 4th, 8th, ...
is compared, and each that has more rows or longer ones than all that were compared before.
"""

from __future__ import annotations

from typing import Any

from userdp.clipping.batches.users import Users


class ComparedShapes:
    """Remembers which shapes were seen and compared."""

    def __init__(self, *, every_shape: bool, compiles: bool) -> None:
        self._every_shape = every_shape
        self._compiles = compiles
        self._num_shapes = 0
        # The most rows and the longest ones that were compared, and in which shapes.
        self._largest = (0, 0)
        self._compared: set[Any] = set()
        self._compiled: set[Any] = set()

    def compare_next(self, users: Users, key: Any) -> bool:
        """Whether the new shape is one of those that are compared; notes that it is."""
        self._num_shapes += 1
        lengths = (t.shape[1] for t in users.batch.values() if t.dim() > 1)
        size = len(users.weights), max(lengths, default=1)
        is_larger = any(new > most for new, most in zip(size, self._largest, strict=True))
        is_new = self._every_shape and key not in self._compared
        is_new |= self._compiles and self._runs_new_code(users)
        if not (is_new or is_larger or _is_power_of_two(self._num_shapes)):
            return False
        self._largest = max(size[0], self._largest[0]), max(size[1], self._largest[1])
        self._compared.add(key)
        return True

    def _runs_new_code(self, users: Users) -> bool:
        """Whether nothing that was compiled before runs this batch; notes that now something does.

        A ragged batch runs what was compiled for any number of rows (`Execution.any_rows`).
        """
        ranges = users.ranges
        kind: Any = users.shape
        if ranges is not None:
            lengths = tuple((name, tensor.shape[1:]) for name, tensor in users.batch.items())
            kind = (ranges.most_rows, ranges.fewest_rows, lengths)
        is_new = kind not in self._compiled
        self._compiled.add(kind)
        return is_new


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
