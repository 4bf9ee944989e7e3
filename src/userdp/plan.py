"""The one place that joins parts and states the joint guarantee.

A plan is a choice of sampler, clip and noise, a number of steps, and the public numbers. The event
that prices it is looked up by the types of sampler and noise and made from the sampler's own public
parameters, so sampler and accountant cannot disagree; a pair without a rule cannot be built.

Public: everything in a plan. `num_users` and the divisor are declared, never counted from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from userdp.accounting import accountant, events, quantile
from userdp.accounting.certificate import Evaluation
from userdp.clipping.rules import (
    AdaptiveClip,
    AutomaticClip,
    ClipRule,
    FlatClip,
    NormalisedClip,
    PerLayerClip,
)
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise.gaussian import Gaussian
from userdp.paid import Paid, all_events
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.statement import Statement, round_up
from userdp.units import Adjacency

# Sampler and noise -> the theorem that prices one step of them.
_RULES: dict[tuple[type, type], Callable[[Any, Any], events.DpEvent]] = {
    (PoissonUsers, Gaussian): lambda sampler, noise: events.poisson_users_gaussian(
        user_sampling_prob=sampler.user_sampling_prob, noise_multiplier=noise.noise_multiplier
    ),
    (PoissonRecords, Gaussian): lambda sampler, noise: events.poisson_records_gaussian(
        record_sampling_prob=sampler.record_sampling_prob,
        group_size=sampler.group_size,
        noise_multiplier=noise.noise_multiplier,
    ),
}

_CLIP_RULES: dict[str, type[ClipRule]] = {
    kind.__name__: kind
    for kind in (FlatClip, PerLayerClip, NormalisedClip, AutomaticClip, AdaptiveClip)
}

_SAMPLERS: dict[str, type[PoissonUsers | PoissonRecords]] = {
    kind.__name__: kind for kind in (PoissonUsers, PoissonRecords)
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen parts, and what they cost.

    `divisor` is the public expected number of groups a step (E|U| or B in Charles et al. 2024): the
    noised sum is divided by it, never by the realised size, which is secret.
    """

    sampler: PoissonUsers | PoissonRecords
    clip: ClipRule
    noise: Gaussian
    steps: int
    divisor: float
    num_users: int
    delta: float
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    non_private: bool = False

    def __post_init__(self) -> None:
        _check_rule(self.sampler, self.noise)
        _check_counts(num_users=self.num_users, steps=self.steps)
        accountant.check_delta(self.delta)
        if not 1 <= self.divisor < math.inf:
            raise InputError(
                f"a step has {self.divisor:g} expected groups: it takes a number from one up. "
                "Raise the sampling rate or the expected cohort size, or use more users."
            )
        spends = self.noise.noise_multiplier == 0 or not self.clip.bounds_updates
        if spends and not self.non_private:
            raise InputError(
                f"noise_multiplier={self.noise.noise_multiplier:g} with clip_norm="
                f"{self.clip.clip_norm:g} protects nobody. Give both a positive finite value, or "
                "set non_private=True to train without any guarantee."
            )
        if self.noise.noise_multiplier > 0 and not self.clip.bounds_updates:
            raise InputError(
                f"noise_multiplier={self.noise.noise_multiplier:g} with clip_norm=inf is infinite "
                "noise: it is scaled to the clip norm. Set noise_multiplier=0, or clip_norm finite."
            )
        if self.non_private and not spends:
            raise InputError(
                "non_private=True, yet noise and clip norm would protect. Set noise_multiplier=0 "
                "or clip_norm=inf, or leave non_private out."
            )
        # Raises here, not at the first step, if a count leaves no noise for the updates.
        _ = self.noise_stddev

    @staticmethod
    def sample_users(
        *,
        num_users: int,
        expected_cohort_size: float,
        group_size: int,
        steps: int,
        clip_norm: float | None = None,
        clip: ClipRule | None = None,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        adjacency: Adjacency = Adjacency.ADD_REMOVE,
        non_private: bool = False,
        paid: Sequence[Paid] = (),
    ) -> Plan:
        """User-level sampling (ULS): one clipped mean gradient per sampled user.

        Each of `num_users` takes part with probability expected_cohort_size / num_users, with at
        most `group_size` records. Exactly one of `epsilon` and `noise_multiplier` is given;
        `epsilon` is the target of the steps and of what was `paid` before them together.
        Reference: Charles et al. 2024, Alg. 2.
        """
        _check_counts(num_users=num_users, steps=steps)
        _check_expected("expected_cohort_size", expected_cohort_size, num_users, "users")
        sampler = PoissonUsers(
            user_sampling_prob=expected_cohort_size / num_users, group_size=group_size
        )
        return Plan._with_noise(
            sampler,
            divisor=expected_cohort_size,
            num_users=num_users,
            steps=steps,
            clip=_one_clip_rule(clip_norm, clip),
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            non_private=non_private,
            paid=paid,
        )

    @staticmethod
    def sample_records(
        *,
        num_users: int,
        expected_batch_size: float,
        group_size: int,
        steps: int,
        clip_norm: float | None = None,
        clip: ClipRule | None = None,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        num_records: int | None = None,
        adjacency: Adjacency = Adjacency.ADD_REMOVE,
        non_private: bool = False,
        paid: Sequence[Paid] = (),
    ) -> Plan:
        """Example-level sampling (ELS): one clipped gradient per sampled record.

        Every user keeps at most `group_size` records; each takes part with probability
        expected_batch_size / num_records, where `num_records` is a public estimate of how many are
        kept (by default num_users * group_size, the most there can be). `epsilon` is the target of
        the steps and of what was `paid` before them together.
        Reference: Charles et al. 2024, Alg. 1.
        """
        _check_counts(num_users=num_users, steps=steps)
        if num_records is None:
            num_records = num_users * group_size
        _check_expected("expected_batch_size", expected_batch_size, num_records, "records")
        sampler = PoissonRecords(
            record_sampling_prob=expected_batch_size / num_records, group_size=group_size
        )
        return Plan._with_noise(
            sampler,
            divisor=expected_batch_size,
            num_users=num_users,
            steps=steps,
            clip=_one_clip_rule(clip_norm, clip),
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            non_private=non_private,
            paid=paid,
        )

    @staticmethod
    def _with_noise(
        sampler: PoissonUsers | PoissonRecords,
        *,
        clip: ClipRule,
        epsilon: float | None,
        noise_multiplier: float | None,
        delta: float,
        steps: int,
        adjacency: Adjacency,
        paid: Sequence[Paid],
        **public: Any,
    ) -> Plan:
        """The plan with the given noise, or with the least noise that meets `epsilon`."""
        if (epsilon is None) == (noise_multiplier is None):
            raise InputError(
                "give exactly one of epsilon and noise_multiplier: one follows from the other."
            )
        if noise_multiplier is None:
            assert epsilon is not None
            noise_multiplier = calibrate(
                sampler, steps=steps, epsilon=epsilon, delta=delta, adjacency=adjacency, paid=paid
            )
        return Plan(
            sampler=sampler,
            clip=clip,
            noise=Gaussian(noise_multiplier=noise_multiplier),
            delta=delta,
            steps=steps,
            adjacency=adjacency,
            **public,
        )

    @property
    def noise_stddev(self) -> float:
        """The noise on each coordinate of the clipped sum, before the division."""
        # The multiplier counts clip norms under every adjacency: how often a neighbour's updates
        # come and go (C24 Thm. 2 and 3), and that replace exchanges +C for -C, is in the event.
        return self.noise_stddev_of(self.clip)

    def noise_stddev_of(self, clip: ClipRule) -> float:
        """The noise on the clipped sum of a step whose rule is `clip`: adaptive ones change.

        An adaptive rule's noisy count takes a part of the step's price, so the sum gets more noise
        (Andrew et al. 2021, Thm. 1).
        """
        if isinstance(clip, AdaptiveClip) and self.noise.noise_multiplier > 0:
            multiplier = quantile.adaptive_clipping_noise(
                noise_multiplier=self.noise.noise_multiplier, count_noise=clip.count_noise
            )
            return Gaussian(noise_multiplier=multiplier).noise_stddev(clip.bound)
        return self.noise.noise_stddev(clip.bound)

    def step_event(self) -> events.DpEvent:
        """The cost of one step."""
        return step_event(self.sampler, self.noise)

    def epsilon(self, steps: int | None = None, *, paid: Sequence[Paid] = ()) -> float:
        """Epsilon after `steps` steps, by default all of them; infinite if nothing is promised.

        The price of the steps alone, or with what else was `paid` for on the same users.
        """
        return self._evaluation(self.steps if steps is None else steps, paid).epsilon

    def _evaluation(self, steps: int, paid: Sequence[Paid]) -> Evaluation:
        """Epsilon after `steps` steps and what was paid for, and who vouches for it."""
        if steps > 0 and self.non_private:
            return Evaluation(epsilon=math.inf, certified_by="nobody", error_bound=0.0)
        event = self._total_event(steps, paid)
        if event is None:
            return Evaluation(epsilon=0.0, certified_by="nobody", error_bound=0.0)
        return accountant.evaluate(event, delta=self.delta, adjacency=self.adjacency)

    def _total_event(self, steps: int, paid: Sequence[Paid]) -> events.DpEvent | None:
        """Everything the users' data was used for; None if for nothing."""
        parts = all_events(paid)
        if steps > 0:
            parts.append(events.repeated(self.step_event(), steps))
        return events.combined(parts) if parts else None

    def run_event(self) -> events.DpEvent:
        """The cost of all steps: what one run of a sweep costs (`accounting.selection`)."""
        return events.repeated(self.step_event(), self.steps)

    def check_paid(self, paid: Sequence[Paid]) -> None:
        """Refuse paid items that cannot be priced together with this plan's steps."""
        parts = all_events(paid) if self.non_private else [*all_events(paid), self.step_event()]
        if parts and not accountant.can_price(events.combined(parts), self.adjacency):
            raise UnaccountedPlanError(
                f"{', '.join(sorted({type(item.event).__name__ for item in paid}))} cannot be "
                f"priced together with these steps under {self.adjacency.value} adjacency. Pay "
                "with an event that has a privacy loss distribution, such as a Gaussian one, or "
                "with a tuning of runs that sample users."
            )

    def deltas(
        self, epsilons: list[float], steps: int, *, paid: Sequence[Paid] = ()
    ) -> list[float]:
        """The delta that goes with each epsilon after `steps` steps: the whole curve."""
        event = self._total_event(steps, paid)
        assert event is not None
        return accountant.deltas(
            event, epsilons=epsilons, delta=self.delta, adjacency=self.adjacency
        )

    def cautions(self) -> list[str]:
        """What a careful reader would ask about, in words."""
        found: list[str] = []
        if self.delta > 1 / self.num_users:
            found.append(
                f"delta={self.delta:g} is above 1/num_users={1 / self.num_users:.3g}: releasing "
                "one user's data outright would meet it. Choose a smaller delta."
            )
        return found

    def statement(
        self, *, steps: int | None = None, fixed_seed: bool = False, paid: Sequence[Paid] = ()
    ) -> Statement:
        """What may be said about a model after `steps` steps of this plan and what was `paid`."""
        steps = self.steps if steps is None else steps
        found = self._evaluation(steps, paid)
        return Statement(
            epsilon=found.epsilon,
            delta=self.delta,
            adjacency=self.adjacency.value,
            neighbours=self.adjacency.meaning,
            promise=self.adjacency.promise,
            sampler=self._sampler_in_words(),
            mechanism=(
                f"{self._clip_in_words()}, noise_multiplier="
                f"{self.noise.noise_multiplier:.4g}, divisor={self.divisor:g}"
            ),
            steps=steps,
            num_users=self.num_users,
            certified_by=found.certified_by,
            paid=tuple(self._paid_in_words(item) for item in paid),
            cautions=(
                *self.cautions(),
                *(("a fixed seed was used: whoever knows it can remove the noise",) * fixed_seed),
            ),
            assumptions=(
                f"num_users={self.num_users:,} and every setting named here are public, chosen "
                "without looking at these users' data"
                + (" except as listed under paid for" if paid else ""),
                "the initial weights, the tokenizer and the training code do not depend on these "
                "users",
                "who owns which record is public"
                if self.adjacency.fixed_graph
                else "a record's owner is the only person it is about",
                "every intermediate model may be seen; the sampled cohorts may not",
            ),
            not_covered=(
                "hyper-parameters tuned on the same users"
                + (", except as listed under paid for" if paid else ""),
                "what others wrote about a user, and copies of a user's text under another id",
                "attacks on floating-point noise (Mironov 2012) and on timing",
                "anything released beside the model, such as losses on the training users",
            ),
        )

    def _paid_in_words(self, item: Paid) -> str:
        alone = accountant.epsilon(item.event, delta=self.delta, adjacency=self.adjacency)
        return f"{item.what}: alone epsilon={round_up(alone):g}, included in the total"

    def _clip_in_words(self) -> str:
        match self.clip:
            case AutomaticClip() as rule:
                return f"automatic clipping to norm 1, stability={rule.stability:g}"
            case AdaptiveClip() as rule:
                return (
                    f"clip_norm={rule.clip_norm:g} at first, then the {rule.target_quantile:g} "
                    f"quantile of norms by counts with noise {rule.count_noise:g}, paid for in "
                    "every step"
                )
            case PerLayerClip() as rule:
                return f"clip_norm={rule.clip_norm:g} split evenly over the layers"
            case NormalisedClip() as rule:
                return f"clip_norm={rule.clip_norm:g}, divided by it"
            case rule:
                return f"clip_norm={rule.clip_norm:g}"

    def _sampler_in_words(self) -> str:
        match self.sampler:
            case PoissonUsers() as users:
                return (
                    f"Poisson sampling of users, rate={users.user_sampling_prob:.6g}, at most "
                    f"{users.group_size} records a user and step"
                )
            case PoissonRecords() as records:
                return (
                    f"Poisson sampling of records, rate={records.record_sampling_prob:.6g}, at "
                    f"most {records.group_size} records a user"
                )

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the ledger."""
        return {
            "sampler": {"type": type(self.sampler).__name__} | asdict(self.sampler),
            "clip": {"type": type(self.clip).__name__}
            | {name: repr(value) for name, value in asdict(self.clip).items()},
            "noise": {"type": type(self.noise).__name__} | asdict(self.noise),
            "steps": self.steps,
            "divisor": self.divisor,
            "num_users": self.num_users,
            "delta": self.delta,
            "adjacency": self.adjacency.value,
            "non_private": self.non_private,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        sampler = dict(data["sampler"])
        kind = sampler.pop("type")
        noise, clip = dict(data["noise"]), dict(data["clip"])
        if kind not in _SAMPLERS or noise.pop("type") != "Gaussian":
            raise UnaccountedPlanError(
                f"sampler {kind!r} or its noise has no accounting rule here."
            )
        return Plan(
            sampler=_SAMPLERS[kind](**sampler),
            clip=_CLIP_RULES[clip.pop("type")](**{n: float(v) for n, v in clip.items()}),
            noise=Gaussian(**noise),
            steps=data["steps"],
            divisor=data["divisor"],
            num_users=data["num_users"],
            delta=data["delta"],
            adjacency=Adjacency(data["adjacency"]),
            non_private=data["non_private"],
        )


def step_event(sampler: PoissonUsers | PoissonRecords, noise: Gaussian) -> events.DpEvent:
    """The cost of one step of these parts."""
    return _check_rule(sampler, noise)(sampler, noise)


def calibrate(
    sampler: PoissonUsers | PoissonRecords,
    *,
    steps: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    paid: Sequence[Paid] = (),
) -> float:
    """The least noise multiplier at which `steps` steps and what was `paid` cost at most `epsilon`.

    Only the noise of the steps is free: what was paid for has been looked at already.
    """
    if paid:
        accountant.check_epsilon(epsilon)
        looks = events.combined(all_events(paid))
        spent = accountant.epsilon(looks, delta=delta, adjacency=adjacency)
        if not spent < epsilon:
            raise InputError(
                f"epsilon={epsilon:g} leaves nothing for the steps: what was paid for costs "
                f"{round_up(spent):g} alone at delta={delta:g}. Use a larger epsilon."
            )
    return accountant.calibrate(
        lambda noise_multiplier: events.combined(
            [
                *all_events(paid),
                events.repeated(
                    step_event(sampler, Gaussian(noise_multiplier=noise_multiplier)), steps
                ),
            ]
        ),
        target=epsilon,
        delta=delta,
        adjacency=adjacency,
    )


def _check_rule(sampler: object, noise: object) -> Callable[[Any, Any], events.DpEvent]:
    rule = _RULES.get((type(sampler), type(noise)))
    if rule is None:
        known = ", ".join(f"{s.__name__} + {n.__name__}" for s, n in _RULES)
        raise UnaccountedPlanError(
            f"{type(sampler).__name__} + {type(noise).__name__} has no accounting rule here. "
            f"Known: {known}."
        )
    return rule


def _one_clip_rule(clip_norm: float | None, clip: ClipRule | None) -> ClipRule:
    if (clip_norm is None) == (clip is None):
        raise InputError("give exactly one of clip_norm and clip: the first means FlatClip.")
    return FlatClip(clip_norm=clip_norm) if clip_norm is not None else clip  # type: ignore[return-value]


def _check_counts(*, num_users: int, steps: int) -> None:
    if num_users < 2:
        raise InputError(
            f"num_users={num_users}: hiding one user takes at least one other. Use more users."
        )
    if steps < 1:
        raise InputError(f"steps={steps}: train for at least one step.")


def _check_expected(name: str, expected: float, total: int, what: str) -> None:
    if not 1 <= expected <= total:
        remedy = f"Lower {name}, or use more {what}." if expected > total else f"Raise {name}."
        raise InputError(
            f"{name}={expected:g} of {total:,} {what}: a step needs at least 1 and at most all of "
            f"them in expectation. {remedy}"
        )
