"""Random allocation: each user takes part in exactly k of the run's T steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_at_least_one
from userdp.sampling.dealt import places_each
from userdp.sampling.draws import rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class Allocation(Sampler):
    """Each user takes part in k of T steps; all sets of k steps are equally likely.

    k = `participations`, T = `steps`. Users are allocated independently and once, so the sampler
    fits runs of exactly T steps.
    Reference: Feldman and Shenfeld 2025 (arXiv 2502.08202).
    """

    name: ClassVar[str] = "allocation"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    is_dealt: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {"participations": "participations"}
    steps: int
    # Configurations may leave it out: then it follows from the expected cohort size.
    participations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("steps", self.steps)
        check_at_least_one("participations", self.participations)
        if self.participations > self.steps:
            raise InputError(
                f"participations={self.participations} of {self.steps} steps: nobody takes part "
                "twice in a step. Lower participations, or train for more steps."
            )

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """As often as is asked for, or as the expected cohort size asks for."""
        often = own.get("participations", _participations(public))
        return cls(steps=public.steps, participations=often, group_size=public.group_size)

    @classmethod
    def expected_groups(cls, public: PublicNumbers, **own: Any) -> float:
        """All users k times, over all steps."""
        often = own.get("participations", _participations(public))
        return public.num_users * often / public.steps

    def check_steps(self, steps: int) -> None:
        """Refuse a run of another length: users would take part more or less often."""
        if steps != self.steps:
            raise InputError(
                f"users are allocated to {self.steps:,} steps, and the run has {steps:,}: plan the "
                "allocation for the run's own steps."
            )

    def over(self, steps: int) -> Allocation:
        """Users take part in the same share of the steps, rounded up."""
        often = -(-self.participations * steps // self.steps)
        return replace(self, steps=steps, participations=often)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user who is allocated to the step."""
        if not 0 <= step < self.steps:
            raise InputError(f"step {step} is not one of the {self.steps:,} allocated steps.")
        dealt = places_each(
            streams, num_users=index.num_users, places=self.steps, most=self.participations
        )
        return rows_of_users(index, dealt.at(step), self.group_size, streams.rng(step))

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"each user in exactly {self.participations} of {self.steps} steps, drawn at random "
            f"once, at most {self.group_size} records a user and step"
        )


def _participations(public: PublicNumbers) -> int:
    """How often each user takes part, for cohorts of the expected size."""
    return min(
        public.steps, max(1, round(public.expected_groups * public.steps / public.num_users))
    )
