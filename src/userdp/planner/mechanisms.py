"""Which sampler and which noise: the error that each leaves in the model, at the same guarantee.

For a given number of users, steps and users a step, each pair of sampler and noise needs its own
noise multiplier to meet a target. Correlated noise needs more of it and takes some of it back
later. What counts is how much of it the model keeps: with z of standard deviation sigma C on the
clipped sum of M users, the noise in the model after step t has the standard deviation

    sigma C / M * ||row t of A C^-1||,

where A is what the optimizer makes of the gradients (`noise.strategies.workload`). Errors here are
for C = 1 and a learning rate of 1, so they compare mechanisms and nothing else. No mechanism wins
everywhere (Ganesh et al. 2025, Sec. 5.3): amplification by sampling helps where epsilon is small,
correlation where it is large or users come back seldom.

Public: everything. No data is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from userdp.accounting import accountant
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Banded, Gaussian, Noise
from userdp.noise.strategies.bands import Bands, identity
from userdp.noise.strategies.optimise import final_error, mean_error, optimised_toeplitz
from userdp.noise.strategies.workload import Workload
from userdp.prices.table import calibrate
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CyclicPoissonUsers,
    PoissonUsers,
    Sampler,
)
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class MechanismSetting:
    """What is given. M = `cohort_size` users a step in expectation, N = `num_users`, T = `steps`.

    `memory` is how many vectors of the model's size the noise may keep.
    """

    num_users: int
    cohort_size: float
    steps: int
    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    memory: int = 31
    workload: Workload | None = None

    def __post_init__(self) -> None:
        accountant.check_epsilon(self.epsilon)
        accountant.check_delta(self.delta, num_users=self.num_users)
        if not 1 <= self.cohort_size <= self.num_users:
            raise InputError(
                f"cohort_size={self.cohort_size:g} of {self.num_users:,} users: give at least 1 "
                "and at most all of them."
            )
        if self.memory < 0:
            raise InputError(f"memory={self.memory}: give 0 vectors or more.")

    @property
    def round_length(self) -> int:
        """The number of steps in which every user comes once."""
        return max(1, round(self.num_users / self.cohort_size))


@dataclass(frozen=True, kw_only=True)
class MechanismChoice:
    """A sampler with a noise, the multiplier that meets the target, and the error it leaves.

    `error` is the root mean square over the models of all steps, `final_error` that of the last
    model alone. `vectors` is what the noise keeps in memory.
    """

    sampler: str
    noise: str
    bands: int
    participations: float
    noise_multiplier: float
    error: float
    final_error: float
    vectors: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(setting: MechanismSetting) -> list[MechanismChoice]:
    """Every mechanism that has a price here, the least error first.

    >>> setting = MechanismSetting(
    ...     num_users=64, cohort_size=16, steps=8, epsilon=8.0, delta=1e-3, memory=0)
    >>> [choice.sampler for choice in compare(setting)][-1]
    'poisson'
    """
    found: list[MechanismChoice] = []
    for tried in _tried(setting):
        try:
            multiplier = calibrate(
                tried.sampler,
                tried.noise,
                steps=setting.steps,
                epsilon=setting.epsilon,
                delta=setting.delta,
                adjacency=setting.adjacency,
            )
        except UnaccountedPlanError:
            continue
        workload = setting.workload or Workload(steps=setting.steps)
        scale = multiplier / tried.groups
        matrix = tried.strategy
        found.append(
            MechanismChoice(
                sampler=tried.sampler.name,
                noise=tried.noise.name,
                bands=matrix.bands,
                participations=tried.participations,
                noise_multiplier=multiplier,
                error=scale * math.sqrt(mean_error(workload, matrix)),
                final_error=scale * math.sqrt(final_error(workload, matrix)),
                vectors=matrix.bands - 1,
            )
        )
    return sorted(found, key=lambda choice: choice.error)


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A sampler with a noise, the users of a step, and how often a user takes part."""

    sampler: Sampler
    noise: Noise
    strategy: Bands
    groups: float
    participations: float


def _tried(setting: MechanismSetting) -> Iterator[_Tried]:
    """What is compared."""
    users, steps = setting.num_users, setting.steps
    for sampler, participations in _samplers(setting):
        yield _Tried(
            sampler=sampler,
            noise=Gaussian(noise_multiplier=0.0),
            strategy=identity(steps),
            groups=users * participations / steps,
            participations=participations,
        )
    for bands in _numbers_of_bands(setting):
        # With as many parts as bands, a user's steps meet no common row of C. Within a part, users
        # are sampled, by the coin that the keys would give. With as many parts as a round has
        # steps, everybody is drawn, and nothing is amplified.
        within = bands * setting.cohort_size / users
        noise = Banded.configured(steps=steps, bands=bands, strategy="toeplitz")
        yield _Tried(
            sampler=CyclicPoissonUsers(user_sampling_prob=within, parts=bands, group_size=1),
            noise=noise,
            strategy=optimised_toeplitz(noise.workload_matrix, bands),
            groups=users * within / bands,
            participations=steps * within / bands,
        )


def _samplers(setting: MechanismSetting) -> Iterator[tuple[Sampler, float]]:
    """Samplers for independent noise, and how often each lets a user take part."""
    steps, length = setting.steps, setting.round_length
    rate = setting.cohort_size / setting.num_users
    yield PoissonUsers(user_sampling_prob=rate, group_size=1), steps * rate
    often = min(steps, max(1, round(steps * rate)))
    yield Allocation(steps=steps, participations=often, group_size=1), often
    if length <= steps:
        yield BallsInBins(bins=length, group_size=1), steps / length
        yield BalancedIteration(round_length=length, group_size=1), steps / length


def _numbers_of_bands(setting: MechanismSetting) -> list[int]:
    """Powers of two, and the round's own length, as far as memory allows.

    A part has at least as many users as are expected in a step.
    """
    longest = setting.round_length
    if longest * setting.cohort_size / setting.num_users > 1:
        longest -= 1
    most = min(setting.memory + 1, setting.steps, longest)
    powers = [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]
    return sorted({*powers, *([most] if most > 1 else [])})
