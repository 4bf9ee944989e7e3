"""Does the fast path give what the plain loop gives, on this very model?

The plain loop is the oracle: one user at a time through the model as it is. Training asks on first
batches of new shapes (`fast`); `verify` answers for anyone's model and batch, and names the
parameter that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from userdp.clipping.compiled import Execution
from userdp.clipping.flat import FlatBuffer
from userdp.clipping.joined import is_joined, separated
from userdp.clipping.one_pass import OnePass
from userdp.clipping.pack import Users
from userdp.clipping.plain import clipped_sum
from userdp.clipping.rules import ClipRule, FlatClip
from userdp.clipping.survey import clip_groups, find_layers
from userdp.errors import InputError, MixedExamplesError
from userdp.updates import Batch, RecordLoss, Update, causal_lm_loss, mean_gradient

# Users compared; enough to see one counted as another.
_COMPARED = 4
# Relative differences that rounding explains, by the dtype of the products.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.1


class FastPathError(MixedExamplesError):
    """The fast path and the plain loop disagree on a model."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How far the fast path is from the plain loop, by parameter, and which rule each layer has.

    Errors are relative to the largest parameter's clipped sum.
    """

    errors: dict[str, float]
    tolerance: float
    rules: dict[str, str]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter that differs most, and by how much; NaN is more than any number."""
        return max(self.errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))

    def raise_if_different(self) -> None:
        """Raise, naming the parameter, if any error is above the tolerance."""
        name, error = self.worst
        if not error <= self.tolerance:
            raise FastPathError(
                f"the fast path differs from the plain loop at {name!r}: relative error "
                f"{error:.1e}, tolerance {self.tolerance:.0e}. The model uses that weight in a way "
                'the fast path does not see. Use clipping="plain", and please report the model.'
            )


def verify(
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
    and so on. Without `clip`, the clip norm is the middle one of the users' norms, so that some are
    clipped and some are not. The model is left as it was; evaluation mode is needed where it has
    dropout, which gives every pass other numbers.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8,
    ...                     bos_token_id=0, eos_token_id=0)
    >>> ids = torch.randint(0, 16, (4, 8))
    >>> checked = verify(GPT2LMHeadModel(config).eval(), {"input_ids": ids, "labels": ids})
    >>> checked.worst[1] < 1e-5
    True
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
    rule = clip or FlatClip(clip_norm=_middle_norm(model, parameters, users, record_loss))
    execution = Execution(record_loss=record_loss, compute_dtype=compute_dtype)
    one_pass = OnePass(model, parameters, rule, users, execution=execution)

    def run(few: Users) -> Update:
        total = FlatBuffer(parameters).views
        one_pass(few, total)
        return total

    return compare_with_plain(
        model,
        parameters,
        rule,
        users,
        run,
        record_loss=record_loss,
        compute_dtype=compute_dtype,
        compared=users.count,
    )


def compare_with_plain(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rule: ClipRule,
    users: Users,
    fast: Callable[[Users], Update],
    *,
    record_loss: RecordLoss,
    compute_dtype: torch.dtype | None,
    compared: int = _COMPARED,
) -> Verification:
    """Run the first users through both paths, the others at weight zero; raise if different."""
    refuse_dropout(model)
    compared = min(compared, users.count)
    weights = users.weights.clone()
    weights[users.rows_of(compared - 1)[1] :] = 0
    found = fast(replace(users, weights=weights))
    expected = _plain(model, parameters, rule, users, weights, compared, record_loss, compute_dtype)
    largest = max(float(tensor.norm()) for tensor in expected)
    names = {id(p): name for name, p in model.named_parameters()}
    # That of frozen weights, too: adapters may be wider than what they adapt.
    coarsest = min((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    dtype = compute_dtype or coarsest
    result = Verification(
        errors={
            names[id(p)]: float((a - b).norm()) / largest if largest > 0 else float(a.norm())
            for p, a, b in zip(parameters, found, expected, strict=True)
        },
        tolerance=_TOLERANCES.get(dtype, _COARSE_TOLERANCE),
        rules={layer.name: layer.rule.__name__ for layer in find_layers(model)},
    )
    result.raise_if_different()
    return result


def refuse_dropout(model: nn.Module) -> None:
    """Raise if two passes over the same records give other numbers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise InputError(
                f"dropout at {name!r} is on: it gives every pass other numbers, so the fast path "
                "cannot be compared with the plain loop. Call model.eval(), or set its p to 0."
            )


def _plain(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rule: ClipRule,
    users: Users,
    weights: Tensor,
    compared: int,
    record_loss: RecordLoss,
    compute_dtype: torch.dtype | None,
) -> Update:
    """The oracle's sum of the first users, each with its records alone: no padded rows."""
    device = users.weights.device.type
    updates: list[Update] = []
    with torch.autocast(device, compute_dtype, enabled=compute_dtype is not None):
        for user in range(compared):
            start, stop = users.rows_of(user)
            count = int((weights[start:stop] > 0).sum())
            if count:
                own = {n: tensor[start : start + count] for n, tensor in users.batch.items()}
                own = separated(own) if is_joined(own) else own
                updates.append(mean_gradient(model, parameters, own, record_loss=record_loss))
    groups = clip_groups(find_layers(model))
    layers = [groups[id(parameter)] for parameter in parameters]
    return clipped_sum(updates, rule, like=parameters, layers=layers)


def _middle_norm(
    model: nn.Module, parameters: Sequence[nn.Parameter], users: Users, record_loss: RecordLoss
) -> float:
    norms: list[float] = []
    for user in range(users.count):
        start, stop = users.rows_of(user)
        own = {n: tensor[start:stop] for n, tensor in users.batch.items()}
        update = mean_gradient(model, parameters, own, record_loss=record_loss)
        norms.append(float(sum(tensor.square().sum() for tensor in update)) ** 0.5)
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    if not finite:
        raise InputError(
            "no user's gradient is finite, so there is nothing to compare: look at the model's "
            "weights and at the batch."
        )
    return finite[len(finite) // 2] or 1.0
