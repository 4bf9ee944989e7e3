"""Noise that is correlated over the steps: matrix factorisation. Needs torch only to draw.

Every step adds (C^-1 z)_t in place of z_t, with C lower triangular. Noise of one step is partly
taken back by the steps after it, so that less of it is left in the model (docs/noise.md). The price
rests on C's columns (`strategies.sensitivity`) and on how far apart a user's steps are, which the
sampler says (`prices`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from userdp.errors import InputError
from userdp.noise.contract import NOISES, Noise
from userdp.streams import Streams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from userdp.noise.strategies.bands import Bands
    from userdp.noise.strategies.unbanded import Buffered, InverseBands
    from userdp.noise.strategies.workload import Workload

Strategy = Literal["optimised", "toeplitz", "inverse-square-root", "buffered"]


@NOISES.register
@dataclass(frozen=True, kw_only=True)
class Banded(Noise):
    """C^-1 z for `steps` steps, where z has standard deviation sigma * sensitivity.

    sigma = `noise_multiplier`. `strategy` says how C is made:

    | strategy | C | memory |
    |---|---|---|
    | optimised | b bands, the least error | b - 1 vectors |
    | toeplitz | b bands, the least error among those with constant diagonals | b - 1 vectors |
    | inverse-square-root | C^-1 has b bands, closed form | none: z is drawn again |
    | buffered | b - 1 decaying exponentials | b - 1 vectors in float64 |

    b = `bands`. With b = 1 all of them are independent Gaussian noise. C suits what the optimizer
    makes of the noise: prefix sums, or with `workload` = "optimizer" its momentum, decay and
    schedule (`strategies.workload`). A poor choice costs accuracy and no privacy.

    References: Denisov et al. 2022; Choquette-Choo et al. 2024, Alg. 1; McKenna 2024.
    """

    name: ClassVar[str] = "banded"
    title: ClassVar[str] = "correlated Gaussian"
    is_independent: ClassVar[bool] = False
    keys: ClassVar[Mapping[str, str]] = {
        "bands": "bands",
        "strategy": "strategy",
        "workload": "workload",
    }
    bands: int = field(metadata={"hint": "It is the number of steps that share noise."})
    steps: int
    strategy: Strategy = "optimised"
    workload: Literal["prefix-sums", "optimizer"] = "prefix-sums"
    momentum: float = 0.0
    decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    schedule_hold: float = 0.0
    # The numbers of a buffered strategy. Its price depends on them, so they are written down.
    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("bands", self.bands), ("steps", self.steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # type: ignore[redundant-expr]
                raise InputError(f"{name}={value!r} must be a whole number, 1 or more.")
        if self.bands > self.steps:
            raise InputError(
                f"bands={self.bands} of {self.steps} steps: a strategy has at most as many bands "
                "as steps. Lower bands."
            )
        if self.strategy not in ("optimised", "toeplitz", "inverse-square-root", "buffered"):
            raise InputError(
                f"strategy={self.strategy!r} is not known; there are optimised, toeplitz, "
                "inverse-square-root and buffered."
            )
        # Refuses numbers that are no optimizer's.
        _ = self.workload_matrix
        self._check_buffers()

    def _check_buffers(self) -> None:
        if self.strategy != "buffered" or self.bands == 1:
            if self.decays or self.scales:
                raise InputError("decays and scales are those of a buffered strategy: remove them.")
        elif not self.decays:
            found = self._best_buffers(separation=self.steps)
            object.__setattr__(self, "decays", found.decays)
            object.__setattr__(self, "scales", found.scales)
        elif len(self.decays) > self.bands - 1:
            raise InputError(
                f"bands={self.bands} with {len(self.decays)} buffers: there are fewer than bands."
            )

    @classmethod
    def configured(
        cls,
        *,
        steps: int,
        separation: int | None = None,
        optimizer: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Self:
        """The noise of a run. Buffers are chosen for users who come back after `separation` steps.

        `optimizer` are the numbers of the workload, which count if the configuration says so.
        """
        numbers = dict(optimizer or {}) if own.get("workload") == "optimizer" else {}
        made = cls(noise_multiplier=0.0, steps=steps, **numbers, **own)
        if made.strategy != "buffered" or made.bands == 1 or separation is None:
            return made
        found = made._best_buffers(separation=separation)
        object.__setattr__(made, "decays", found.decays)
        object.__setattr__(made, "scales", found.scales)
        return made

    def _best_buffers(self, *, separation: int) -> Buffered:
        from userdp.noise.strategies.buffers import optimised_buffers

        return optimised_buffers(self.workload_matrix, self.bands - 1, min(separation, self.steps))

    def check_steps(self, steps: int) -> None:
        """The strategy is made for one length of run."""
        if steps != self.steps:
            raise InputError(
                f"the noise is correlated over {self.steps:,} steps, and the run has {steps:,}: "
                "give both the same number."
            )

    def over(self, steps: int) -> Noise:
        """The strategy of the same kind for so many steps."""
        if steps == self.steps:
            return self
        return replace(
            self,
            steps=steps,
            bands=min(self.bands, steps),
            warmup_steps=min(self.warmup_steps, steps - 1),
            decays=(),
            scales=(),
        )

    @property
    def is_banded(self) -> bool:
        """Whether contributions that are `bands` steps apart meet no common row of C."""
        return self.bands == 1 or self.strategy in ("optimised", "toeplitz")

    @property
    def workload_matrix(self) -> Workload:
        """The matrix A, from noise to models."""
        from userdp.noise.strategies.workload import Workload

        return Workload(
            steps=self.steps,
            momentum=self.momentum,
            decay=self.decay,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            schedule_hold=self.schedule_hold,
        )

    def matrix(self) -> Bands | InverseBands | Buffered:
        """C. Made when it is first asked for, from the public numbers alone."""
        return _matrix(self.workload_matrix, self.bands, self.strategy, self.decays, self.scales)

    def sensitivity(self, *, separation: int, participations: int) -> float:
        """The norm of C's change, in clip norms, for so many participations so far apart."""
        from userdp.noise.strategies import sensitivity as rules
        from userdp.noise.strategies.bands import Bands

        if self.is_banded:
            # Columns have norm at most 1, whatever the strategy.
            rules.check_separation(self.bands, separation)
            counted = rules.most_participations(
                self.steps, separation=separation, participations=participations
            )
            return counted**0.5
        matrix = self.matrix()
        assert not isinstance(matrix, Bands)
        return rules.toeplitz_sensitivity(
            matrix.coefficients(), separation=separation, participations=participations
        )

    def mixing(self, steps: int) -> NDArray[np.float64]:
        """C^-1 of the first steps, written out."""
        from userdp.noise.strategies.digest import inverse_of

        return inverse_of(self.matrix(), min(steps, self.steps))

    @property
    def digest(self) -> str:
        """The numbers of C, in short. A run goes on only with the same ones."""
        from userdp.noise.strategies.digest import digest_of

        return digest_of(self.matrix())

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
        """Refused: what was added before is not known here."""
        raise InputError("correlated noise has a memory: use what started() gives.")

    def started(self) -> Noise:
        """The noise with its memory, before the first step."""
        from userdp.noise.running import started

        return started(self)

    @property
    def words(self) -> str:
        """The multiplier, the strategy and what it was made for."""
        return (
            f"noise_multiplier={self.noise_multiplier:.4g}, correlated over bands={self.bands} "
            f"({self.strategy} for {self.steps} steps of {self._workload_in_words()})"
        )

    def _workload_in_words(self) -> str:
        numbers = {
            "momentum": f"{self.momentum:g}" if self.momentum else "",
            "decay": f"{self.decay:g}" if self.decay else "",
            "schedule": self.schedule if self.schedule != "constant" else "",
            "warmup_steps": f"{self.warmup_steps}" if self.warmup_steps else "",
            "schedule_hold": f"{self.schedule_hold:g}" if self.schedule_hold else "",
        }
        return ", ".join(f"{n}={v}" for n, v in numbers.items() if v) or "prefix sums"


@functools.lru_cache(maxsize=8)
def _matrix(
    workload: Workload,
    bands: int,
    strategy: Strategy,
    decays: tuple[float, ...],
    scales: tuple[float, ...],
) -> Bands | InverseBands | Buffered:
    import numpy as np

    from userdp.noise.strategies import bands as forms
    from userdp.noise.strategies import unbanded
    from userdp.noise.strategies.optimise import optimised, optimised_toeplitz
    from userdp.noise.strategies.square_root import inverse_square_root

    if bands == 1:
        return forms.identity(workload.steps)
    if strategy == "optimised":
        return optimised(workload, bands)
    if strategy == "toeplitz":
        return optimised_toeplitz(workload, bands)
    if strategy == "inverse-square-root":
        return unbanded.inverse_bands(inverse_square_root(workload, bands), workload.steps)
    return unbanded.buffered(np.array(decays), np.array(scales), workload.steps)
