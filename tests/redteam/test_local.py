"""Attacks through local training: rows of one user that change what is computed for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import models_zoo
from userdp import AdaptiveClip, FlatClip, Plan, PrivateStep, StepSettings, UserIndex
from userdp.clipping import local
from userdp.clipping.summation import summation
from userdp.errors import InputError
from userdp.losses import Batch, RecordLoss, causal_lm_loss
from userdp.updates.fedavg import FedAvg

RULE = FlatClip(clip_norm=0.5)
UPDATE = FedAvg(local_learning_rate=0.5, local_batch_size=2, local_epochs=2)


class Classes(nn.Module):
    """Three classes from four numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float())


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = functional.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")
    return losses * batch["weight"] if "weight" in batch else losses


def person(seed: int, rows: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    y = torch.randint(0, 3, (rows,))
    return {"x": torch.rand(rows, 4), "y": y, "weight": 3 * torch.rand(rows)}


def made(
    model: nn.Module, path: Any, record_loss: RecordLoss = class_loss, **settings: Any
) -> local.LocalClipping:
    found: Any = summation(
        model,
        list(model.parameters()),
        UPDATE,
        RULE,
        record_loss=record_loss,
        settings=StepSettings(path=path, **settings),
        sequence_length=12,
    )
    found.skip_failing = True
    return found


def total(clipping: local.LocalClipping, cohort: Sequence[Batch]) -> Tensor:
    return torch.cat([view.flatten() for view in clipping.clipped_sum(cohort, RULE).total.views])


OTHERS = [person(seed) for seed in range(1, 30)]
ODD: dict[str, Callable[[dict[str, Tensor]], Batch]] = {
    "whole numbers": lambda own: own | {"x": own["x"].mul(9).long()},
    "a tensor that is missing": lambda own: {name: own[name] for name in ("x", "y")},
    "a tensor more": lambda own: own | {"more": own["x"]},
    "wider rows": lambda own: own | {"weight": own["weight"][:, None].expand(-1, 3)},
    "a class that is not there": lambda own: own | {"y": own["y"] + 3},
}


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_users_odd_rows_move_the_sum_by_that_users_update_alone(
    odd: Callable[[dict[str, Tensor]], Batch], precision: torch.dtype | None
) -> None:
    clipping = made(Classes(), "fast", compute_dtype=precision)
    before = total(clipping, OTHERS)
    # Fewest rows come first, and the first user's tensors say what a stack looks like.
    moved = total(clipping, [odd(person(0, rows=1)), *OTHERS]) - before
    # In bfloat16 both paths round, and each user by a hundredth at most.
    allowed = 1.0 + (1e-5 if precision is None else 0.01 * len(OTHERS))
    assert float(moved.norm()) <= allowed * RULE.clip_norm
    assert float((total(clipping, OTHERS) - before).norm()) == 0.0


def test_bfloat16_local_training_is_the_same_on_both_paths() -> None:
    # torch.autocast keeps rounded copies of weights, and local training moves the weights.
    cohort = [person(seed, rows=8) for seed in range(8)]
    model = Classes()
    fast, plain = (
        total(made(model, path, compute_dtype=torch.bfloat16), cohort) for path in ("fast", "plain")
    )
    assert float((fast - plain).norm()) <= 0.02 * float(plain.norm())


def test_rows_that_cannot_be_stacked_are_remembered_and_change_nobody_elses_path() -> None:
    clipping = made(Classes(), "fast")
    odd = {"x": torch.rand(1, 7), "y": torch.zeros(1, dtype=torch.int64)}
    total(clipping, [odd, *OTHERS])
    assert not clipping.trains_many_at_once
    went_on = made(Classes(), "fast")
    went_on.load_state_dict(clipping.state_dict())
    assert went_on.state_dict() == clipping.state_dict() != made(Classes(), "fast").state_dict()
    for one in (clipping, went_on):
        # Who trains side by side needs no plain loop.
        one._plain = None  # type: ignore[assignment]
        total(one, OTHERS)


def test_a_long_record_is_not_padded_beyond_the_models_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiled code gets few lengths. On a GPU a position too many would end the process.
    monkeypatch.setattr(local.torch, "compile", lambda step, **_: step)
    model = models_zoo.gpt2(positions=12).eval()
    clipping = made(model, "fast", causal_lm_loss, compile_blocks=True)
    cohort = [models_zoo.ragged_batch([9, 4], seed=1), models_zoo.ragged_batch([12], seed=2)]
    found = total(clipping, cohort)
    assert clipping.trains_many_at_once
    expected = total(made(model, "plain", causal_lm_loss), cohort)
    assert float((found - expected).norm()) <= 1e-5 * RULE.clip_norm


def test_somebody_of_many_records_takes_no_more_memory_for_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 64
    monkeypatch.setattr(local, "_MOST_CELLS", most)
    cells: list[int] = []
    stack = local.StackedRecords.of

    def watched(*arguments: Any) -> Any:
        stacked = stack(*arguments)
        cells.append(stacked.tensors["y"].numel())
        return stacked

    monkeypatch.setattr(local.StackedRecords, "of", staticmethod(watched))
    cohort = [*OTHERS[:6], person(99, rows=57)]
    found = total(made(Classes(), "fast"), cohort)
    assert max(cells) <= most
    expected = total(made(Classes(), "plain"), cohort)
    assert float((found - expected).norm()) <= 1e-5 * RULE.clip_norm


def test_adaptive_clipping_of_local_training_is_refused() -> None:
    # Every update is clipped on the way: all count as within, and the clip norm only falls.
    with pytest.raises(InputError, match="would lower it"):
        Plan.sample_users(
            num_users=50,
            clip=AdaptiveClip(clip_norm=1.0, count_noise=2.0),
            noise_multiplier=1.0,
            update=UPDATE,
        )


def test_a_loss_that_keeps_records_and_fails_alone_leaves_no_promise() -> None:
    kept: list[Tensor] = []
    uses = False

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = class_loss(model, batch)
        if uses:
            losses = losses * (1 + 5 * torch.stack([kept[-1], kept[-2]]).mean())
        # What is kept of users who train side by side cannot be read by one who trains alone.
        if torch._C._functorch.is_functorch_wrapped_tensor(batch["x"]):  # type: ignore[attr-defined]
            kept.append(batch["x"].detach())
        return losses

    model, users = Classes(), 12
    plan = Plan.sample_users(
        num_users=users,
        expected_cohort_size=users,
        group_size=2,
        steps=3,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
        update=UPDATE,
    )
    index = UserIndex.from_owners([user for user in range(users) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = PrivateStep(model, optimizer, plan, index, record_loss=loss)
    step.check_model(person(0))
    for number, cohort in enumerate(step.cohorts()):
        uses = number == 2
        step.apply([person(user) for user in range(len(cohort))])
    assert not step.statement().guarantee
