"""What a sampler is: public parameters, and the cohort of any step.

A sampler has no state. Everything it draws comes from streams that are keyed by the step, so any
process can draw any step's cohort, in any order, and gets the same one. A resumed run and many
ranks need nothing else.

Public: the parameters. They are all the accountant sees, and all it may see. Secret: every cohort,
its size included.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from userdp.errors import InputError
from userdp.index import Rows, UserIndex
from userdp.parts import Part, Registry
from userdp.sampling.cohort import Cohort
from userdp.streams import Streams
from userdp.units import SamplingUnit

# Numbers of users, records and steps must fit into 64-bit integers.
LARGEST_NUMBER = 2**62


@dataclass(frozen=True, kw_only=True)
class PublicNumbers:
    """What a configuration says about a run's size, whichever sampler it asks for.

    `expected_groups` is the expected number of groups a step, users or records; the noised sum is
    divided by it. `num_records` is a public estimate of how many records are kept.
    """

    num_users: int
    num_records: int
    expected_groups: float
    group_size: int
    steps: int

    def check(self, unit: SamplingUnit) -> None:
        """Refuse numbers that make no run."""
        check_counts(num_users=self.num_users, steps=self.steps)
        check_group_size(self.group_size)
        check_whole("num_records", self.num_records)
        if unit is SamplingUnit.USER:
            name, total, what = "expected_cohort_size", self.num_users, "users"
        else:
            name, total, what = "expected_batch_size", self.num_records, "records"
        expected = self.expected_groups
        if not 1 <= expected <= total:
            remedy = f"Lower {name}, or use more {what}." if expected > total else f"Raise {name}."
            raise InputError(
                f"{name}={expected:g} of {total:,} {what}: a step needs at least 1 and at most all "
                f"of them in expectation. {remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class Sampler(Part):
    """Draws who takes part in a step.

    A subclass is a frozen dataclass that sets `name` and `unit`. `group_size` is the most rows of
    one user in one step's groups (unit user), or in the data (unit record).
    """

    unit: ClassVar[SamplingUnit]
    # Whether the steps of all rows were chosen before (`UserIndex.batches`) and nothing is drawn.
    is_ordered: ClassVar[bool] = False
    # Whether users are dealt to the steps of a whole run or round at once (`dealt`).
    is_dealt: ClassVar[bool] = False
    group_size: int

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    @classmethod
    @abstractmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """The sampler for a run of this size; `own` are the values of its own `keys`."""

    @abstractmethod
    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """The cohort of one step: a function of the arguments alone."""

    def limit_contributions(self, index: UserIndex, streams: Streams) -> UserIndex:
        """The rows that take part at all, chosen once before training. By default all of them."""
        return index

    def check_users(self, num_users: int) -> None:
        """Refuse more users than the price was computed for, if it depends on their number."""
        del num_users

    def check_order(self, users: Rows, steps: Rows) -> None:
        """Refuse an order that the price does not cover: `users[i]` takes part in `steps[i]`."""
        del users, steps

    def check_steps(self, steps: int) -> None:
        """Refuse a run of another length than the sampler was made for, if that matters."""
        del steps

    def over(self, steps: int) -> Sampler:
        """The sampler for another run of so many steps, such as the rest after a fork."""
        del steps
        return self

    @classmethod
    def expected_groups(cls, public: PublicNumbers, **own: Any) -> float:
        """The public number of groups that a step has on average: the sum is divided by it."""
        del own
        return public.expected_groups

    @property
    def assumes(self) -> tuple[str, ...]:
        """What must be true for the price to hold, beside what holds for all samplers."""
        return ()

    @property
    def is_unbounded(self) -> bool:
        """Whether users keep any number of rows. Then nothing has a price at user level."""
        return False

    @property
    def as_if(self) -> Sampler | None:
        """The sampler whose price papers state for this one, which has none; else None."""
        return None

    def of_one_record(self) -> Sampler | None:
        """The sampler as it is for one row alone, if rows are drawn and clipped one by one."""
        return None

    def at_rate(self, factor: float) -> Sampler | None:
        """The sampler with `factor` times its rate; None if it has no rate to choose."""
        del factor
        return None

    @property
    def rows_in_a_group(self) -> int:
        """The most rows that one group can have."""
        return self.group_size if self.unit is SamplingUnit.USER else 1


@dataclass(frozen=True, kw_only=True)
class PlaceSampler(Sampler):
    """Draws among exactly `num_users` places. Users sit at some of them.

    A place that nobody sits at is drawn like any other, counts towards the cohort and gives
    nothing. So whether a user is there changes nobody else's chance to take part.
    """

    num_users: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("num_users", self.num_users)

    def check_users(self, num_users: int) -> None:
        """Refuse more users than places."""
        if num_users > self.num_users:
            raise InputError(
                f"there are more users than num_users={self.num_users:,}: the price depends on "
                "their number, and would be too low. Raise num_users to a public bound that "
                "holds, or use sampler = 'poisson'."
            )

    @property
    def assumes(self) -> tuple[str, ...]:
        """The number of users is a bound that holds."""
        return (
            f"no more than num_users={self.num_users:,} users are in the data: the price depends "
            "on it",
        )


SAMPLERS: Registry[Sampler] = Registry("sampler")


def check_probability(name: str, value: float) -> None:
    """Refuse what is no sampling probability."""
    if not 0.0 < value <= 1.0:
        raise InputError(f"{name}={value} is not a probability: give a value above 0, at most 1.")


def check_group_size(value: int) -> None:
    """Refuse groups without records."""
    check_whole("group_size", value)
    if value < 1:
        raise InputError(f"group_size={value}: a group has at least one record. Use 1 or more.")


def check_whole(name: str, value: Any) -> None:
    """Refuse what is no whole number: half a record has no price."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{name}={value!r} must be a whole number.")
    if abs(int(value)) > LARGEST_NUMBER:
        raise InputError(f"{name} is above {LARGEST_NUMBER:,}, beyond which nothing is computed.")


def check_counts(*, num_users: int, steps: int) -> None:
    """Refuse a run without others to hide among, or without steps."""
    check_whole("num_users", num_users)
    check_whole("steps", steps)
    if num_users < 2:
        raise InputError(
            f"num_users={num_users}: hiding one user takes at least one other. Use more users."
        )
    if steps < 1:
        raise InputError(f"steps={steps}: train for at least one step.")


def check_at_least_one(name: str, value: Any) -> None:
    """Refuse what is no whole number from one up."""
    check_whole(name, value)
    if value < 1:
        raise InputError(f"{name}={value}: use 1 or more.")
