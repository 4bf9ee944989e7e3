"""How updates are clipped, and how far one user can then move their sum. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from userdp.errors import InputError
from userdp.units import Adjacency

# The square of a norm, and a factor between it and the largest norm, must be numbers of float32.
SMALLEST_NORM = 1e-15


@dataclass(frozen=True, kw_only=True)
class FlatClip:
    """Scale a whole update so that its L2 norm is at most S: pi(D, S) = D * min(1, S / ||D||).

    S = `clip_norm`, D the update over all trainable parameters together.
    Reference: McMahan et al. 2018, Eq. 1 (FlatClip).
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check_size("clip_norm", self.clip_norm)

    @property
    def bounds_updates(self) -> bool:
        """Whether there is a bound at all: an infinite clip norm clips nothing."""
        return math.isfinite(self.clip_norm)

    @property
    def bound(self) -> float:
        """The largest norm a clipped update can have."""
        return self.clip_norm

    def sensitivity(self, adjacency: Adjacency) -> float:
        """How far the clipped sum moves between neighbours, per update the user contributes.

        >>> FlatClip(clip_norm=0.5).sensitivity(Adjacency.ADD_REMOVE)
        0.5
        """
        return adjacency.sensitivity_factor * self.bound


@dataclass(frozen=True, kw_only=True)
class PerLayerClip(FlatClip):
    """Clip each of the m layers on its own to S_j = S / sqrt(m); together they have norm S at most.

    A layer is a module with its weight and bias; weights that are shared belong to the first.
    Reference: McMahan et al. 2018, Sec. 2.3 (PerLayerClip).
    """


@dataclass(frozen=True, kw_only=True)
class NormalisedClip(FlatClip):
    """Clip to S and divide by S, so that the learning rate need not follow the clip norm.

    The result has norm 1 at most: D * min(1 / S, 1 / ||D||).
    Reference: De et al. 2022, Sec. 3.1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.clip_norm):
            raise InputError("clip_norm=inf cannot be divided by: give a finite one.")

    @property
    def bound(self) -> float:
        """The largest norm a clipped update can have."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class AutomaticClip:
    """Bring every update to a norm just below 1 whatever its size: D / (||D|| + gamma).

    gamma = `stability` keeps small updates small. There is no clip norm to tune.
    Reference: Bu et al. 2023 (AUTO-S).
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        _check_size("stability", self.stability)

    @property
    def clip_norm(self) -> float:
        """The largest norm a clipped update can have."""
        return 1.0

    @property
    def bounds_updates(self) -> bool:
        """There always is a bound."""
        return True

    @property
    def bound(self) -> float:
        """The largest norm a clipped update can have."""
        return 1.0

    def sensitivity(self, adjacency: Adjacency) -> float:
        """How far the clipped sum moves between neighbours, per update the user contributes."""
        return adjacency.sensitivity_factor * self.bound


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(FlatClip):
    """Flat clipping whose norm follows a quantile of the users' norms, for a price.

    Each step also releases how many updates were within the clip norm, with noise of standard
    deviation s; the next norm is C exp(-eta (share - gamma)). gamma = `target_quantile`, eta =
    `learning_rate`, s = `count_noise`; `clip_norm` is the first step's.
    Reference: Andrew et al. 2021, Alg. 1.
    """

    count_noise: float
    target_quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("count_noise", self.count_noise)
        _check_positive("learning_rate", self.learning_rate)
        if not 0 < self.target_quantile < 1:
            raise InputError(
                f"target_quantile={self.target_quantile} must lie strictly between 0 and 1."
            )
        if not math.isfinite(self.clip_norm):
            raise InputError("clip_norm=inf cannot adapt: give a finite one to begin with.")

    def following(self, noisy_share_within: float) -> AdaptiveClip:
        """The rule of the next step, given the noisy share of updates within this one's norm.

        >>> rule = AdaptiveClip(clip_norm=1.0, count_noise=5.0)
        >>> rule.following(noisy_share_within=0.5).clip_norm
        1.0
        >>> rule.following(noisy_share_within=1.0).clip_norm < 1.0
        True
        """
        factor = math.exp(-self.learning_rate * (noisy_share_within - self.target_quantile))
        return replace(self, clip_norm=max(self.clip_norm * factor, SMALLEST_NORM))


ClipRule = FlatClip | AutomaticClip


def _check_size(name: str, value: float) -> None:
    if not value >= SMALLEST_NORM:
        raise InputError(
            f"{name}={value} must be at least {SMALLEST_NORM:g}: squares of smaller norms have no "
            "place in float32."
        )


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name}={value} must be above 0.")
