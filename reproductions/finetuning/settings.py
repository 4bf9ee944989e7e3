"""What one run of `compare` is: its setting, its plan and its learning rate.

A table is a JSON file: `defaults` and `rows`, each row with settings of its own; a list of values
stands for one run for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from reproductions.finetuning.sets import Set
from userdp.clipping.rules import AutomaticClip, FlatClip, NormalisedClip
from userdp.index import UserIndex
from userdp.plan import Plan
from userdp.prices.marks import Hypothetical
from userdp.units import Adjacency

NEVER_BINDS = 1e6


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. `epsilon` None trains without noise and without clipping.

    `method` is "uls" (users are sampled) or "els" (records are sampled, at most `k` of a user).
    `k` rows of a user take part, in a step or in the run. `select` says which, by a name of
    `userdp.data.choose`. `compute` is the expected number of rows a step, and then decides the
    cohort. `rank` 0 trains all weights. `targets` are module names with + between them. The rate
    rises over the share `warmup` of the steps and falls as `schedule` says.
    """

    data: str
    method: str = "uls"
    epsilon: float | None = 8.0
    k: int = 4
    cohort: float = 256
    compute: float | None = None
    select: str = "random"
    steps: int = 60
    rate: float | None = 1e-3
    rank: int = 4
    targets: str = "all-linear"
    clip: str = "flat"
    clip_norm: float = 1.0
    optimizer: str = "adam"
    schedule: str = "linear"
    warmup: float = 0.1
    seed: int = 0
    times_users: float = 1.0


def settings_of(table: dict[str, Any]) -> Iterator[Setting]:
    """The table's runs: lists are spread out, the last key fastest."""
    names = {one.name for one in fields(Setting)}
    for row in table["rows"]:
        given = {**table.get("defaults", {}), **row}
        assert given.keys() <= names, given.keys() - names
        lists = [value if isinstance(value, list) else [value] for value in given.values()]
        for values in itertools.product(*lists):
            yield Setting(**dict(zip(given, values, strict=True)))


def asked_for(row: dict[str, Any]) -> Setting:
    """The setting of a run that is done. Fields that it lacks had their defaults."""
    names = {one.name for one in fields(Setting)}
    return Setting(**{name: value for name, value in row.items() if name in names})


def plan_of(setting: Setting, found: Set, index: UserIndex) -> Plan:
    """The run's plan. Sizes of the sets are public here: they are in their README."""
    private = setting.epsilon is not None
    shared: dict[str, Any] = {
        "steps": setting.steps,
        "group_size": setting.k,
        "clip": clip_of(setting),
        "delta": (found.train.num_users * setting.times_users) ** -1.1,
        "epsilon": setting.epsilon,
        "noise_multiplier": None if private else 0.0,
        "non_private": not private,
    }
    given = np.minimum(np.diff(index.indptr), setting.k)
    if found.has_several_owners:
        return Plan.sample_records(
            num_users=found.train.num_users,
            num_records=len(given),
            expected_batch_size=min(setting.cohort, len(given)),
            adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT,
            **shared,
        )
    if setting.method == "uls":
        cohort = setting.cohort if setting.compute is None else setting.compute / given.mean()
        cohort = min(cohort, index.num_users)
        # What training on `times_users` as many users would be like, were all of them like these.
        more = Hypothetical(
            num_users=round(index.num_users * setting.times_users),
            expected_groups=cohort * setting.times_users,
        )
        return Plan.sample_users(
            num_users=index.num_users,
            expected_cohort_size=cohort,
            mark=None if setting.times_users == 1 else more,
            **shared,
        )
    assert setting.times_users == 1, "hypothetical multiples are for sampled users"
    return Plan.sample_records(
        num_users=index.num_users,
        num_records=int(given.sum()),
        expected_batch_size=min(setting.compute or setting.cohort, int(given.sum())),
        **shared,
    )


def clip_of(setting: Setting) -> Any:
    """The clip rule; without privacy its norm is too large to bind."""
    if setting.clip == "automatic":
        return AutomaticClip()
    kinds = {"flat": FlatClip, "normalised": NormalisedClip}
    clip_norm = setting.clip_norm if setting.epsilon is not None else NEVER_BINDS
    return kinds[setting.clip](clip_norm=clip_norm)


def share_of_rate(setting: Setting, step: int) -> float:
    """Which share of the full rate a step has: it rises, and then falls or stays."""
    warm = max(1, round(setting.warmup * setting.steps))
    left = (setting.steps - step) / (setting.steps - warm + 1)
    falls = {
        "linear": left,
        "cosine": 0.5 * (1 - math.cos(math.pi * min(1.0, left))),
        "constant": 1.0,
    }
    return min((step + 1) / warm, falls[setting.schedule])
