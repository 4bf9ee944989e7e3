"""The time to draw a cohort, beside a floor that draws as many numbers and reads as many rows.

    python benchmarks/sampling.py                    cohorts of 4,096 from 100 million users
    python benchmarks/sampling.py 1000000 512        other numbers of users and of a cohort
    python benchmarks/sampling.py --json             the same as one JSON object

Bar: a Poisson cohort of 4,096 from 100 million users in less than 5 ms. The index of 100 million
users with one row each takes 1.6 GB. A third of the users have eight rows if there are at most ten
million of them, so that rows are chosen, too; the others have one.

Times are medians of many steps, so that other work on the machine disturbs them little. Samplers
that deal users once a run or round also say how long that first draw takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from userdp.index import UserIndex
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    PoissonRecords,
    PoissonUsers,
    Sampler,
    WithoutReplacement,
)
from userdp.streams import RunSecret, Streams

STEPS = 40
GROUP_SIZE = 4
# Above this number of users all have one row, for memory.
MOST_WITH_MANY_ROWS = 10_000_000
# Above this number of users nobody is dealt out several times: the deal alone would take 8 GB.
MOST_DEALT_OFTEN = 10_000_000


def index_of(num_users: int) -> UserIndex:
    """Users of one row, or of one and eight."""
    if num_users > MOST_WITH_MANY_ROWS:
        return UserIndex(indptr=np.arange(num_users + 1), rows=np.arange(num_users))
    sizes = np.where(np.arange(num_users) % 3 == 0, 8, 1)
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    return UserIndex(indptr=indptr, rows=np.arange(int(indptr[-1])))


def samplers(num_users: int, cohort: int) -> list[Sampler]:
    """Each with cohorts of this size on average."""
    rate = cohort / num_users
    rounds = round(1 / rate)
    found: list[Sampler] = [
        PoissonUsers(user_sampling_prob=rate, group_size=GROUP_SIZE),
        PoissonRecords(record_sampling_prob=rate, group_size=8),
        CappedPoissonUsers(
            user_sampling_prob=rate, cap=cohort, num_users=num_users, group_size=GROUP_SIZE
        ),
        WithoutReplacement(cohort_size=cohort, num_users=num_users, group_size=GROUP_SIZE),
        CyclicPoissonUsers(user_sampling_prob=16 * rate, parts=16, group_size=GROUP_SIZE),
        CyclicPoissonRecords(record_sampling_prob=16 * rate, parts=16, group_size=8),
        BallsInBins(bins=rounds, group_size=GROUP_SIZE),
        BalancedIteration(round_length=rounds, group_size=GROUP_SIZE),
    ]
    if num_users <= MOST_DEALT_OFTEN:
        found.append(Allocation(steps=10 * rounds, participations=10, group_size=GROUP_SIZE))
    return found


def floor(index: UserIndex, cohort: int) -> Callable[[int], Any]:
    """Numbers for the gaps of a cohort, and the rows of as many users, read in order."""

    def draw(step: int) -> Any:
        rng = np.random.Generator(np.random.Philox(key=step))
        gaps = rng.standard_exponential(cohort)
        users = (np.cumsum(gaps) * (index.num_users - 1) / gaps.sum()).astype(np.int64)
        return index.rows[index.indptr[users]]

    return draw


def drawn(sampler: Sampler, index: UserIndex, streams: Streams, step: int) -> Any:
    """The cohort of one step."""
    return sampler.draw(index, step, streams)


def median_seconds(draw: Callable[[int], Any], steps: int = STEPS) -> tuple[float, float]:
    """The time of the first call, and the median of the others."""
    times: list[float] = []
    for step in range(steps + 1):
        start = time.perf_counter()
        draw(step)
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def measure(num_users: int, cohort: int) -> dict[str, Any]:
    """Milliseconds a step for the floor and for every sampler."""
    index = index_of(num_users)
    _, least = median_seconds(floor(index, cohort))
    rows: list[dict[str, Any]] = []
    for number, sampler in enumerate(samplers(num_users, cohort)):
        # Each is a run of its own, so that none finds the users dealt out already.
        streams = RunSecret.fixed_for_tests(number).streams("cohort")
        first, usual = median_seconds(partial(drawn, sampler, index, streams))
        rows.append(
            {
                "sampler": type(sampler).__name__,
                "ms": usual * 1e3,
                "times_floor": usual / least,
                "first_ms": first * 1e3,
            }
        )
    return {"users": num_users, "cohort": cohort, "floor_ms": least * 1e3, "samplers": rows}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("users", nargs="?", type=int, default=100_000_000)
    parser.add_argument("cohort", nargs="?", type=int, default=4_096)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_users, cohort = options.users, options.cohort
    found = measure(num_users, cohort)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{num_users:,} users, cohorts of {cohort:,}; floor {found['floor_ms']:.2f} ms: as many "
        "numbers drawn and rows read"
    )
    for row in found["samplers"]:
        print(
            f"  {row['sampler']:21s} {row['ms']:8.2f} ms a step, {row['times_floor']:5.1f} times "
            f"the floor; the first step {row['first_ms']:,.0f} ms"
        )


if __name__ == "__main__":
    main()
