"""What the tests of the fast path share: ragged cohorts, and the plain loop to compare with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.users import Users
from userdp.clipping.checks.verify import Verification, compare_with_plain
from userdp.clipping.execute.execution import Execution
from userdp.clipping.fast import FastClipping
from userdp.clipping.flat import FlatBuffer
from userdp.clipping.gradients import probes
from userdp.clipping.gradients.many_users import ManyUsers
from userdp.clipping.kernels import products
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import ClipRule, FlatClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import Batch, RecordLoss, Update, causal_lm_loss
from userdp.updates.mean_gradient import mean_gradient

# Ragged in every way: users of one to five records, of none, and of one that is hardly a token.
RAGGED = [[5, 9, 3], [4], [], [7, 7], [12, 2, 6, 8, 5], [3], [1], [6, 11]]


def cohort(
    lengths: Sequence[Sequence[int]], *, seed: int = 0, masked: bool = False
) -> list[dict[str, Tensor]]:
    """One batch a user, from the lengths of its records; `masked` asks for some tokens only."""
    groups: list[dict[str, Tensor]] = []
    for user, records in enumerate(lengths):
        group = models_zoo.ragged_batch(list(records) or [4], seed=1000 * seed + user)
        if masked:
            group["attention_mask"] = (group["labels"] != -100).long()
            places = torch.arange(group["labels"].shape[1])
            group["labels"] = group["labels"].masked_fill((places + user) % 2 == 1, -100)
        groups.append({name: tensor[: len(records)] for name, tensor in group.items()})
    return groups


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def shake(model: nn.Module, *, std: float = 0.1, seed: int = 5) -> nn.Module:
    """Move vectors off their initial zeros and ones, where wrong and right gradients look alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model):
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += (std * noise).to(parameter.dtype)
    return model


def norms(
    model: nn.Module, groups: Sequence[Batch], record_loss: RecordLoss = causal_lm_loss
) -> list[float]:
    """The norm of each user's update, by the plain loop."""
    parameters = trainable(model)
    found: list[float] = []
    for group in groups:
        update = mean_gradient(model, parameters, group, record_loss=record_loss)
        found.append(math.sqrt(sum(float(t.double().square().sum()) for t in update)))
    return found


def middle_clip(
    model: nn.Module, groups: Sequence[Batch], record_loss: RecordLoss = causal_lm_loss
) -> float:
    """A clip norm at which some of the users are clipped and some are not."""
    positive = sorted(norm for norm in norms(model, groups, record_loss) if norm > 0)
    assert positive[0] < positive[-1]
    return (positive[len(positive) // 2 - 1] + positive[len(positive) // 2]) / 2


def plain_sum(
    model: nn.Module,
    groups: Sequence[Batch],
    rule: ClipRule,
    record_loss: RecordLoss = causal_lm_loss,
) -> list[Tensor]:
    oracle = PlainClipping(model, trainable(model), record_loss=record_loss)
    return oracle.clipped_sum(groups, rule).total.views


def fast_sum(
    model: nn.Module,
    groups: Sequence[Batch],
    rule: ClipRule,
    record_loss: RecordLoss = causal_lm_loss,
    settings: StepSettings | None = None,
) -> list[Tensor]:
    """The fast path's sum; one record a row unless the settings say otherwise."""
    settings = settings or StepSettings()
    if settings.join_records is None:
        settings = replace(settings, join_records=False)
    fast = FastClipping(model, trainable(model), rule, record_loss=record_loss, settings=settings)
    # What is neither set nor cleared is seen.
    fast._total.values.fill_(torch.nan)
    return fast.clipped_sum(groups, rule).total.views


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of a parameter's two sums, relative to the norm of the whole sum."""
    whole = math.sqrt(sum(float(t.double().square().sum()) for t in expected))
    assert whole > 0
    distances = [
        float((a.double() - b.double()).norm()) for a, b in zip(found, expected, strict=True)
    ]
    assert all(math.isfinite(distance) for distance in distances)
    return max(distances) / whole


def assert_same_as_plain(
    model: nn.Module,
    groups: Sequence[Batch],
    *,
    record_loss: RecordLoss = causal_lm_loss,
    rule: ClipRule | None = None,
    settings: StepSettings | None = None,
    tolerance: float | None = None,
) -> None:
    """The fast path's sum is the plain loop's: to 1e-10 in float64, 1e-5 in float32."""
    rule = rule or FlatClip(clip_norm=middle_clip(model, groups, record_loss))
    if tolerance is None:
        tolerance = 1e-10 if trainable(model)[0].dtype == torch.float64 else 1e-5
    found = fast_sum(model, groups, rule, record_loss, settings)
    error = difference(found, plain_sum(model, groups, rule, record_loss))
    assert error <= tolerance


@contextlib.contextmanager
def squares_wherever_possible() -> Iterator[None]:
    """Products that give their norms as well, as on GPUs with a kernel for it; tiles are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "can_square", lambda *shape, **how: True)
        patch.setattr(products, "TILE", 4)
        yield


@contextlib.contextmanager
def pairs_wherever_possible() -> Iterator[None]:
    """Gram pairs for every product whose weight is used once; on the CPU none are chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes.Probes, "_prefers_pair", lambda self, layer: self._used_once(layer))
        yield


def compare_on(
    model: nn.Module,
    batch: Batch,
    *,
    group_size: int = 1,
    record_loss: RecordLoss = causal_lm_loss,
    clip: ClipRule | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Verification:
    """Compare the fast path with the plain loop on `batch`; raise if they differ.

    The first `group_size` rows of the batch belong to the first user, the next ones to the second,
    and so on. Without `clip`, some users are clipped and some are not. The model is left as it was.
    A model with dropout must be in evaluation mode: dropout makes every pass different.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no trainable parameter: nothing would be clipped.")
    rows = len(next(iter(batch.values())))
    if rows % group_size:
        raise ValueError(f"{rows} rows are not a whole number of users of {group_size} rows.")
    device = parameters[0].device
    users = Users(
        batch={name: tensor.to(device) for name, tensor in batch.items()},
        weights=torch.full((rows,), 1 / group_size, dtype=torch.float64, device=device),
        count=rows // group_size,
    )
    if users.count < 2:
        raise ValueError("one user alone cannot be confused with another: give at least two.")
    execution = Execution(record_loss=record_loss, compute_dtype=compute_dtype)

    def run(few: Users, rule: ClipRule) -> Update:
        total = FlatBuffer(parameters).views
        ManyUsers(model, parameters, rule, few, execution=execution)(few, total)
        return total

    return compare_with_plain(
        model,
        parameters,
        clip,
        users,
        run,
        record_loss=record_loss,
        compute_dtype=compute_dtype,
        compared=users.count,
    )
