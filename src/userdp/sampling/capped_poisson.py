"""Poisson sampling of users, cut to a cap: no cohort is larger than the hardware takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import (
    SAMPLERS,
    PlaceSampler,
    PublicNumbers,
    check_at_least_one,
    check_probability,
)
from userdp.sampling.draws import poisson, rows_of_users
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class CappedPoissonUsers(PlaceSampler):
    """As `PoissonUsers`, but of more than `cap` drawn users a random `cap` take part.

    Each of the `num_users` places has a coin.
    Reference: Ganesh 2025 (arXiv 2508.15089).
    """

    name: ClassVar[str] = "capped-poisson"
    unit: ClassVar[SamplingUnit] = SamplingUnit.USER
    keys: ClassVar[Mapping[str, str]] = {"cap": "cap"}
    user_sampling_prob: float
    cap: int = field(metadata={"hint": "It is the most users that a step takes."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("user_sampling_prob", self.user_sampling_prob)
        check_at_least_one("cap", self.cap)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """q is the expected cohort size, before the cut, over the number of users."""
        rate = public.expected_groups / public.num_users
        return cls(
            user_sampling_prob=rate,
            num_users=public.num_users,
            group_size=public.group_size,
            **own,
        )

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per user who is drawn and not cut off."""
        self.check_users(index.num_users)
        rng = streams.rng(step)
        places = poisson(self.num_users, self.user_sampling_prob, rng)
        if len(places) > self.cap:
            places = np.sort(rng.choice(places, size=self.cap, replace=False, shuffle=False))
        return rows_of_users(index, places[places < index.num_users], self.group_size, rng)

    @property
    def words(self) -> str:
        """Who takes part in a step."""
        return (
            f"Poisson sampling of users, rate={self.user_sampling_prob:.6g}, cut to {self.cap} of "
            f"{self.num_users} users at random, at most {self.group_size} records a user and step"
        )
