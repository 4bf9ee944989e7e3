"""What correlated noise costs with each sampler. The proofs are short: docs/noise.md.

All of them rest on two facts about `Banded`: C is lower triangular, and every column has norm at
most 1. Both are checked whenever C is made or read back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from userdp.accounting import correlated_bins, events
from userdp.errors import UnaccountedPlanError
from userdp.noise import Banded
from userdp.noise.strategies.bands import Bands
from userdp.prices import independent
from userdp.sampling import (
    BallsInBins,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
)


def of_fixed_order(sampler: MinSeparated, noise: Banded, steps: int) -> events.DpEvent:
    """One Gaussian for the whole run, whatever the strategy."""
    if noise.is_banded:
        _check_apart(noise, sampler.separation, f"separation={sampler.separation}")
        return independent.of_fixed_order(sampler, noise, steps)
    sensitivity = noise.sensitivity(
        separation=sampler.separation, participations=sampler.participations
    )
    return events.correlated_gaussian(
        sensitivity=sensitivity, noise_multiplier=noise.noise_multiplier
    )


def of_users_in_turn(sampler: CyclicPoissonUsers, noise: Banded, steps: int) -> events.DpEvent:
    """The price of independent noise: two turns of one part have independent noise."""
    _check_turns(noise, sampler.parts)
    return independent.of_users_in_turn(sampler, noise, steps)


def of_records_in_turn(sampler: CyclicPoissonRecords, noise: Banded, steps: int) -> events.DpEvent:
    """The price of independent noise: all records of a user are in one part."""
    _check_turns(noise, sampler.parts)
    return independent.of_records_in_turn(sampler, noise, steps)


def of_bins(sampler: BallsInBins, noise: Banded, steps: int) -> events.DpEvent:
    """Users who have one bin for good; the whole run is priced, however much of it was taken."""
    if noise.bands == 1:
        return independent.of_bins(sampler, noise, steps)
    return events.balls_in_bins_banded(
        bins=sampler.bins,
        gram=_gram(replace(noise, noise_multiplier=0.0), sampler.bins),
        noise_multiplier=noise.noise_multiplier,
    )


@lru_cache(maxsize=8)
def _gram(noise: Banded, bins: int) -> tuple[float, ...]:
    """How much the bins have in common, whatever the noise multiplier."""
    matrix = noise.matrix()
    if not isinstance(matrix, Bands):
        raise UnaccountedPlanError(
            f"strategy={noise.strategy!r} has no price with sampler='balls-in-bins': use "
            "strategy='optimised' or 'toeplitz'."
        )
    return correlated_bins.gram_of(matrix.columns(), bins)


def of_sampled_users(sampler: PoissonUsers, noise: Banded, steps: int) -> events.DpEvent:
    """Users who may take part in any step: only independent noise has a price."""
    _check_independent(noise)
    return events.repeated(independent.step_of_users(sampler, noise), steps)


def of_sampled_records(sampler: PoissonRecords, noise: Banded, steps: int) -> events.DpEvent:
    """Records that may take part in any step: only independent noise has a price."""
    _check_independent(noise)
    return events.repeated(independent.step_of_records(sampler, noise), steps)


def _check_turns(noise: Banded, parts: int) -> None:
    if not noise.is_banded:
        raise UnaccountedPlanError(
            f"strategy={noise.strategy!r} has no price with sampled parts: its noise is shared by "
            "all steps, so turns are not independent. Use strategy='optimised' or 'toeplitz', or "
            "sampler='min-separated'."
        )
    _check_apart(noise, parts, f"parts={parts}")


def _check_apart(noise: Banded, apart: int, what: str) -> None:
    if apart < noise.bands:
        raise UnaccountedPlanError(
            f"bands={noise.bands} with {what}: a user may come back within the bands, and its "
            "contributions would add up in a way that is not priced. Use at most "
            f"bands={apart}, or more {what.split('=')[0]}."
        )


def _check_independent(noise: Banded) -> None:
    if noise.bands > 1:
        raise UnaccountedPlanError(
            f"bands={noise.bands} with sampler='poisson': a user may take part in neighbouring "
            "steps, which share noise, and no rule prices that. Use sampler='cyclic-poisson' with "
            f"parts={noise.bands} or more, or bands=1."
        )
