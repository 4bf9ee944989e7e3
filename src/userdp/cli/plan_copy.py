"""What of `userdp plan` goes into a configuration, and how it differs from what `train` takes."""

from __future__ import annotations

from typing import Any

from userdp import defaults
from userdp.cli.plan_records import Known
from userdp.clipping.rules import AutomaticClip
from userdp.plan import Plan
from userdp.planner.norms import Norms
from userdp.planner.search import ULS, Candidate, Planner, Setting
from userdp.sampling import PoissonRecords, PoissonUsers, PublicNumbers


def plan_of(setting: Setting, best: Candidate) -> Plan:
    """The plan of a run of the best candidate, as `train` makes it, with certified noise."""
    public = PublicNumbers(
        num_users=setting.num_users,
        num_records=setting.kept_records,
        expected_groups=float(best.cohort_size),
        group_size=best.group_size,
        steps=best.steps,
    )
    return Plan.of(
        PoissonUsers if best.method == ULS else PoissonRecords,
        public,
        clip=AutomaticClip(),
        delta=setting.delta,
        epsilon=setting.epsilon,
        adjacency=setting.adjacency,
    )


def keys_of(best: Candidate, known: Known) -> dict[str, Any]:
    """The keys of [privacy] that choose the candidate."""
    if best.method == ULS:
        return {
            "unit": "user",
            "expected_cohort_size": best.cohort_size,
            "group_size": best.group_size,
        }
    keys: dict[str, Any] = {"unit": "record", "expected_batch_size": best.cohort_size}
    if known.adjacency.fixed_graph:
        # The selection brings the group size and the number of records.
        return keys | {"adjacency": known.adjacency.value}
    return keys | {"group_size": best.group_size}


def in_words(setting: Setting, best: Candidate, known: Known, norms: Norms) -> list[str]:
    """What to copy, with its reason; the defaults have to be told apart from it."""
    return [*_of_privacy(setting, best, known, norms), *_beside(setting, best)]


def _beside(setting: Setting, best: Candidate) -> list[str]:
    """What else was asked for, and is not what `train` takes by default."""
    keys: list[str] = []
    if best.steps != defaults.STEPS:
        keys.append(f"[training] steps = {best.steps}")
    if setting.delta != defaults.delta(setting.num_users):
        keys.append(f"[privacy] delta = {setting.delta:g}")
    return [f"to copy as well, as it was asked for: {', '.join(keys)}"] if keys else []


def _of_privacy(setting: Setting, best: Candidate, known: Known, norms: Norms) -> list[str]:
    """The keys of [privacy], with their reason."""
    keys = ", ".join(
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in keys_of(best, known).items()
    )
    if known.adjacency.fixed_graph:
        source = known.store or "STORE"
        return [
            f"to copy: [privacy] {keys}",
            f"after `userdp bound {source} --max-records-per-user {known.per_user} --out "
            'selection.npz`, with [data] selection = "selection.npz"',
        ]
    cohort = round(defaults.expected_cohort_size(setting.num_users))
    if best.method == ULS and (best.group_size, best.cohort_size) == (defaults.GROUP_SIZE, cohort):
        return [f"to copy: [privacy] {keys}; the same is taken where they are left out"]
    # Users have no more than this on average, whatever they may give.
    group_size = min(defaults.GROUP_SIZE, setting.largest_group)
    usual = Planner(setting, norms).uls((group_size, cohort))
    lines = [
        f"to copy, together: [privacy] {keys}: the least noise for {setting.compute:,} gradients a "
        "step",
        f"left out, `train` samples {cohort:,} users a step with group_size = "
        f"{defaults.GROUP_SIZE}: about {group_size * cohort:,} gradients, and noise "
        f"{usual.noise_stddev:.4g}",
    ]
    if best.method == ULS and best.group_size < setting.largest_group:
        lines.append(
            "at the same cohort more records a user cost time and no privacy, and trained better "
            "where it was measured (docs/tuning.md): if there is time, raise group_size alone"
        )
    return lines
