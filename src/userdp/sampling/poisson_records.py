"""Poisson sampling of records (ELS)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from userdp.index import UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_probability
from userdp.sampling.draws import at_most_each, check_limited, poisson
from userdp.streams import Streams
from userdp.units import SamplingUnit

# The `group_size` if users have any number of records. Only record-level privacy has a price then.
UNBOUNDED = 2**62


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class PoissonRecords(Sampler):
    """Each of a user's at most G rows takes part by itself with probability p (ELS).

    p = `record_sampling_prob`, G = `group_size`. The G rows are chosen once, before training.
    Reference: Charles et al. 2024, Alg. 1.

    >>> from userdp.streams import RunSecret
    >>> index = UserIndex.from_owners(["ann", "bob", "ann"])
    >>> sampler = PoissonRecords(record_sampling_prob=1.0, group_size=2)
    >>> cohort = sampler.draw(index, 0, RunSecret.fixed_for_tests(0).streams("cohort"))
    >>> [group.tolist() for group in cohort]
    [[0], [2], [1]]
    """

    name: ClassVar[str] = "poisson"
    unit: ClassVar[SamplingUnit] = SamplingUnit.RECORD
    record_sampling_prob: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("record_sampling_prob", self.record_sampling_prob)

    @property
    def is_unbounded(self) -> bool:
        """Whether users have any number of records. Then nothing has a price at user level."""
        return self.group_size >= UNBOUNDED

    def of_one_record(self) -> PoissonRecords:
        """Every row has its own coin."""
        return replace(self, group_size=1)

    def at_rate(self, factor: float) -> PoissonRecords:
        """Every row with another coin."""
        return replace(self, record_sampling_prob=self.record_sampling_prob * factor)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """p is the expected batch size over the number of kept records."""
        rate = public.expected_groups / public.num_records
        return cls(record_sampling_prob=rate, group_size=public.group_size)

    def limit_contributions(self, index: UserIndex, streams: Streams) -> UserIndex:
        """At most G rows of each user, uniformly without replacement (Alg. 1, first loop)."""
        return at_most_each(index, self.group_size, streams)

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per sampled row."""
        check_limited(index, self.group_size)
        sampled = poisson(index.num_rows, self.record_sampling_prob, streams.rng(step))
        return Cohort.of_single_rows(index.rows[sampled])

    @property
    def words(self) -> str:
        """Which records take part in a step."""
        kept = "any number of" if self.is_unbounded else f"at most {self.group_size}"
        return (
            f"Poisson sampling of records, rate={self.record_sampling_prob:.6g}, {kept} records a "
            "user"
        )
