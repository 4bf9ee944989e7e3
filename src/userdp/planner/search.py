"""The choice of group size and cohort size, and of records or users, under a compute budget.

A step may compute B gradients. Example-level sampling (ELS) clips each of B records. User-level
sampling (ULS) clips the mean of G records for each of M users, with B = G M. For the same guarantee
each choice needs its own noise multiplier, and each averages differently. So the noise that is left
on the mean gradient differs (Charles et al. 2024, Sec. 3):

    ELS: sigma_ELS(G_ELS) L(1) / B        ULS: sigma_ULS(M) L(G) / M

L(G) is the norm of a mean gradient over G records of one user. It is an argument: estimated from
the model (Eq. 8), or one of the two extremes of App. B. The planner needs no torch, and reads no
data.

Public: everything given and everything returned, if the norms and the record counts were public or
paid for. The caller says which; see docs/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from userdp import defaults
from userdp.accounting import accountant, events
from userdp.errors import InputError
from userdp.noise import Gaussian
from userdp.planner.norms import Norms
from userdp.prices.table import event_of, is_priced
from userdp.sampling import PoissonRecords, PoissonUsers, Sampler
from userdp.units import Adjacency

ELS, ULS = "ELS", "ULS"

LARGEST_GROUP = 256

Split = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is given. All of it is public.

    N = `num_users`, B = `compute` (the expected number of gradients in a step), T = `steps`.
    `group_size_els` is what the median rule gave. `largest_group` is the most records that may be
    asked of a user. `num_records` are kept where that is public; else as many as users may keep.
    """

    num_users: int
    group_size_els: int
    epsilon: float
    delta: float
    steps: int
    compute: int
    largest_group: int = LARGEST_GROUP
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    hypothetical: bool = False
    num_records: int | None = None

    @property
    def kept_records(self) -> int:
        """What example-level sampling draws from."""
        return self.num_records or self.group_size_els * self.num_users

    def __post_init__(self) -> None:
        for name in ("num_users", "group_size_els", "steps", "compute", "largest_group"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: give at least 1.")
        if self.num_users < 2:
            raise InputError("num_users=1: hiding one user takes at least one other.")
        accountant.check_epsilon(self.epsilon)
        # More users than there are have the delta of those who are.
        accountant.check_delta(self.delta, num_users=None if self.hypothetical else self.num_users)
        if self.compute > self.num_users * max(self.largest_group, self.group_size_els):
            raise InputError(
                f"compute={self.compute:,} gradients a step is more than all {self.num_users:,} "
                "users hold. Use less compute, or more records a user."
            )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to spend the budget. For ELS the cohort is of records."""

    method: str
    group_size: int
    cohort_size: int
    rate: float
    steps: int
    noise_multiplier: float
    noise_stddev: float
    hypothetical: bool = False

    @property
    def noise_of_run(self) -> float:
        """The noise on the mean of all steps' gradients, to compare runs of different length."""
        return self.noise_stddev / math.sqrt(self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"noise_of_run": self.noise_of_run}


@dataclass
class Planner:
    """The noise multipliers for one setting. Each is searched for once."""

    setting: Setting
    norms: Norms
    _noise: dict[tuple[Sampler, int], float] = field(
        default_factory=dict[tuple[Sampler, int], float]
    )

    def uls_noise(self, cohort_size: int, steps: int | None = None) -> float:
        """sigma_ULS(M), the multiplier of user-level sampling with M expected users (Eq. 3)."""
        rate = cohort_size / self.setting.num_users
        return self._searched(PoissonUsers(user_sampling_prob=rate, group_size=1), steps)

    def _searched(self, sampler: Sampler, steps: int | None) -> float:
        key = (sampler, steps or self.setting.steps)
        if key not in self._noise:
            self._noise[key] = self._search(*key)
        return self._noise[key]

    def _search(self, sampler: Sampler, steps: int) -> float:
        setting = self.setting

        def event(sigma: float) -> events.DpEvent:
            noise = Gaussian(noise_multiplier=sigma)
            return event_of(sampler, noise, setting.adjacency, steps=steps)

        goal = {"target": setting.epsilon, "delta": setting.delta}
        found = accountant.search_noise(event, **goal, adjacency=setting.adjacency)
        if found is None:
            return accountant.calibrate(event, **goal, adjacency=setting.adjacency)
        return found

    def splits(self, compute: int | None = None) -> list[Split]:
        """Every (G, M) with G M = B and G a power of two that the users and records allow.

        There is none where sampled users have no price: with several owners a record.
        """
        if not is_priced(PoissonUsers, Gaussian, self.setting.adjacency):
            return []
        compute = compute or self.setting.compute
        sizes = [1 << power for power in range(compute.bit_length())]
        return [
            (size, compute // size)
            for size in sizes
            if compute % size == 0
            and size <= self.setting.largest_group
            and compute // size <= self.setting.num_users
        ]

    def uls(self, split: Split, steps: int | None = None) -> Candidate:
        """User-level sampling with this split."""
        group_size, cohort_size = split
        steps = steps or self.setting.steps
        noise = self.uls_noise(cohort_size, steps)
        return Candidate(
            method=ULS,
            group_size=group_size,
            cohort_size=cohort_size,
            rate=cohort_size / self.setting.num_users,
            steps=steps,
            noise_multiplier=noise,
            noise_stddev=noise * self.norms(group_size) / cohort_size,
            hypothetical=self.setting.hypothetical,
        )

    def els(self, compute: int | None = None, steps: int | None = None) -> Candidate | None:
        """Example-level sampling with the median rule's group size; None if records are too few.

        Each kept record has a coin of p = B / (kept records), the sampler of sigma_ELS(G) (Eq. 2).
        """
        compute, steps = compute or self.setting.compute, steps or self.setting.steps
        group_size = self.setting.group_size_els
        rate = compute / self.setting.kept_records
        if rate > 1:
            return None
        sampler = PoissonRecords(record_sampling_prob=rate, group_size=group_size)
        noise = self._searched(sampler, steps)
        return Candidate(
            method=ELS,
            group_size=group_size,
            cohort_size=compute,
            rate=rate,
            steps=steps,
            noise_multiplier=noise,
            noise_stddev=noise * self.norms(1) / compute,
            hypothetical=self.setting.hypothetical,
        )

    def objective(self, split: Split) -> float:
        """v_ULS = L(G) sigma(M) / M (Eq. 9, with the cohort it is averaged over)."""
        return self.uls(split).noise_stddev

    def estimate_and_double(self, compute: int | None = None, *, first_cohort: int = 1) -> Split:
        """Alg. 3: double whichever of G and M lowers the noise more, until the budget is spent.

        It compares tau_G = L(2G) / L(G) with tau_M = s(2M) / s(M), where s(M) = sigma_ULS(M) / M is
        the noise left on a mean over M users. This is the paper's v = L(G) sigma(M), Eq. 9, with
        the sigma of Eq. 6. (The noise multiplier alone grows with M, and could never favour a
        larger cohort.) The paper starts from `first_cohort` = 32 users. From 1, every split can be
        reached.
        """
        compute = compute or self.setting.compute
        allowed = self.splits(compute)
        if not allowed:
            raise InputError(f"no split of {compute:,} gradients fits the users and their records.")
        largest = max(size for size, _ in allowed)
        most = max(cohort for _, cohort in allowed)
        group_size, cohort_size = 1, min(first_cohort, compute, most)
        while 2 * group_size * cohort_size <= compute:
            grow_group = 2 * group_size <= largest
            grow_cohort = 2 * cohort_size <= most
            if grow_group and grow_cohort:
                tau_group = self.norms(2 * group_size) / self.norms(group_size)
                tau_cohort = self._noise_per_user(2 * cohort_size) / self._noise_per_user(
                    cohort_size
                )
                grow_group = tau_group < tau_cohort
            if grow_group:
                group_size *= 2
            elif grow_cohort:
                cohort_size *= 2
            else:
                break
        # What is left of the budget goes to the cohort, which is never worse.
        return min(allowed, key=lambda split: abs(math.log(split[0] / group_size)))

    def _noise_per_user(self, cohort_size: int) -> float:
        """sigma(M) / M, the noise that is left on the average of M users."""
        return self.uls_noise(cohort_size) / cohort_size


def exhaustive(splits: Sequence[Split], objective: Callable[[Split], float]) -> Split:
    """The best of all splits."""
    return min(splits, key=objective)


def greedy_oracle(
    splits_at: Callable[[int], Sequence[Split]],
    compute: int,
    objective: Callable[[Split], float],
    *,
    first_cohort: int = 1,
) -> Split:
    """Double G or M, whichever gives the lower objective, until the budget is spent (App. F.1)."""
    group_size, cohort_size = 1, min(first_cohort, compute)
    while 2 * group_size * cohort_size <= compute:
        allowed = set(splits_at(2 * group_size * cohort_size))
        options = [
            split
            for split in ((2 * group_size, cohort_size), (group_size, 2 * cohort_size))
            if split in allowed
        ]
        if not options:
            break
        group_size, cohort_size = min(options, key=objective)
    return group_size, cohort_size


def random_split(splits: Sequence[Split], rng: np.random.Generator) -> Split:
    """Any split (App. F.1)."""
    return splits[int(rng.integers(len(splits)))]


def max_cohort(splits: Sequence[Split]) -> Split:
    """As many users as possible (App. F.1)."""
    return max(splits, key=lambda split: split[1])


def max_group(splits: Sequence[Split]) -> Split:
    """As many records per user as possible (App. F.1)."""
    return max(splits, key=lambda split: split[0])


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best plan, the reasons for it, and the alternatives."""

    best: Candidate
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    strategies: dict[str, Split]
    other_steps: tuple[Candidate, ...]
    hypothetical: tuple[Candidate, ...]


def recommend(
    setting: Setting, norms: Norms, *, user_factors: Sequence[int] = (), seed: int = 0
) -> Recommendation:
    """The plan with the least noise on the mean gradient, with reasons and alternatives.

    For ULS it takes the best split of a full search, and also gives that of Estimate-and-Double.
    Comparison (7) decides between ELS and ULS. `user_factors` asks what, for example, 10 times the
    users would change. Those candidates are marked hypothetical.

    >>> from userdp.planner.norms import same_direction
    >>> setting = Setting(
    ...     num_users=1024, group_size_els=32, epsilon=1.0, delta=1e-6, steps=1000, compute=64,
    ...     largest_group=32)
    >>> recommend(setting, same_direction()).best.method
    'ULS'
    """
    planner = Planner(setting, norms)
    splits = planner.splits()
    els = planner.els()
    doubled: Split | None = None
    strategies: dict[str, Split] = {}
    if splits:
        doubled = planner.estimate_and_double()
        strategies = {
            "exhaustive": exhaustive(splits, planner.objective),
            "estimate-and-double": doubled,
            "greedy-oracle": greedy_oracle(planner.splits, setting.compute, planner.objective),
            "random": random_split(splits, np.random.default_rng(seed)),
            "max-cohort": max_cohort(splits),
            "max-group": max_group(splits),
        }
    candidates = [planner.uls(split) for split in splits] + ([els] if els is not None else [])
    if not candidates:
        raise InputError(
            f"compute={setting.compute:,} gradients a step fits neither {setting.num_users:,} "
            "users nor their records. Use less compute."
        )
    best = min(candidates, key=lambda one: one.noise_stddev)
    return Recommendation(
        best=best,
        reasons=tuple(_reasons(planner, best, els, strategies)),
        candidates=tuple(candidates),
        strategies=strategies,
        other_steps=tuple(_other_steps(planner)),
        hypothetical=tuple(
            one for factor in user_factors for one in _more_users(setting, norms, factor)
        ),
    )


def _reasons(
    planner: Planner, best: Candidate, els: Candidate | None, strategies: dict[str, Split]
) -> list[str]:
    found: list[str] = []
    if els is not None:
        found.append(f"group size of ELS by the median rule: {els.group_size} records a user")
    if els is not None and strategies:
        uls = planner.uls(strategies["exhaustive"])
        left = els.noise_multiplier * planner.norms(1)
        right = uls.group_size * planner.norms(uls.group_size) * uls.noise_multiplier
        found.append(
            f"comparison (7): L(1) sigma_ELS = {left:.4g} {'<=' if left <= right else '>'} "
            f"G L(G) sigma_ULS = {right:.4g} at G={uls.group_size}: {best.method} adds less noise"
        )
    if strategies:
        group_size, cohort_size = strategies["estimate-and-double"]
        agrees = strategies["estimate-and-double"] == strategies["exhaustive"]
        found.append(
            f"Estimate-and-Double chooses G={group_size}, M={cohort_size}"
            + (", as the full search does" if agrees else "; the full search finds a better split")
        )
    return found


def _other_steps(planner: Planner) -> list[Candidate]:
    """The best candidate of each length, for the same total compute in fewer or more steps."""
    found: list[Candidate] = []
    setting = planner.setting
    for factor in (4, 2, 1):
        if setting.steps % factor == 0:
            found += _best_of(planner, setting.compute * factor, setting.steps // factor)
    for factor in (2, 4):
        if setting.compute % factor == 0:
            found += _best_of(planner, setting.compute // factor, setting.steps * factor)
    return found


def _best_of(planner: Planner, compute: int, steps: int) -> list[Candidate]:
    candidates = [planner.uls(split, steps) for split in planner.splits(compute)]
    els = planner.els(compute, steps)
    candidates += [els] if els is not None else []
    return [min(candidates, key=lambda one: one.noise_stddev)] if candidates else []


def _more_users(setting: Setting, norms: Norms, factor: int) -> list[Candidate]:
    """The best ELS and ULS candidates for `factor` times the users, at a delta for so many."""
    if factor < 1:
        raise InputError(f"{factor} times the users: give 1 or more.")
    people = setting.num_users * factor
    delta = min(setting.delta, defaults.delta(people))
    more = replace(setting, num_users=people, delta=delta, hypothetical=True)
    if setting.num_records is not None:
        more = replace(more, num_records=setting.num_records * factor)
    planner = Planner(more, norms)
    splits = planner.splits()
    found = [planner.uls(exhaustive(splits, planner.objective))] if splits else []
    return found + [els for els in [planner.els()] if els is not None]
