"""A fixed order: every step's records were chosen before, a user's far enough from each other.

The batches come from `userdp bound --method min-separation` (Ganesh et al. 2025, Alg. 4). Nothing
here is drawn. Which record is in which step depends on who owns what, so this is for fixed-graph
privacy, where that is public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from userdp.errors import InputError
from userdp.index import Rows, UserIndex
from userdp.sampling.cohort import Cohort
from userdp.sampling.contract import SAMPLERS, PublicNumbers, Sampler, check_at_least_one
from userdp.streams import Streams
from userdp.units import SamplingUnit


@SAMPLERS.register
@dataclass(frozen=True, kw_only=True)
class MinSeparated(Sampler):
    """Step t takes the records of batch t. No user is in more than k steps, all b or more apart.

    k = `group_size`, b = `separation`. Each record is a group of its own. A record that has no
    tokens keeps its slot in its batch and gives nothing, so nobody else moves.
    """

    name: ClassVar[str] = "min-separated"
    unit: ClassVar[SamplingUnit] = SamplingUnit.RECORD
    is_ordered: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, str]] = {"separation": "separation"}
    separation: int = field(
        metadata={
            "hint": "It comes with a [data] selection by `userdp bound --method min-separation`."
        }
    )
    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one("separation", self.separation)
        check_at_least_one("steps", self.steps)

    @classmethod
    def configured(cls, public: PublicNumbers, **own: Any) -> Self:
        """One batch a step."""
        return cls(steps=public.steps, group_size=public.group_size, **own)

    def check_steps(self, steps: int) -> None:
        """Refuse a run of another length than was checked."""
        if steps != self.steps:
            raise InputError(
                f"the batches of {self.steps:,} steps were planned, and the run has {steps:,}."
            )

    def over(self, steps: int) -> MinSeparated:
        """The first batches."""
        return replace(self, steps=steps)

    @property
    def participations(self) -> int:
        """The most steps that one user takes part in."""
        return min(self.group_size, -(-self.steps // self.separation))

    def limit_contributions(self, index: UserIndex, streams: Streams) -> UserIndex:
        """The index itself, once its batches are seen to keep what the sampler says.

        The owners of the index are counted here. Where records have several owners, `training_rows`
        counts every one of them.
        """
        if index.batches is None:
            raise InputError(
                "min-separated sampling needs the batches in their order: give a selection by "
                "`userdp bound --method min-separation`, or UserIndex.batches."
            )
        batches = index.batches[: self.steps]
        if batches.ndim != 2 or len(batches) < self.steps:
            raise InputError(
                f"there are {len(batches):,} batches, and {self.steps:,} steps are planned: bound "
                "again with as many steps."
            )
        step, slot = np.nonzero(batches >= 0)
        owners = index.owner_of_rows()
        rows = batches[step, slot]
        if len(rows) and (rows.max() >= len(owners) or (owners[rows] < 0).any()):
            raise InputError("the batches hold rows that nobody owns: they are of another index.")
        self.check_order(owners[rows], step)
        return index

    def check_order(self, users: Rows, steps: Rows) -> None:
        """Refuse batches in which a user is too often, or too soon again."""
        order = np.lexsort((steps, users))
        users, steps = users[order], steps[order]
        gaps = (steps[1:] - steps[:-1])[users[1:] == users[:-1]]
        if len(gaps) and int(gaps.min()) < self.separation:
            raise InputError(
                f"a user takes part again after {int(gaps.min())} steps, and separation="
                f"{self.separation} is planned: plan for the batches that are used, or bound again."
            )
        most = int(np.bincount(users).max(initial=0))
        if most > self.group_size:
            raise InputError(
                f"a user takes part in {most} steps, and group_size={self.group_size} is planned: "
                "plan for the batches that are used, or bound again."
            )

    def draw(self, index: UserIndex, step: int, streams: Streams) -> Cohort:
        """One group per record of the step's batch that gives something."""
        if index.batches is None or not 0 <= step < self.steps:
            raise InputError(f"there is no batch for step {step}: {self.steps:,} were planned.")
        batch = index.batches[step]
        return Cohort.of_single_rows(batch[batch >= 0])

    @property
    def words(self) -> str:
        """Which records take part in a step."""
        return (
            f"records in a fixed order of {self.steps} batches, each user in at most "
            f"{self.group_size} steps, at least {self.separation} apart"
        )
