"""Pictures for the terminal, made of block characters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"


def bar(fraction: float, width: int) -> str:
    """A bar that fills `fraction` of `width` characters, to an eighth of a character.

    >>> len(bar(0.5, 10))
    5
    """
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return BLOCKS[8] * full + (BLOCKS[rest] if rest else "")


def log2_histogram(counts: NDArray[np.int64], width: int = 40) -> str:
    """How many users (or records) have 1, 2-3, 4-7, ... of something, one bar per line.

    >>> drawn = log2_histogram(np.array([1, 1, 2, 5]), width=4).replace(BLOCKS[8], "#")
    >>> [line.strip() for line in drawn.splitlines()]
    ['1 | #### 2', '2 - 3 | ## 1', '4 - 7 | ## 1']
    """
    bins = np.floor(np.log2(np.maximum(counts, 1))).astype(int)
    totals = np.bincount(bins)
    lines: list[str] = []
    for exponent in range(int(bins.min()), len(totals)):
        total = totals[exponent]
        low, high = 2**exponent, 2 ** (exponent + 1) - 1
        label = f"{low:,}" if low == high else f"{low:,} - {high:,}"
        lines.append(f"{label:>15} | {bar(total / totals.max(), width)} {total:,}")
    return "\n".join(lines)
