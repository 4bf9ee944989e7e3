"""The norm of a user's mean gradient by group size, which the planner needs for a model.

L(G) is the median over users of the norm of the mean gradient over at most G of a user's records.
If it falls like 1 / sqrt(G), large groups are worth their compute. If it does not fall, more users
are. Reference: Charles et al. 2024, Sec. 6: Eq. 8 and Alg. 3.

This is not private: the medians over the sampled users are exact. Planning with them looks at
these users' data without paying for it, and `userdp plan` says so. Use public data to avoid this.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.index import Rows
from userdp.losses import on_device
from userdp.models.checks import refuse_mixing, trainable_parameters
from userdp.tasks import Task
from userdp.updates.mean_gradient import mean_gradient

MICROBATCH_RECORDS = 16


def median_norms(
    model: nn.Module,
    rows: TokenRows,
    task: Task,
    *,
    largest_group: int,
    sample_users: int = 32,
    rng: np.random.Generator,
) -> dict[int, float]:
    """L(G) for G = 1, 2, 4, ... up to `largest_group`, from `sample_users` users drawn by `rng`.

    The gradients are those of the task's loss on `rows`, which the task's encoding made.
    All G use the same random order of a user's rows, so that a user's norms differ by the group
    size and not by the draw. A user with fewer than G rows contributes all of them, as in training.
    """
    if sample_users < 1 or largest_group < 1:
        raise InputError(
            f"sample_users={sample_users}, largest_group={largest_group}: both must be 1 or more."
        )
    refuse_mixing(model)
    model.eval()
    index = rows.index()
    with_rows = np.unique(np.asarray(rows.owners))
    sampled = rng.choice(with_rows, size=min(sample_users, len(with_rows)), replace=False)
    sizes = [1 << power for power in range(largest_group.bit_length())]
    # What a task draws does not change which rows are drawn.
    (of_task,) = rng.spawn(1)
    norms = [
        list(_norms(model, rows, rng.permutation(index.rows_of(int(user))), sizes, task, of_task))
        for user in sampled
    ]
    medians = np.median(np.asarray(norms, dtype=np.float64), axis=0)
    return dict(zip(sizes, medians.tolist(), strict=True))


def _norms(
    model: nn.Module,
    rows: TokenRows,
    own: Rows,
    sizes: list[int],
    task: Task,
    rng: np.random.Generator,
) -> Iterator[float]:
    """The norm of the mean gradient over the first G of one user's rows, for each G."""
    parameters = list(trainable_parameters(model).values())
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    done = 0
    for size in sizes:
        # Each row is used once, because the smaller groups are the beginning of the larger ones.
        fresh = own[done:size]
        if len(fresh):
            batch = task.batch(rows, fresh, rng)
            mean = mean_gradient(
                model,
                parameters,
                on_device(batch, parameters[0].device),
                record_loss=task.record_loss,
                microbatch_records=MICROBATCH_RECORDS,
            )
            for tensor, gradient in zip(total, mean, strict=True):
                tensor += gradient.double() * len(fresh)
            done += len(fresh)
        yield _norm(total) / done


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())
