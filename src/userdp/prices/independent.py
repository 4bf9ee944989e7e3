"""What independent noise costs with each sampler.

The functions `step_...` give the event of one step, for samplers whose steps are independent
(`table.each_step`). The functions `of_...` give that of the first t steps, where a sampler decides
for many steps at once who takes part.
"""

from __future__ import annotations

from userdp.accounting import events
from userdp.errors import UnaccountedPlanError
from userdp.noise import Discrete, Noise
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
    Sampler,
    WithoutReplacement,
)


def step_of_users(sampler: PoissonUsers, noise: Noise) -> events.DpEvent:
    """Each user has a coin in every step."""
    return events.poisson_users_gaussian(
        user_sampling_prob=sampler.user_sampling_prob, noise_multiplier=noise.noise_multiplier
    )


def step_of_everybody(sampler: PoissonUsers, noise: Noise) -> events.DpEvent:
    """Every user is in every step, as a filter needs."""
    if sampler.user_sampling_prob != 1:
        raise UnaccountedPlanError(
            "a filter has a price where every user is in every step: set expected_cohort_size to "
            "num_users, or use another update."
        )
    return step_of_users(sampler, noise)


def step_of_users_discrete(sampler: PoissonUsers, noise: Discrete) -> events.DpEvent:
    """Each user has a coin in every step, and noise is made of whole numbers."""
    return events.poisson_users_discrete(
        user_sampling_prob=sampler.user_sampling_prob, noise_multiplier=noise.noise_multiplier
    )


def step_of_records(sampler: PoissonRecords | CyclicPoissonRecords, noise: Noise) -> events.DpEvent:
    """Each of a user's rows has a coin of its own."""
    if sampler.is_unbounded:
        raise UnaccountedPlanError("users with any number of records have no price.")
    return events.poisson_records_gaussian(
        record_sampling_prob=sampler.record_sampling_prob,
        group_size=sampler.group_size,
        noise_multiplier=noise.noise_multiplier,
    )


def step_of_capped_users(sampler: CappedPoissonUsers, noise: Noise) -> events.DpEvent:
    """Each user has a coin in every step, and a cohort above the cap is cut."""
    return events.capped_poisson_users_gaussian(
        user_sampling_prob=sampler.user_sampling_prob,
        cap=sampler.cap,
        num_users=sampler.num_users,
        noise_multiplier=noise.noise_multiplier,
    )


def step_without_replacement(sampler: WithoutReplacement, noise: Noise) -> events.DpEvent:
    """A fixed number of places is drawn in every step."""
    return events.without_replacement_gaussian(
        num_users=sampler.num_users,
        cohort_size=sampler.cohort_size,
        noise_multiplier=noise.noise_multiplier,
    )


def rounds_begun(steps: int, length: int) -> int:
    """How many rounds of so many steps have begun after `steps` steps; each is priced whole."""
    return -(-steps // length)


def of_users_in_turn(sampler: CyclicPoissonUsers, noise: Noise, steps: int) -> events.DpEvent:
    """A user has one coin each time that it is the turn of the user's part."""
    return events.cyclic_poisson_banded(
        user_sampling_prob=sampler.user_sampling_prob,
        steps=steps,
        bands=sampler.parts,
        noise_multiplier=noise.noise_multiplier,
    )


def of_records_in_turn(sampler: CyclicPoissonRecords, noise: Noise, steps: int) -> events.DpEvent:
    """All of a user's rows may be drawn in one step, each time that it is their part's turn."""
    return events.repeated(step_of_records(sampler, noise), rounds_begun(steps, sampler.parts))


def of_fixed_order(sampler: MinSeparated, noise: Noise, steps: int) -> events.DpEvent:
    """One Gaussian for the whole run: the sampler was checked for all its steps."""
    del steps
    return events.min_separated_gaussian(
        participations=sampler.participations, noise_multiplier=noise.noise_multiplier
    )


def of_bins(sampler: BallsInBins, noise: Noise, steps: int) -> events.DpEvent:
    """A user has one bin for good, and every round uses each bin once."""
    return events.balls_in_bins_gaussian(
        bins=sampler.bins,
        rounds=rounds_begun(steps, sampler.bins),
        noise_multiplier=noise.noise_multiplier,
    )


def of_rounds(sampler: BalancedIteration, noise: Noise, steps: int) -> events.DpEvent:
    """A user has one step of every round, drawn afresh."""
    return events.balanced_iteration_gaussian(
        round_length=sampler.round_length,
        rounds=rounds_begun(steps, sampler.round_length),
        noise_multiplier=noise.noise_multiplier,
    )


def of_allocation(sampler: Allocation, noise: Noise, steps: int) -> events.DpEvent:
    """The whole run, however much of it was taken: where a user takes part was drawn for all."""
    del steps
    return events.random_allocation_gaussian(
        steps=sampler.steps,
        participations=sampler.participations,
        noise_multiplier=noise.noise_multiplier,
    )


def no_price(sampler: Sampler, noise: Noise, steps: int) -> events.DpEvent:
    """Refuses: such a sampler can be planned with a mark alone, which prices another one."""
    del noise, steps
    raise UnaccountedPlanError(f"{type(sampler).__name__} has no accounting rule.")
