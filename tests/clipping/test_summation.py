"""Which code computes a clipped sum: the fast path is for mean gradients alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import Summation, summation
from userdp.index import UserIndex
from userdp.losses import Batch
from userdp.noise import Gaussian
from userdp.plan import Plan
from userdp.sampling import PoissonUsers
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import MEAN_GRADIENT, mean_gradient


@dataclass(frozen=True, kw_only=True)
class Backwards(UpdateRule):
    """Minus twice the mean gradient: what no fast path would compute by itself."""

    name: ClassVar[str] = "backwards"

    def of_group(
        self, model: nn.Module, parameters: Sequence[Tensor], batch: Batch, **options: Any
    ) -> list[Tensor]:
        del options["clip"]
        return [-2 * tensor for tensor in mean_gradient(model, parameters, batch, **options)]

    @property
    def words(self) -> str:
        return "backwards"


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of a record is its input, whatever the weights are."""
    return model(batch["x"])[:, 0]


def made(update: UpdateRule, path: Any, clip_norm: float) -> tuple[Summation, FlatClip]:
    model = nn.Linear(2, 1, bias=False)
    rule = FlatClip(clip_norm=clip_norm)
    found = summation(
        model,
        list(model.parameters()),
        update,
        rule,
        record_loss=loss,
        settings=StepSettings(path=path, check=False),
        sequence_length=None,
    )
    return found, rule


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_an_update_that_is_no_mean_gradient_is_computed_by_its_own_rule(path: str) -> None:
    groups = [{"x": torch.tensor([[3.0, 4.0]])}, {"x": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}]
    expected = {MEAN_GRADIENT: [3.5, 4.0], Backwards(): [-7.0, -8.0]}
    for update, values in expected.items():
        found, rule = made(update, path, 1e6)
        total = found.clipped_sum(groups, rule).total.views[0][0]
        torch.testing.assert_close(total, torch.tensor(values))
    clipped, rule = made(Backwards(), path, 1.0)
    total = clipped.clipped_sum(groups[:1], rule).total.views[0][0]
    torch.testing.assert_close(total, torch.tensor([-0.6, -0.8]))


def test_the_fast_path_is_taken_for_mean_gradients_that_ask_for_it_alone() -> None:
    assert isinstance(made(MEAN_GRADIENT, "fast", 1.0)[0], FastClipping)
    assert isinstance(made(MEAN_GRADIENT, "plain", 1.0)[0], PlainClipping)
    assert isinstance(made(Backwards(), "fast", 1.0)[0], PlainClipping)


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_step_takes_the_updates_of_its_plans_rule(path: Any) -> None:
    plan = Plan(
        sampler=PoissonUsers(user_sampling_prob=1.0, group_size=1),
        clip=FlatClip(clip_norm=1.0),
        noise=Gaussian(noise_multiplier=0.0),
        update=Backwards(),
        steps=1,
        divisor=2.0,
        num_users=2,
        delta=1e-2,
        non_private=True,
    )
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        UserIndex.from_owners([0, 1]),
        record_loss=loss,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(1),
    )
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.1]])
    for cohort in step.cohorts():
        step.apply({"x": rows[group]} for group in cohort)
    # Minus the mean of (-0.6, -0.8) and (0, -0.2).
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.3, 0.5]]))
    assert "backwards" in step.statement().mechanism
