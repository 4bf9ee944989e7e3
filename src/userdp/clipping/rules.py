"""How updates are clipped, and how far one user can then move their sum. Needs no torch.

A clip rule is its equation: from the norm D of an update to the factor that the update is scaled
by. `clip_norm` is an argument of the equation because an adaptive rule changes it from step to
step, and a captured GPU step reads it from the device. `share` is the part of the bound that an
update may use up: a little less than 1, so that rounding cannot carry it over the bound.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from userdp.errors import InputError
from userdp.parts import Part, Registry

# The square of a norm, and a factor between it and the largest norm, must be numbers of float32.
SMALLEST_NORM = 1e-15


class ClipRule(Part):
    """From the norm of an update to its factor.

    A subclass is a frozen dataclass that sets `name` and has `clip_norm` and `bound`.

    Guarantee that every subclass must keep: factor(norm, clip_norm, share) * norm is at most
    share * bound_at(clip_norm), for every norm.
    """

    # Whether each layer is clipped on its own; `share` is then that of one layer.
    by_layer: ClassVar[bool] = False
    # Whether clipping twice is clipping once, as it is for a projection. Local training clips after
    # every local step.
    is_projection: ClassVar[bool] = False
    clip_norm: float

    @abstractmethod
    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        """What updates of these norms (an array) are multiplied by."""

    @abstractmethod
    def bound_at(self, clip_norm: Any) -> Any:
        """The largest norm a clipped update can have where the clip norm is this one."""

    @property
    def bound(self) -> float:
        """The largest norm a clipped update can have."""
        return self.bound_at(self.clip_norm)

    @property
    def bounds_updates(self) -> bool:
        """Whether there is a bound at all: an infinite clip norm clips nothing."""
        return math.isfinite(self.clip_norm)

    @property
    def changes(self) -> bool:
        """Whether the clip norm can be another one at another step."""
        return self.count_stddev is not None

    @property
    def count_stddev(self) -> float | None:
        """The noise on the count of unclipped updates that each step releases; None if it does not.

        A step's price covers this count: the sum gets more noise for it (`Plan.noise_stddev`).
        """
        return None

    def following(self, noisy_share_within: float | None) -> ClipRule:
        """The rule of the next step; None is given where no count is released."""
        return self

    def at(self, clip_norm: float) -> ClipRule:
        """The same rule with another clip norm; itself if it has none to choose."""
        return replace(self, clip_norm=clip_norm)  # pyright: ignore


CLIP_RULES: Registry[ClipRule] = Registry("clipping")


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class FlatClip(ClipRule):
    """Scale a whole update so that its L2 norm is at most S: pi(D, S) = D * min(1, S / ||D||).

    S = `clip_norm`, D the update over all trainable parameters together.
    Reference: McMahan et al. 2018, Eq. 1 (FlatClip).
    """

    name: ClassVar[str] = "flat"
    is_projection: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {"clip_norm": "clip_norm"}
    clip_norm: float

    def __post_init__(self) -> None:
        _check_size("clip_norm", self.clip_norm)

    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        """min(1, S / ||D||)."""
        return (clip_norm * share / norms).clip(max=1.0)

    def bound_at(self, clip_norm: Any) -> Any:
        """S."""
        return clip_norm

    @property
    def words(self) -> str:
        """How updates are bounded."""
        return f"clip_norm={self.clip_norm:g}"


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class PerLayerClip(FlatClip):
    """Clip each of the m layers on its own to S_j = S / sqrt(m); together they have norm S at most.

    A layer is a module with its weight and bias; weights that are shared belong to the first.
    Reference: McMahan et al. 2018, Sec. 2.3 (PerLayerClip).
    """

    name: ClassVar[str] = "per-layer"
    by_layer: ClassVar[bool] = True

    @property
    def words(self) -> str:
        """How updates are bounded."""
        return f"clip_norm={self.clip_norm:g} split evenly over the layers"


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class NormalisedClip(FlatClip):
    """Clip to S and divide by S, so that the learning rate need not follow the clip norm.

    The result has norm 1 at most: D * min(1 / S, 1 / ||D||).
    Reference: De et al. 2022, Sec. 3.1.
    """

    name: ClassVar[str] = "normalised"
    is_projection: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.clip_norm):
            raise InputError("clip_norm=inf cannot be divided by: give a finite one.")

    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        """min(1, S / ||D||) / S."""
        return super().factor(norms, clip_norm, share) / clip_norm

    def bound_at(self, clip_norm: Any) -> Any:
        """1."""
        return 1.0

    @property
    def words(self) -> str:
        """How updates are bounded."""
        return f"clip_norm={self.clip_norm:g}, divided by it"


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class AutomaticClip(ClipRule):
    """Bring every update to a norm just below 1 whatever its size: D / (||D|| + gamma).

    gamma = `stability` keeps small updates small. There is no clip norm to tune.
    Reference: Bu et al. 2023 (AUTO-S).
    """

    name: ClassVar[str] = "automatic"
    stability: float = 0.01

    def __post_init__(self) -> None:
        _check_size("stability", self.stability)

    @property
    def clip_norm(self) -> float:  # type: ignore[override]
        """The largest norm a clipped update can have."""
        return 1.0

    def factor(self, norms: Any, clip_norm: Any, share: float) -> Any:
        """1 / (||D|| + gamma)."""
        return share / (norms + self.stability)

    def bound_at(self, clip_norm: Any) -> Any:
        """1."""
        return 1.0

    def at(self, clip_norm: float) -> Self:
        """The same rule: it has no clip norm to choose."""
        return self

    @property
    def words(self) -> str:
        """How updates are bounded."""
        return f"automatic clipping to norm 1, stability={self.stability:g}"


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(FlatClip):
    """Flat clipping whose norm follows a quantile of the users' norms, for a price.

    Each step also releases how many updates were within the clip norm, with noise of standard
    deviation s; the next norm is C exp(-eta (share - gamma)). gamma = `target_quantile`, eta =
    `learning_rate`, s = `count_noise`; `clip_norm` is the first step's.
    Reference: Andrew et al. 2021, Alg. 1.
    """

    name: ClassVar[str] = "adaptive"
    keys: ClassVar[Mapping[str, str]] = {
        "clip_norm": "clip_norm",
        "clip_count_noise": "count_noise",
        "clip_quantile": "target_quantile",
    }
    count_noise: float = field(
        metadata={"hint": "A twentieth of the expected cohort size is common."}
    )
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

    @property
    def count_stddev(self) -> float:
        """s."""
        return self.count_noise

    def following(self, noisy_share_within: float | None) -> AdaptiveClip:
        """The rule of the next step, given the noisy share of updates within this one's norm.

        >>> rule = AdaptiveClip(clip_norm=1.0, count_noise=5.0)
        >>> rule.following(noisy_share_within=0.5).clip_norm
        1.0
        >>> rule.following(noisy_share_within=1.0).clip_norm < 1.0
        True
        """
        assert noisy_share_within is not None
        factor = math.exp(-self.learning_rate * (noisy_share_within - self.target_quantile))
        return replace(self, clip_norm=max(self.clip_norm * factor, SMALLEST_NORM))

    @property
    def words(self) -> str:
        """How updates are bounded."""
        return (
            f"clip_norm={self.clip_norm:g} at first, then the {self.target_quantile:g} quantile of "
            f"norms by counts with noise {self.count_noise:g}, paid for in every step"
        )


@CLIP_RULES.register
@dataclass(frozen=True, kw_only=True)
class ScheduledClip(FlatClip):
    """Flat clipping whose norm changes at steps that are named beforehand.

    `phases` are pairs (first step, clip norm); the first begins at step 0. The noise follows the
    clip norm at a constant noise multiplier, so every step has the same price, whatever its phase.
    `taken` is how many steps are done.
    Reference: McMahan et al. 2018, Sec. 3, "Adjusting noise and clipping", Fig. 4 and 8.

    >>> rule = ScheduledClip(phases=((0, 2.0), (1, 0.5)))
    >>> rule.clip_norm, rule.following(None).clip_norm
    (2.0, 0.5)
    """

    name: ClassVar[str] = "schedule"
    keys: ClassVar[Mapping[str, str]] = {"schedule": "phases"}
    # Of the present phase; by default that of the first.
    clip_norm: float = 0.0
    phases: tuple[tuple[int, float], ...] = field(
        metadata={"hint": "Give pairs of a step and the clip norm from it on: [[0, 1.0], ...]."}
    )
    # Where a run stands is no part of the rule.
    taken: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        steps = [first for first, _ in self.phases]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise InputError(
                f"schedule={[list(phase) for phase in self.phases]}: the first phase begins at "
                "step 0, and each later one after the one before."
            )
        for _, norm in self.phases:
            _check_size("a clip norm of the schedule", norm)
            if not math.isfinite(norm):
                raise InputError("a clip norm of the schedule is infinite: give finite ones.")
        if self.clip_norm == 0.0:
            object.__setattr__(self, "clip_norm", self._norm_at(self.taken))
        super().__post_init__()

    def _norm_at(self, step: int) -> float:
        return [norm for first, norm in self.phases if first <= step][-1]

    @property
    def changes(self) -> bool:
        """At the steps of the schedule."""
        return len(self.phases) > 1

    def following(self, noisy_share_within: float | None) -> ScheduledClip:
        """The rule of the next step."""
        del noisy_share_within
        taken = self.taken + 1
        if all(first != taken for first, _ in self.phases):
            return replace(self, taken=taken)
        return replace(self, taken=taken, clip_norm=self._norm_at(taken))

    @property
    def words(self) -> str:
        """How updates are bounded."""
        later = [f"{norm:g} from step {first}" for first, norm in self.phases[1:]]
        return ", ".join([f"clip_norm={self.clip_norm:g}", *later])


def one_clip_rule(clip_norm: float | None, clip: ClipRule | None) -> ClipRule:
    """The rule that is given, or flat clipping to the norm that is given, or automatic clipping."""
    if clip is not None and clip_norm is not None:
        raise InputError("give at most one of clip_norm and clip: the first means FlatClip.")
    return clip or (AutomaticClip() if clip_norm is None else FlatClip(clip_norm=clip_norm))


def _check_size(name: str, value: float) -> None:
    if not value >= SMALLEST_NORM:
        raise InputError(
            f"{name}={value} must be at least {SMALLEST_NORM:g}: squares of smaller norms have no "
            "place in float32."
        )


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"{name}={value} must be above 0.")
