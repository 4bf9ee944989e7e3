"""The plain loop against an independent reference written with torch.func."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import models_zoo
from userdp.clipping.plain import clipped_sum
from userdp.clipping.rules import FlatClip
from userdp.errors import MixedExamplesError
from userdp.losses import causal_lm_loss
from userdp.models.checks import trainable_parameters
from userdp.updates.mean_gradient import mean_gradient

# Three users with 3, 1 and 4 records of different lengths.
USERS = ([9, 4, 2], [6], [3, 12, 5, 2])


def reference_update(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the mean of a user's losses, each record alone and without its padding."""
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    records = [
        line[labels != -100]
        for line, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        output = functional_call(model, weights, kwargs={"input_ids": tokens[None]})
        logits = output if isinstance(output, Tensor) else output.logits
        log_probs = torch.log_softmax(logits[0, :-1], dim=-1)
        return -log_probs[torch.arange(len(tokens) - 1), tokens[1:]].mean()

    # The mean is taken inside: Llama's RMSNorm rounds gradients to float32 on the way, so dividing
    # afterwards would round otherwise.
    def mean_loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.stack([loss(weights, tokens) for tokens in records]).mean()

    return grad(mean_loss)(weights)


def reference_clipped_sum(updates: list[dict[str, Tensor]], clip_norm: float) -> dict[str, Tensor]:
    """McMahan et al. 2018, Eq. 1, written out with Python floats."""
    total: dict[str, Tensor] = {}
    for update in updates:
        norm = math.sqrt(
            math.fsum(x * x for t in update.values() for x in t.double().flatten().tolist())
        )
        factor = min(1.0, clip_norm / norm)
        for name, tensor in update.items():
            total[name] = total.get(name, 0.0) + tensor.double() * factor
    return total


@pytest.mark.parametrize("architecture", models_zoo.BUILDERS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_plain_loop_matches_torch_func_reference(
    architecture: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = models_zoo.build(architecture, dtype)
    parameters = trainable_parameters(model)
    batches = [models_zoo.ragged_batch(lengths, seed=n) for n, lengths in enumerate(USERS)]
    references = [reference_update(model, batch) for batch in batches]

    updates = [mean_gradient(model, list(parameters.values()), batch) for batch in batches]
    for update, reference in zip(updates, references, strict=True):
        for value, name in zip(update, parameters, strict=True):
            torch.testing.assert_close(value, reference[name], rtol=tolerance, atol=tolerance)

    # A bound between the users' norms: some are clipped, some are not.
    norms = sorted(
        math.sqrt(sum(float(t.double().pow(2).sum()) for t in reference.values()))
        for reference in references
    )
    clip_norm = (norms[0] + norms[1]) / 2
    total = clipped_sum(updates, FlatClip(clip_norm=clip_norm), like=list(parameters.values()))
    expected = reference_clipped_sum(references, clip_norm)
    for value, name in zip(total, parameters, strict=True):
        torch.testing.assert_close(
            value.double(), expected[name].double(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("architecture", models_zoo.BUILDERS)
def test_every_trainable_tensor_gets_a_gradient(architecture: str) -> None:
    model = models_zoo.build(architecture)
    parameters = trainable_parameters(model)
    update = mean_gradient(
        model, list(parameters.values()), models_zoo.ragged_batch([7, 5], seed=3)
    )
    zero = [
        name for name, value in zip(parameters, update, strict=True) if not value.abs().max() > 0
    ]
    assert zero == []


@pytest.mark.parametrize("microbatch_records", [1, 2, 3, 5, 100])
def test_microbatches_do_not_change_the_update(microbatch_records: int) -> None:
    model = models_zoo.build("gpt2 tied")
    parameters = list(trainable_parameters(model).values())
    batch = models_zoo.ragged_batch([9, 4, 2, 7, 3], seed=1)
    whole = mean_gradient(model, parameters, batch)
    parts = mean_gradient(model, parameters, batch, microbatch_records=microbatch_records)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_each_record_weighs_the_same_whatever_its_length() -> None:
    model = models_zoo.build("gpt2 tied")
    batch = models_zoo.ragged_batch([12, 3], seed=5)
    losses = causal_lm_loss(model, batch)
    alone = [
        causal_lm_loss(model, {k: v[i : i + 1, :n] for k, v in batch.items()})
        for i, n in enumerate((12, 3))
    ]
    torch.testing.assert_close(losses, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_record_without_labels_has_zero_loss_and_zero_gradient() -> None:
    model = models_zoo.build("gpt2 tied")
    batch = models_zoo.ragged_batch([5], seed=2)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert causal_lm_loss(model, batch).item() == 0.0
    update = mean_gradient(model, list(model.parameters()), batch)
    assert all(float(value.detach().abs().max()) == 0.0 for value in update)


def test_group_without_rows_gives_a_zero_update() -> None:
    # A user whose texts leave no token to predict is still drawn by the sampler.
    model = models_zoo.build("gpt2 tied")
    empty = {
        "input_ids": torch.empty(0, 4, dtype=torch.int64),
        "labels": torch.empty(0, 4, dtype=torch.int64),
    }
    parameters = list(trainable_parameters(model).values())
    update = mean_gradient(model, parameters, empty)
    assert [value.shape for value in update] == [p.shape for p in parameters]
    assert all(float(value.abs().max()) == 0.0 for value in update)


def test_update_never_touches_dot_grad() -> None:
    model = models_zoo.build("gpt2 tied")
    mark = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = mark.clone()
    mean_gradient(model, list(model.parameters()), models_zoo.ragged_batch([4], seed=0))
    assert torch.equal(next(model.parameters()).grad, mark)  # pyright: ignore
    assert all(p.grad is None for p in list(model.parameters())[1:])


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses: losses.mean(),
        lambda losses: losses.mean()[None],
        lambda losses: losses[:, None],
    ],
    ids=["scalar", "one value for two records", "a column"],
)
def test_batch_mean_loss_is_refused(reduce) -> None:  # type: ignore[no-untyped-def]
    model = models_zoo.build("gpt2 tied")
    with pytest.raises(MixedExamplesError, match="one loss per record"):
        mean_gradient(
            model,
            list(model.parameters()),
            models_zoo.ragged_batch([5, 4], seed=0),
            record_loss=lambda model, batch: reduce(causal_lm_loss(model, batch)),
        )


def test_half_precision_gradients_accumulate_in_float32() -> None:
    model = models_zoo.build("llama", torch.bfloat16)
    update = mean_gradient(
        model,
        list(model.parameters()),
        models_zoo.ragged_batch([6, 5, 4], seed=0),
        microbatch_records=1,
    )
    assert {value.dtype for value in update} == {torch.float32}
