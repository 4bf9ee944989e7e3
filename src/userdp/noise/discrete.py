"""Discrete Gaussian noise on an integer grid: the hardened mode. Needs torch only to add.

The clipped sum is rounded to a grid, integer noise is added, and the grid's numbers are released.
Whatever is released is a function of whole numbers whose distribution is known exactly. So nobody
can read more from the gaps between floating-point numbers (Mironov 2012; Jin et al. 2021).

Sensitivity. Two neighbours' sums are at most C apart. Rounding moves each coordinate of each sum by
at most half a grid step, so the rounded sums are at most C / g + sqrt(d) grid steps g apart, over d
coordinates. The noise's standard deviation is at least the multiplier times that. The grid is
chosen from public numbers so that sqrt(d) is at most a thousandth of C / g.

Price. Integer noise on integers that are s apart (in the L2 norm) has, at whole orders, exactly the
Renyi divergences of Gaussian noise (`docs/accounting.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from userdp.noise.contract import NOISES, Noise
from userdp.streams import Streams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

# Rounding may add this share of the clip norm to the sensitivity.
ROUNDING_SHARE = 1e-3
# Room for the rounding errors of the few operations that compute the sensitivity.
_ROOM = 2.0**-40


@NOISES.register
@dataclass(frozen=True, kw_only=True)
class Discrete(Noise):
    """The sum rounded to a grid, plus integer noise of the stated size on every coordinate.

    Reference: Canonne, Kamath and Steinke 2020; Kairouz, Liu and Steinke 2021.

    >>> Discrete(noise_multiplier=2.0).noise_stddev(0.5)
    1.0
    """

    name: ClassVar[str] = "discrete"
    title: ClassVar[str] = "discrete Gaussian"
    not_covered: ClassVar[str] = (
        "rounding errors of the clipped sum itself, before it is put on the grid; attacks on timing"
    )

    def add_(
        self,
        values: Tensor,
        *,
        offset: int,
        size: int,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        """Round to the grid and add integers, in grid steps."""
        if noise_stddev == 0:
            return
        import torch

        from userdp.noise import draw

        grid, variance = lattice(
            noise_stddev / self.noise_multiplier, size, noise_multiplier=self.noise_multiplier
        )
        flat, length = values.view(-1), draw.PIECE
        for piece in range(offset // length, -(-(offset + len(flat)) // length)):
            start = piece * length
            # A piece is always drawn whole: a number depends on those that are drawn before it.
            noise = draw.drawn_once(
                piece,
                (streams, step, variance, size),
                partial(_drawn, min(length, size - start), variance, streams, step, piece),
            )
            first, last = max(start, offset), min(start + len(noise), offset + len(flat))
            part = flat[first - offset : last - offset]
            # The grid is a power of two, so dividing and multiplying by it is exact. A float32
            # cannot hold every multiple; the nearest one that it can hold is a multiple, too.
            steps = torch.round(part.double() / grid).long()
            steps += torch.from_numpy(noise[first - start : last - start]).to(part.device)
            part.copy_(steps.double() * grid)

    @property
    def words(self) -> str:
        """The multiplier, and that the noise is on a grid."""
        return f"noise_multiplier={self.noise_multiplier:.4g}, whole numbers on a grid"


def _drawn(count: int, variance: int, streams: Streams, step: int, piece: int) -> NDArray[np.int64]:
    from userdp.noise.discrete_draw import discrete_gaussian

    return discrete_gaussian(count, variance=variance, rng=streams.rng(step, piece))


def lattice(sensitivity: float, size: int, *, noise_multiplier: float) -> tuple[float, int]:
    """The grid step, a power of two, and the noise's variance in squared grid steps.

    `sensitivity` is what one update can move the sum by, C. `size` is the number of coordinates.

    Guarantee: sqrt(variance) >= noise_multiplier * (C / grid + sqrt(size)).

    >>> lattice(1.0, 1, noise_multiplier=1.0)
    (0.0009765625, 1050626)
    """
    _, exponent = math.frexp(ROUNDING_SHARE * sensitivity / math.sqrt(size))
    grid = math.ldexp(1.0, exponent)
    if grid * math.sqrt(size) > ROUNDING_SHARE * sensitivity:
        grid /= 2
    apart = (sensitivity / grid + math.sqrt(size)) * (1 + _ROOM)
    return grid, math.ceil((Fraction(noise_multiplier) * Fraction(apart)) ** 2)
