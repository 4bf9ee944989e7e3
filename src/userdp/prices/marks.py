"""Marks: choices under which a run has a price, and yet nothing is promised to the people in it.

Papers compare with such runs, so they can be made here. A mark is part of the plan, the first line
of every statement repeats it, and no card leaves it out:

  * `RecordLevel`: each record is its own unit, the usual record-level DP-SGD;
  * `Hypothetical`: priced as if there were more users or larger cohorts than the run has;
  * `AsIfPoisson`: batches are shuffled, and priced as if they were sampled by Poisson coins.

The parts of a marked plan are those that run, and `Plan.event` is what they really cost the people
in the data. A mark only says what else is priced: another sampler, and another noise multiplier.
The population's budget counts the real event. Shuffled batches have none: they count as a run
without privacy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from userdp.errors import InputError, UnaccountedPlanError
from userdp.sampling import Sampler
from userdp.sampling.contract import check_whole
from userdp.units import Adjacency


@dataclass(frozen=True, kw_only=True)
class Mark(ABC):
    """Why nothing is promised, and what is priced in its place."""

    # What the epsilon that it prices is called.
    epsilon_name: ClassVar[str]

    @abstractmethod
    def priced(self, sampler: Sampler, *, num_users: int, groups: float) -> Sampler:
        """The sampler that is priced in place of this one, which draws `groups` groups a step.

        A sampler for which the mark has no price is refused.
        """

    @abstractmethod
    def words(self, *, num_users: int, groups: float) -> str:
        """The first words of a statement."""

    def adjacency(self, sampler: Sampler, adjacency: Adjacency) -> Adjacency:
        """The adjacency under which it is priced: by default the plan's."""
        del sampler
        return adjacency

    def noise_ratio(self, groups: float) -> float:
        """The noise multiplier that runs, over the one that is priced: by default the same."""
        del groups
        return 1.0

    def people(self, num_users: int) -> int:
        """How many people delta is chosen for: by default as many as there are."""
        return num_users


@dataclass(frozen=True, kw_only=True)
class RecordLevel(Mark):
    """The price of one record alone. A record is one row of tokens; a user may have many."""

    epsilon_name: ClassVar[str] = "record-level epsilon"

    def priced(self, sampler: Sampler, *, num_users: int, groups: float) -> Sampler:
        """The sampler as it is for somebody who has one record."""
        del num_users, groups
        found = sampler.of_one_record()
        if found is None:
            raise UnaccountedPlanError(
                f"record-level privacy has a price where records are drawn and clipped one by one, "
                f"and not for {type(sampler).__name__}. Set unit = 'record', or leave record_level "
                "out."
            )
        return found

    def adjacency(self, sampler: Sampler, adjacency: Adjacency) -> Adjacency:
        """Under which adjacency one record is priced.

        If a user has more records than are kept, a record that is added may take the place of
        another one of the same user: then one kept record is exchanged, and not added.
        """
        if adjacency is Adjacency.ADD_REMOVE and not sampler.is_unbounded:
            return Adjacency.REPLACE
        return adjacency

    def words(self, *, num_users: int, groups: float) -> str:
        """The first words of a statement."""
        del num_users, groups
        return "guarantee: none at user level"


@dataclass(frozen=True, kw_only=True)
class Hypothetical(Mark):
    """The price as if there were `num_users` users, and `expected_groups` groups in a step.

    The noise on the average is that of the hypothetical run, z C / `expected_groups`. So the run
    with M groups adds noise of standard deviation z C M / `expected_groups` to its sum.
    Reference: McMahan et al. 2018, Sec. 3 ("Estimating the accuracy of private models for large
    datasets"); Ganesh et al. 2025, App. C.2 (batches); Charles et al. 2024, Fig. 8 (users: the
    groups are the real ones, and the noise multiplier is that of the larger population).
    """

    epsilon_name: ClassVar[str] = "hypothetical epsilon"

    num_users: int
    expected_groups: float

    def __post_init__(self) -> None:
        check_whole("hypothetical_users", self.num_users)
        if self.num_users < 2 or not 1 <= self.expected_groups < math.inf:
            raise InputError(
                f"hypothetical_users={self.num_users}, hypothetical_cohort_size="
                f"{self.expected_groups:g}: give at least 2 users and cohorts of at least 1."
            )

    def priced(self, sampler: Sampler, *, num_users: int, groups: float) -> Sampler:
        """The sampler with the rate of the hypothetical run; users keep as many records."""
        try:
            found = sampler.at_rate(self.expected_groups / groups * (num_users / self.num_users))
        except InputError as error:
            raise InputError(
                f"hypothetical_cohort_size={self.expected_groups:g} of hypothetical_users="
                f"{self.num_users:,} (by default num_users): {error} Give more "
                "hypothetical_users, or a smaller hypothetical_cohort_size."
            ) from None
        if found is None:
            raise UnaccountedPlanError(
                f"hypothetical numbers of users are priced for Poisson sampling, and not for "
                f"{type(sampler).__name__}. Set sampler = 'poisson', or leave them out."
            )
        return found

    def noise_ratio(self, groups: float) -> float:
        """The noise multiplier that runs, over the one that is priced."""
        return groups / self.expected_groups

    def people(self, num_users: int) -> int:
        """The hypothetical ones."""
        del num_users
        return self.num_users

    def words(self, *, num_users: int, groups: float) -> str:
        """The first words of a statement."""
        return (
            f"HYPOTHETICAL: priced as if there were {self.num_users:,} users and cohorts of "
            f"{self.expected_groups:,.10g}; the run had {num_users:,} users and cohorts of "
            f"{groups:,.10g}"
        )


@dataclass(frozen=True, kw_only=True)
class AsIfPoisson(Mark):
    """The price of Poisson sampling, where the batches were drawn in a way that has no price.

    Papers shuffle and state this number. It is not what ran (Chua et al. 2024, arXiv 2403.17673).
    """

    epsilon_name: ClassVar[str] = "epsilon as if not shuffled"

    def priced(self, sampler: Sampler, *, num_users: int, groups: float) -> Sampler:
        """The sampler that papers price."""
        del num_users, groups
        found = sampler.as_if
        if found is None:
            raise UnaccountedPlanError(
                f"{type(sampler).__name__} is priced as it is drawn: leave the mark out."
            )
        return found

    def words(self, *, num_users: int, groups: float) -> str:
        """The first words of a statement."""
        del num_users, groups
        return "guarantee: none, the batches were shuffled and not sampled as they are priced"


def hypothetical(
    num_users: int, groups: float, *, users: int | None, cohort_size: float | None
) -> Hypothetical | None:
    """The mark of hypothetical numbers; what is not given is as it is. None if neither is given."""
    if users is None and cohort_size is None:
        return None
    return Hypothetical(
        num_users=num_users if users is None else users,
        expected_groups=groups if cohort_size is None else cohort_size,
    )


def to_json(mark: Mark | None) -> dict[str, Any]:
    """What a plan writes about its mark: nothing if there is none, so that old records stay."""
    return {} if mark is None else {"mark": {"type": type(mark).__name__, **asdict(mark)}}


def from_json(data: dict[str, Any]) -> Mark | None:
    """The mark of a plan that was written; a mark that nobody knows is refused."""
    if "mark" not in data:
        return None
    written = dict(data["mark"])
    kinds: dict[str, type[Mark]] = {
        kind.__name__: kind for kind in (RecordLevel, Hypothetical, AsIfPoisson)
    }
    return kinds[written.pop("type")](**written)
