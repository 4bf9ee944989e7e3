"""How updates are clipped, and how far one user can then move their sum. Needs no torch.

Every clip rule is its equation (`contract`): from the norm D of an update to the factor that the
update is scaled by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

from userdp.clipping.contract import (
    CLIP_RULES,
    SMALLEST_NORM,
    ClipRule,
    check_positive,
    check_size,
)
from userdp.errors import InputError

__all__ = [
    "CLIP_RULES",
    "SMALLEST_NORM",
    "AdaptiveClip",
    "AutomaticClip",
    "ClipRule",
    "FlatClip",
    "NormalisedClip",
    "PerLayerClip",
    "PerVectorClip",
    "ScheduledClip",
    "one_clip_rule",
]


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
        check_size("clip_norm", self.clip_norm)

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
class PerVectorClip(FlatClip):
    """Clip each of the m parameter vectors on its own to S_j; together they have norm S at most.

    A vector is one tensor of the model, such as a weight or a bias. With `groups`, it is all
    parameters whose name matches one pattern; the first pattern that matches counts. `norms` are
    the S_j, in the order of the groups or of the model's parameters, and S^2 = sum_j S_j^2. Without
    them S_j = S / sqrt(m), where S = `clip_norm`.
    Reference: McMahan et al. 2018, Sec. 2.3 and 3.1 (11 vectors of its LSTM).

    >>> PerVectorClip(norms=(3.0, 4.0)).clip_norm
    5.0
    """

    name: ClassVar[str] = "per-vector"
    by_layer: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {
        "clip_norm": "clip_norm",
        "clip_groups": "groups",
        "clip_norms": "norms",
    }
    # By default it follows from the `norms`.
    clip_norm: float = 0.0
    groups: tuple[str, ...] = ()
    norms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for norm in self.norms:
            check_size("a norm of clip_norms", norm)
        if self.norms:
            together = math.hypot(*self.norms)
            if self.clip_norm == 0.0:
                object.__setattr__(self, "clip_norm", together)
            if not math.isclose(self.clip_norm, together) or math.isinf(together):
                raise InputError(
                    f"clip_norm={self.clip_norm:g} and clip_norms, which are {together:g} "
                    "together: give finite norms, and leave clip_norm out."
                )
        if self.groups and self.norms and len(self.groups) != len(self.norms):
            raise InputError(
                f"{len(self.groups)} clip_groups and {len(self.norms)} clip_norms: each group "
                "needs one norm."
            )
        super().__post_init__()

    def shares(self, count: int) -> tuple[float, ...]:
        """S_j / S."""
        if not self.norms:
            return super().shares(count)
        if count != len(self.norms):
            raise InputError(
                f"{len(self.norms)} clip_norms for {count} vectors of the model: give one each, in "
                "the order of its parameters, or name clip_groups."
            )
        together = math.hypot(*self.norms)
        return tuple(norm / together for norm in self.norms)

    def vectors(self, names: Sequence[str]) -> list[int]:
        """Every parameter is a vector by itself, or those that match a pattern are one together."""
        if not self.groups:
            return list(range(len(names)))
        found = [
            next((n for n, group in enumerate(self.groups) if fnmatchcase(name, group)), None)
            for name in names
        ]
        for name, number in zip(names, found, strict=True):
            if number is None:
                raise InputError(f"clip_groups: none matches {name!r}. Add one, such as '*'.")
        for number, group in enumerate(self.groups):
            if number not in found:
                raise InputError(f"clip_groups: {group!r} matches no parameter that is left.")
        return [number for number in found if number is not None]

    def at(self, clip_norm: float) -> ClipRule:
        """The same rule with another S, and all S_j in proportion."""
        if clip_norm == self.clip_norm:
            return self
        norms = tuple(norm / self.clip_norm * clip_norm for norm in self.norms)
        return replace(self, clip_norm=clip_norm, norms=norms)

    @property
    def words(self) -> str:
        """How updates are bounded."""
        of = f" of {', '.join(self.groups)}" if self.groups else ""
        if self.norms:
            each = ", ".join(f"{norm:g}" for norm in self.norms)
            return f"clip_norms={each}{of} (together clip_norm={self.clip_norm:g})"
        return f"clip_norm={self.clip_norm:g} split evenly over the parameter vectors{of}"


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
        check_size("stability", self.stability)

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
        check_positive("count_noise", self.count_noise)
        check_positive("learning_rate", self.learning_rate)
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
    # The clip norm of the present phase; by default that of the first phase.
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
            check_size("a clip norm of the schedule", norm)
            if not math.isfinite(norm):
                raise InputError("a clip norm of the schedule is infinite: give finite ones.")
        if self.clip_norm == 0.0:
            object.__setattr__(self, "clip_norm", self._norm_at(self.taken))
        super().__post_init__()

    def _norm_at(self, step: int) -> float:
        return [norm for first, norm in self.phases if first <= step][-1]

    @property
    def changes(self) -> bool:
        """Whether the clip norm changes: it does if there are several phases."""
        return len(self.phases) > 1

    @property
    def last_phase(self) -> int:
        """The first step of the last phase."""
        return self.phases[-1][0]

    def begun_at(self, step: int) -> dict[str, float]:
        """The clip norm of the phase that begins with this step."""
        norms = dict(self.phases)
        return {"clip_norm": norms[step]} if step in norms else {}

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
