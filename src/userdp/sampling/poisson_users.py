"""Poisson sampling of users (ULS)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_probability
from userdp.sampling.draws import poisson, rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class PoissonUsers(Sampler):
    """Each user takes part with probability q, with at most G rows drawn afresh (ULS).

    q = `user_sampling_prob`, G = `group_size`.
    Reference: Charles et al. 2024, Alg. 2; McMahan et al. 2018, Sec. 2 A).

    >>> from userdp.streams import RunSecret
    >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
    >>> sampler = PoissonUsers(user_sampling_prob=1.0, group_size=2)
    >>> cohort = sampler.draw(index, 0, RunSecret.fixed_for_tests(0).streams("cohort"))
    >>> [sorted(group.tolist()) for group in cohort]
    [[0, 2], [1]]
    """

    name: ClassVar[str] = "poisson"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    user_sampling_prob: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("user_sampling_prob", self.user_sampling_prob)

    def at_rate(self, factor: float) -> PoissonUsers:
        """Every user with another coin."""
        return replace(self, user_sampling_prob=self.user_sampling_prob * factor)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """q is the expected cohort size over the number of users."""
        rate = public.expected_groups / public.num_users
        return cls(user_sampling_prob=rate, group_size=public.group_size)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per sampled user."""
        rng = streams.rng(step)
        users = poisson(index.num_users, self.user_sampling_prob, rng)
        return rows_of_users(index, users, self.group_size, rng)

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"Poisson sampling of users, rate={self.user_sampling_prob:.6g}, at most "
            f"{self.group_size} records a user and step"
        )
