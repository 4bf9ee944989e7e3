"""The one place that joins parts and states the joint guarantee.

A plan is a choice of sampler, clip and noise, a number of steps, and the public numbers. The event
that prices it is looked up by sampler, noise and adjacency (`prices.py`) and made from the
sampler's own public parameters, so sampler and accountant cannot disagree; a choice without a rule
cannot be built.

Public: everything in a plan. `num_users` and the divisor are declared, never counted from the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from userdp.earlier import Earlier, by_people
from userdp.errors import InputError, LedgerError, UnaccountedPlanError
from userdp.noise.gaussian import Gaussian
from userdp.paid import Paid, all_events
from userdp.prices import (
    calibrate,
    earlier_in_words,
    paid_in_words,
    rule_of,
    step_event,
    total_events,
)
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.statement import Statement
from userdp.units import Adjacency
from userdp.wording import (
    assumptions,
    clip_in_words,
    not_covered,
    promise_in_words,
    sampler_in_words,
    sampling_unit,
)

__all__ = ["Plan", "calibrate", "step_event"]

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
        rule_of(self.sampler, self.noise, self.adjacency)
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
        earlier: Sequence[Earlier] = (),
    ) -> Plan:
        """User-level sampling (ULS): one clipped mean gradient per sampled user.

        Each of `num_users` takes part with probability expected_cohort_size / num_users, with at
        most `group_size` records. Exactly one of `epsilon` and `noise_multiplier` is given;
        `epsilon` is the target of the steps, what was `paid` before them and `earlier` runs
        together.
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
            earlier=earlier,
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
        earlier: Sequence[Earlier] = (),
    ) -> Plan:
        """Example-level sampling (ELS): one clipped gradient per sampled record.

        Every user keeps at most `group_size` records; each takes part with probability
        expected_batch_size / num_records, where `num_records` is a public estimate of how many are
        kept (by default num_users * group_size, the most there can be). `epsilon` is the target of
        the steps, what was `paid` before them and `earlier` runs together.
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
            earlier=earlier,
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
        earlier: Sequence[Earlier],
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
                sampler,
                steps=steps,
                epsilon=epsilon,
                delta=delta,
                adjacency=adjacency,
                paid=paid,
                earlier=earlier,
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
        return step_event(self.sampler, self.noise, self.adjacency)

    def epsilon(
        self,
        steps: int | None = None,
        *,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> float:
        """Epsilon after `steps` steps, by default all of them; infinite if nothing is promised.

        The price of the steps alone, or with what else was `paid` for on the same users, and with
        the `earlier` runs behind the weights.
        """
        return self._evaluation(self.steps if steps is None else steps, paid, earlier).epsilon

    def _evaluation(
        self, steps: int, paid: Sequence[Paid], earlier: Sequence[Earlier]
    ) -> Evaluation:
        """Epsilon of everything together, and who vouches for it."""
        if (steps > 0 and self.non_private) or any(item.non_private for item in earlier):
            return Evaluation(epsilon=math.inf, certified_by="nobody", error_bound=0.0)
        found = [
            accountant.evaluate(event, delta=self.delta, adjacency=self.adjacency)
            for event in total_events(self._taken(steps), paid, earlier)
        ]
        nothing = Evaluation(epsilon=0.0, certified_by="nobody", error_bound=0.0)
        return max(found, key=lambda one: one.epsilon, default=nothing)

    def _taken(self, steps: int) -> list[events.DpEvent]:
        return [events.repeated(self.step_event(), steps)] if steps > 0 else []

    def run_event(self) -> events.DpEvent:
        """The cost of all steps: what one run of a sweep costs (`accounting.selection`)."""
        return events.repeated(self.step_event(), self.steps)

    def check_paid(self, paid: Sequence[Paid], *, earlier: Sequence[Earlier] = ()) -> None:
        """Refuse paid items and earlier runs that cannot be priced together with these steps."""
        for item in earlier:
            self._check_earlier(item)
        shared = by_people(earlier)[0]
        parts = [*all_events(paid), *shared, *([] if self.non_private else [self.step_event()])]
        if parts and not accountant.can_price(events.combined(parts), self.adjacency):
            kinds = {type(event).__name__ for event in [*all_events(paid), *shared]}
            raise UnaccountedPlanError(
                f"{', '.join(sorted(kinds))} cannot be "
                f"priced together with these steps under {self.adjacency.value} adjacency. Pay "
                "with an event that has a privacy loss distribution, such as a Gaussian one, or "
                "with a tuning of runs that sample users."
            )

    def _check_earlier(self, item: Earlier) -> None:
        plan = Plan.from_json(item.plan)
        event = None if plan.non_private else plan.step_event()
        if (event, plan.adjacency) != (item.step_event, item.adjacency):
            raise LedgerError(
                "an earlier run's event is not the one of its own plan: it was edited."
            )
        if item.non_private and not self.non_private:
            raise UnaccountedPlanError(
                "the weights come from a run without privacy: nothing can be promised for what is "
                "trained on from them. Start from other weights, or set non_private."
            )
        if item.adjacency is not self.adjacency:
            raise UnaccountedPlanError(
                f"the weights come from a run under {item.adjacency.value} adjacency and this plan "
                f"is under {self.adjacency.value}: they cannot be priced together. Plan with "
                f"adjacency={item.adjacency.value!r}, or start from other weights."
            )

    def deltas(
        self,
        epsilons: list[float],
        steps: int,
        *,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> list[float]:
        """The delta that goes with each epsilon after `steps` steps: the whole curve."""
        curves = [
            accountant.deltas(event, epsilons=epsilons, delta=self.delta, adjacency=self.adjacency)
            for event in total_events(self._taken(steps), paid, earlier)
        ]
        assert curves
        return [max(values) for values in zip(*curves, strict=True)]

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
        self,
        *,
        steps: int | None = None,
        fixed_seed: bool = False,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
        unfinished: bool = False,
        model_check: str = "",
        cautions: Sequence[str] = (),
    ) -> Statement:
        """What may be said about a model after `steps` steps of this plan, `paid` and `earlier`.

        An `unfinished` record and a `fixed_seed` promise nothing, and so does an earlier run's.
        """
        steps = self.steps if steps is None else steps
        found = self._evaluation(steps, paid, earlier)
        fixed_seed = fixed_seed or any(item.fixed_seed for item in earlier)
        promised = not fixed_seed and not unfinished
        return Statement(
            epsilon=found.epsilon,
            delta=self.delta,
            adjacency=self.adjacency.value,
            neighbours=self.adjacency.meaning,
            promise=promise_in_words(self.adjacency, found.epsilon) if promised else "",
            sampler=sampler_in_words(self.sampler),
            sampling=sampling_unit(self.sampler).value,
            mechanism=(
                f"{clip_in_words(self.clip)}, noise_multiplier="
                f"{self.noise.noise_multiplier:.4g}, divisor={self.divisor:g}"
            ),
            steps=steps,
            num_users=self.num_users,
            certified_by=found.certified_by,
            paid=tuple(paid_in_words(item, self.delta, self.adjacency) for item in paid),
            earlier=tuple(earlier_in_words(item, self.delta, self.adjacency) for item in earlier),
            model_check=model_check,
            fixed_seed=fixed_seed,
            unfinished=unfinished,
            cautions=(
                *self.cautions(),
                *(("a fixed seed was used: whoever knows it can remove the noise",) * fixed_seed),
                *(("unfinished: the record has no closing row",) * unfinished),
                *cautions,
            ),
            assumptions=assumptions(
                self.num_users, self.adjacency, paid=bool(paid), earlier=earlier
            ),
            not_covered=not_covered(paid=bool(paid)),
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
