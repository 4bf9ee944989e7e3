"""What is checked when a plan is made: that its numbers make a run, and its parts fit together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from userdp.accounting import accountant
from userdp.errors import InputError, UnaccountedPlanError
from userdp.prices.marked import check_mark
from userdp.prices.table import check_test, price_of
from userdp.sampling.contract import check_counts
from userdp.streams import check_randomness

if TYPE_CHECKING:
    from userdp.plan import Plan


def check_parts(plan: Plan) -> None:
    """Refuse numbers that make no run, parts that do not fit, and what has no price."""
    price_of(plan.sampler, plan.noise, plan.adjacency, plan.halting_test)
    check_counts(num_users=plan.num_users, steps=plan.steps)
    check_randomness(plan.randomness)
    plan.sampler.check_steps(plan.steps)
    plan.noise.check_steps(plan.steps)
    accountant.check_delta(plan.delta)
    if not 1 <= plan.divisor < math.inf:
        raise InputError(
            f"a step has {plan.divisor:g} expected groups: it takes a number from one up. "
            "Raise the sampling rate or the expected cohort size, or use more users."
        )
    multiplier, clip_norm = plan.noise.noise_multiplier, plan.clip.clip_norm
    spends = multiplier == 0 or not plan.clip.bounds_updates
    if spends and not plan.non_private:
        raise InputError(
            f"noise_multiplier={multiplier:g} with clip_norm={clip_norm:g} protects nobody. "
            "Give both a positive finite value, or set non_private=True to train without any "
            "guarantee."
        )
    if plan.update.local_training is not None and not plan.clip.is_projection:
        raise InputError(
            f"{plan.update.name} clips after every local step, and {plan.clip.name} clipping "
            "changes an update that was clipped before. Give a clip_norm: flat, per-layer or "
            "per-vector clipping."
        )
    if plan.update.local_training is not None and plan.clip.count_stddev is not None:
        raise InputError(
            f"{plan.update.name} clips after every local step, so every update is within the clip "
            f"norm in the end: {plan.clip.name} clipping would lower it at every step. Give a "
            "clip_norm, or a schedule of them."
        )
    if plan.clip.changes and not plan.noise.is_independent:
        raise UnaccountedPlanError(
            f"{plan.clip.name} clipping changes the clip norm, and {plan.noise.name} noise of one "
            "step takes back noise of another, which must be of the same size. Use one clip norm, "
            "or gaussian noise."
        )
    if not plan.averaging.is_bounded and not plan.non_private:
        raise UnaccountedPlanError(
            "the true average of a step has no price: a user who is almost alone decides it. "
            "Use estimator f_f or f_c, or set non_private=True."
        )
    if multiplier > 0 and not plan.clip.bounds_updates:
        raise InputError(
            f"noise_multiplier={multiplier:g} with clip_norm=inf is infinite noise: it is "
            "scaled to the clip norm. Set noise_multiplier=0, or clip_norm finite."
        )
    check_mark(plan)
    if plan.halting_test is not None:
        is_fixed = plan.clip.bounds_updates and plan.clip.count_stddev is None
        check_test(plan.halting_test, plan.delta, is_usual=is_fixed and plan.mark is None)
    if plan.has_price:
        # A price may refuse these very numbers, such as noise with more bands than parts.
        plan.event()
    if plan.clip.count_stddev is not None and not plan.noise.shares_with_count:
        raise UnaccountedPlanError(
            f"{plan.clip.name} clipping releases a noisy count at every step, and no rule "
            f"prices it together with {plan.noise.name} noise. Use gaussian noise, or another "
            "clipping."
        )
    # If a noisy count leaves no noise for the updates, this raises now, before the first step.
    _ = plan.noise_stddev
