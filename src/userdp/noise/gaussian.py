"""Independent Gaussian noise at every step. Needs torch only to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from userdp.noise.contract import NOISES, Noise
from userdp.streams import Streams

if TYPE_CHECKING:
    from torch import Tensor


@NOISES.register
@dataclass(frozen=True, kw_only=True)
class Gaussian(Noise):
    """Fresh N(0, (sigma * sensitivity)^2) on every coordinate; sigma = `noise_multiplier`.

    Reference: Charles et al. 2024, Alg. 1 and 2.

    >>> Gaussian(noise_multiplier=2.0).noise_stddev(0.5)
    1.0
    """

    name: ClassVar[str] = "gaussian"
    title: ClassVar[str] = "Gaussian"
    shares_with_count: ClassVar[bool] = True

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
        """Add independent normal numbers of this standard deviation."""
        from userdp.noise.draw import add_normal_

        add_normal_(
            values, offset=offset, size=size, stddev=noise_stddev, step=step, streams=streams
        )

    @property
    def words(self) -> str:
        """The multiplier."""
        return f"noise_multiplier={self.noise_multiplier:.4g}"
