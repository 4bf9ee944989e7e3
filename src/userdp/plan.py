"""The one place that joins parts and states their guarantee.

A plan is a choice of sampler, clip rule and noise, a number of steps, and the public numbers. The
sampler, the noise and the adjacency decide which event prices it (`prices/table.py`). The event is
made from the sampler's own public parameters, so sampler and accountant cannot disagree. A choice
without a price cannot be built.

Public: everything in a plan. `num_users` and the divisor are declared, never counted from the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from userdp import defaults
from userdp.accounting import accountant, events, quantile
from userdp.accounting.certificate import Evaluation
from userdp.clipping.rules import CLIP_RULES, ClipRule, one_clip_rule
from userdp.errors import InputError, LedgerError
from userdp.noise import NOISES, Gaussian, Noise
from userdp.parts import Part, as_written
from userdp.plans.checks import check_parts
from userdp.plans.words import Said, cautions_of, statement_of
from userdp.prices import marked as marked_price
from userdp.prices import marks
from userdp.prices.composition import check_inherited, check_together, curve, dearest, total_events
from userdp.prices.earlier import Earlier
from userdp.prices.marks import AsIfPoisson, Mark
from userdp.prices.paid import Paid
from userdp.prices.table import calibrate, event_of
from userdp.sampling import SAMPLERS, PoissonRecords, PoissonUsers, PublicNumbers, Sampler
from userdp.sampling.contract import check_counts
from userdp.sampling.poisson_records import UNBOUNDED
from userdp.statement import Statement
from userdp.streams import PHILOX
from userdp.units import Adjacency
from userdp.updates.contract import UPDATE_RULES, UpdateRule
from userdp.updates.estimators import Estimator
from userdp.updates.halting import HaltingTest
from userdp.updates.mean_gradient import MEAN_GRADIENT


class Chosen(TypedDict, total=False):
    """The choices that are the same for all samplers.

    Exactly one of `epsilon` and `noise_multiplier` is given. `epsilon` is the target of everything
    together: the steps, what was `paid` before them, and `earlier` runs. Under a `mark` it is the
    epsilon of what the mark prices, and so is the noise multiplier.
    """

    delta: float | None
    epsilon: float | None
    noise_multiplier: float | None
    noise: Noise | None
    update: UpdateRule | None
    adjacency: Adjacency
    non_private: bool
    mark: Mark | None
    randomness: str
    paid: Sequence[Paid]
    earlier: Sequence[Earlier]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen parts, and what they cost.

    `divisor` is the public expected number of groups a step (E|U| or B in Charles et al. 2024). The
    noised sum is divided by it, never by the realised size, which is secret.

    With `non_private` or a `mark` (`prices/marks.py`) nothing is promised to the people in the
    data. The parts are those that run in every case, and `event` is what they really cost.
    """

    sampler: Sampler
    clip: ClipRule
    noise: Noise
    steps: int
    divisor: float
    num_users: int
    delta: float
    update: UpdateRule = MEAN_GRADIENT
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    non_private: bool = False
    mark: Mark | None = None
    # What every random draw of the run is made from (`streams`).
    randomness: str = PHILOX

    def __post_init__(self) -> None:
        check_parts(self)

    @property
    def averaging(self) -> Estimator:
        """How the average update is estimated, and how far one user moves the estimate."""
        return self.update.averaging(num_users=self.num_users, expected_groups=self.divisor)

    @property
    def halting_test(self) -> HaltingTest | None:
        """The test that every step must pass, if the update rule has one."""
        return self.update.halting_test(num_users=self.num_users, steps=self.steps)

    @staticmethod
    def sample_users(
        *,
        num_users: int,
        expected_cohort_size: float | None = None,
        group_size: int = defaults.GROUP_SIZE,
        steps: int = defaults.STEPS,
        clip_norm: float | None = None,
        clip: ClipRule | None = None,
        **chosen: Unpack[Chosen],
    ) -> Plan:
        """User-level sampling (ULS): one clipped mean gradient per sampled user.

        Each of `num_users` takes part with probability expected_cohort_size / num_users, with at
        most `group_size` records. What is not given is chosen from public numbers (`defaults.py`).
        Reference: Charles et al. 2024, Alg. 2.
        """
        check_counts(num_users=num_users, steps=steps)
        update = chosen.get("update") or MEAN_GRADIENT
        expected = defaults.expected_cohort_size(
            num_users, expected_cohort_size, everybody=update.takes_everybody
        )
        public = PublicNumbers(
            num_users=num_users,
            num_records=num_users * group_size,
            expected_groups=expected,
            group_size=group_size,
            steps=steps,
        )
        return Plan.of(PoissonUsers, public, clip=one_clip_rule(clip_norm, clip), **chosen)

    @staticmethod
    def sample_records(
        *,
        num_users: int,
        expected_batch_size: float,
        group_size: int | None,
        steps: int = defaults.STEPS,
        clip_norm: float | None = None,
        clip: ClipRule | None = None,
        num_records: int | None = None,
        **chosen: Unpack[Chosen],
    ) -> Plan:
        """Example-level sampling (ELS): one clipped gradient per sampled record.

        Every user keeps at most `group_size` records. Each of them takes part with probability
        expected_batch_size / num_records. Here `num_records` is a public estimate of how many
        records are kept. By default it is num_users * group_size, the most that there can be.
        Without a `group_size`, users keep all their records, which only `RecordLevel` has a price
        for.
        Reference: Charles et al. 2024, Alg. 1.
        """
        if group_size is None and num_records is None:
            raise InputError("num_records is missing: without a group_size nobody can compute it.")
        public = PublicNumbers(
            num_users=num_users,
            num_records=num_users * (group_size or 0) if num_records is None else num_records,
            expected_groups=expected_batch_size,
            group_size=UNBOUNDED if group_size is None else group_size,
            steps=steps,
        )
        return Plan.of(PoissonRecords, public, clip=one_clip_rule(clip_norm, clip), **chosen)

    @staticmethod
    def of(
        kind: type[Sampler],
        public: PublicNumbers,
        *,
        own: Mapping[str, Any] | None = None,
        clip: ClipRule,
        delta: float | None = None,
        noise: Noise | None = None,
        update: UpdateRule | None = None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        adjacency: Adjacency = Adjacency.ADD_REMOVE,
        non_private: bool = False,
        mark: Mark | None = None,
        randomness: str = PHILOX,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> Plan:
        """The plan of any sampler and noise, with the least noise that meets `epsilon`.

        `own` holds the values of the sampler's own keys. `noise`, by default Gaussian, gets the
        multiplier that is given or found.
        """
        public.check(kind.unit)
        if non_private and noise_multiplier is None:
            raise InputError(
                "non_private=True claims no epsilon: give noise_multiplier instead, which is 0 for "
                "the baseline without noise."
            )
        if (epsilon is None) == (noise_multiplier is None):
            raise InputError(
                "give exactly one of epsilon and noise_multiplier: one follows from the other."
            )
        sampler = kind.configured(public, **(own or {}))
        groups = kind.expected_groups(public, **(own or {}))
        if mark is None and sampler.as_if is not None and not non_private:
            mark = AsIfPoisson()
        people = public.num_users if mark is None else mark.people(public.num_users)
        delta = defaults.delta(people) if delta is None else delta
        noise = noise or Gaussian(noise_multiplier=0.0)
        ratio = 1.0 if mark is None else mark.noise_ratio(groups)
        # Before noise is looked for, the plan is checked with much noise; a noisy count leaves some
        # for the updates if the noise multiplier is as large as its own noise.
        much = min(accountant.LARGEST_NOISE_MULTIPLIER, clip.count_stddev or math.inf)
        first = much if noise_multiplier is None else noise_multiplier
        if mark is None and not non_private:
            accountant.check_delta(delta, num_users=public.num_users)
        plan = Plan(
            sampler=sampler,
            clip=clip,
            noise=replace(noise, noise_multiplier=first * ratio),
            steps=public.steps,
            divisor=groups,
            num_users=public.num_users,
            delta=delta,
            update=update or MEAN_GRADIENT,
            adjacency=adjacency,
            non_private=non_private,
            mark=mark,
            randomness=randomness,
        )
        if noise_multiplier is not None:
            return plan
        assert epsilon is not None
        found = calibrate(
            marked_price.sampler_of(plan),
            noise,
            steps=public.steps,
            epsilon=epsilon,
            delta=delta,
            adjacency=marked_price.adjacency_of(plan, earlier),
            paid=paid,
            earlier=marked_price.earlier_of(plan, earlier),
            test=plan.halting_test,
        )
        return replace(plan, noise=replace(noise, noise_multiplier=found * ratio))

    def over(self, steps: int) -> Plan:
        """The plan of a run of its own with so many steps, such as the rest after a fork."""
        return replace(
            self, steps=steps, sampler=self.sampler.over(steps), noise=self.noise.over(steps)
        )

    @property
    def noise_stddev(self) -> float:
        """The noise drawn for each coordinate of the clipped sum, before the division."""
        # The multiplier counts clip norms under every adjacency. The event covers how many updates
        # of a neighbour come and go (C24 Thm. 2 and 3), and that replace exchanges +C for -C.
        return self.noise_stddev_of(self.clip)

    def noise_stddev_of(self, clip: ClipRule) -> float:
        """The noise on the clipped sum of a step whose rule is `clip`. Adaptive rules change.

        The noisy count of an adaptive rule takes a part of the step's price, so the sum gets more
        noise (Andrew et al. 2021, Thm. 1).
        """
        if clip.count_stddev is not None and self.noise.noise_multiplier > 0:
            multiplier = quantile.adaptive_clipping_noise(
                noise_multiplier=self.noise.noise_multiplier, count_noise=clip.count_stddev
            )
            noise = replace(self.noise, noise_multiplier=multiplier)
            return noise.noise_stddev(self.averaging.sensitivity(clip.bound))
        test = self.halting_test or self.averaging
        return self.noise.noise_stddev(test.sensitivity(clip.bound))

    @property
    def drawn_once(self) -> str | None:
        """What is drawn or fixed once for all steps, in words; None if every step is by itself."""
        if self.halting_test is not None:
            return "a run with a filter has one threshold, whose noise is drawn once"
        if self.sampler.is_dealt or self.sampler.is_ordered:
            return f"with sampler={self.sampler.name!r} it is decided once who takes part when"
        if not self.noise.is_independent:
            return f"{self.noise.name} noise is one for all steps"
        return None

    @property
    def has_price(self) -> bool:
        """Whether `event` says what the people in the data are charged."""
        is_priced = not self.sampler.is_unbounded and self.sampler.as_if is None
        return is_priced and not self.non_private

    def event(self, steps: int | None = None) -> events.DpEvent:
        """The cost of the first `steps` steps, by default of all of them."""
        steps = self.steps if steps is None else steps
        test = self.halting_test
        return event_of(self.sampler, self.noise, self.adjacency, steps=steps, test=test)

    def epsilon(
        self,
        steps: int | None = None,
        *,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> float:
        """Epsilon after `steps` steps, by default all of them; infinite if nothing is promised.

        It is the price of the steps, of what was `paid` on the same users, and of `earlier` runs.
        """
        return self.evaluation(self.steps if steps is None else steps, paid, earlier).epsilon

    def evaluation(
        self, steps: int, paid: Sequence[Paid], earlier: Sequence[Earlier]
    ) -> Evaluation:
        """Epsilon of everything together, and who vouches for it."""
        if (steps > 0 and not self.has_price) or any(item.non_private for item in earlier):
            return Evaluation(epsilon=math.inf, certified_by="nobody", error_bound=0.0)
        together = total_events([self.event(steps)] if steps > 0 else [], paid, earlier)
        return dearest(together, delta=self.delta, adjacency=self.adjacency)

    def check_paid(self, paid: Sequence[Paid], *, earlier: Sequence[Earlier] = ()) -> None:
        """Refuse paid items and earlier runs that cannot be priced together with these steps."""
        for item in earlier:
            self._check_earlier(item)
        marked_price.check_paid(self, paid)
        check_together([self.event()] if self.has_price else [], paid, earlier, self.adjacency)

    def _check_earlier(self, item: Earlier) -> None:
        plan = Plan.from_json(item.plan)
        event = plan.event(item.steps) if plan.has_price and item.steps else None
        if (event, plan.adjacency) != (item.event, item.adjacency):
            raise LedgerError(
                "an earlier run's event is not the one of its own plan: it was edited."
            )
        promises_nothing = self.non_private or marked_price.takes_over(self, item)
        check_inherited(item, self.adjacency, non_private=promises_nothing)

    def deltas(
        self,
        epsilons: list[float],
        steps: int,
        *,
        paid: Sequence[Paid] = (),
        earlier: Sequence[Earlier] = (),
    ) -> list[float]:
        """The delta that goes with each epsilon after `steps` steps: the whole curve."""
        together = total_events([self.event(steps)] if steps > 0 else [], paid, earlier)
        return curve(together, epsilons, delta=self.delta, adjacency=self.adjacency)

    def cautions(self) -> list[str]:
        """What a careful reader would ask about, in words."""
        return cautions_of(self)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that could have been chosen otherwise."""
        return (self.sampler, self.update, self.clip, self.noise)

    def statement(self, *, steps: int | None = None, **said: Unpack[Said]) -> Statement:
        """What may be said about a model after `steps` steps of this plan, `paid` and `earlier`.

        An `unfinished` record, a `fixed_seed` and `doubts` promise nothing, and so do those of an
        earlier run. `others` were released about the same people (`Statement`).
        """
        return statement_of(self, self.steps if steps is None else steps, **said)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the ledger."""
        return {
            "sampler": SAMPLERS.to_json(self.sampler),
            "clip": CLIP_RULES.to_json(self.clip),
            "noise": NOISES.to_json(self.noise),
            "update": UPDATE_RULES.to_json(self.update),
            "steps": self.steps,
            "divisor": self.divisor,
            "num_users": self.num_users,
            "delta": self.delta,
            "adjacency": self.adjacency.value,
            "non_private": self.non_private,
            **marks.to_json(self.mark),
            **({} if self.randomness == PHILOX else {"randomness": self.randomness}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote; an unknown type of part is refused by its name."""
        with as_written("a plan"):
            return Plan(
                sampler=SAMPLERS.from_json(data["sampler"]),
                clip=CLIP_RULES.from_json(data["clip"]),
                noise=NOISES.from_json(data["noise"]),
                update=UPDATE_RULES.from_json(data["update"]),
                steps=data["steps"],
                divisor=data["divisor"],
                num_users=data["num_users"],
                delta=data["delta"],
                adjacency=Adjacency(data["adjacency"]),
                non_private=data["non_private"],
                mark=marks.from_json(data),
                randomness=data.get("randomness", PHILOX),
            )
