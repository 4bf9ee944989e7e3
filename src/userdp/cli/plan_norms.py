"""What `userdp plan` takes for the norms of users' gradients, and what hangs on it."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from userdp.cli import common
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.names.tasks import TaskName
from userdp.planner import norms as norm_models
from userdp.planner import search as planner
from userdp.planner.norms import Norms
from userdp.planner.search import Candidate


class Assumed(StrEnum):
    """What to assume about a user's gradients without an estimate (Charles et al. 2024, App. B)."""

    SAME = "same"
    ORTHOGONAL = "orthogonal"


_ASSUMED: dict[Assumed, Norms] = {
    Assumed.SAME: norm_models.same_direction(),
    Assumed.ORTHOGONAL: norm_models.orthogonal(),
}


def estimated_norms(
    model: str,
    store: UserStore,
    *,
    largest_group: int,
    sample_users: int,
    sequence_length: int,
    task: TaskName | None,
) -> dict[int, float]:
    """L(G) of a model, measured on users of the store. It needs torch and is not private."""
    common.quiet_transformers()
    from userdp.data.tokens import tokenise
    from userdp.models.load import load_model
    from userdp.planner.gradient_norms import median_norms
    from userdp.training.configured import named_task

    loaded, tokenizer = load_model(model, task=task or "causal")
    chosen = named_task(task, loaded, tokenizer, store)
    return median_norms(
        loaded,
        tokenise(store, tokenizer, sequence_length=sequence_length, encoding=chosen.encoding),
        chosen,
        largest_group=largest_group,
        sample_users=sample_users,
        # The same users each time, so that planning twice looks at no more of them.
        rng=np.random.default_rng(0),
    )


def given_norms(path: Path | None, assume: Assumed) -> tuple[Norms, str]:
    """L(G) from a file, or as assumed, and where it is from in words."""
    if path is None:
        rule = {Assumed.SAME: "L(G) = L(1)", Assumed.ORTHOGONAL: "L(G) = L(1) / sqrt(G)"}
        return _ASSUMED[assume], f"assumed {rule[assume]}, in units of L(1)"
    try:
        data: dict[str, Any] = json_module.loads(path.read_text(encoding="utf-8"))
        norms = {int(size): float(value) for size, value in data.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise InputError(
            f'{path}: expected a JSON object of group size to norm, like {{"1": 0.9, "2": 0.7}}.'
        ) from None
    return norm_models.estimated(norms), f"estimated, {path.name}"


def what_hangs_on_it(candidates: Sequence[Candidate], assumed: Assumed) -> str | None:
    """Which group sizes the two extremes of App. B would choose, if these differ.

    Real gradients of a user lie between them, so a plan that assumes one of them is one end of a
    range.
    """
    norms = _ASSUMED[assumed]
    sampled = [one for one in candidates if one.method == planner.ULS]
    if not sampled:
        return None

    def best_if(other: Norms) -> int:
        # The noise multiplier does not depend on the norms.
        def noise(one: Candidate) -> float:
            return one.noise_stddev / norms(one.group_size) * other(one.group_size)

        return min(sampled, key=noise).group_size

    same, orthogonal = (best_if(_ASSUMED[which]) for which in (Assumed.SAME, Assumed.ORTHOGONAL))
    if same == orthogonal:
        return None
    return (
        f"no gradient norms were given: G={same} if all gradients of a user agree, G={orthogonal} "
        "if they are orthogonal. Estimate them with --model, or on public data for "
        "--gradient-norms"
    )
