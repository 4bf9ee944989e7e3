"""The loss of each record by itself, from which every update is made.

A loss is taken per record and never over a batch, because a mean over the batch would mix users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.errors import PLAIN, InputError
from userdp.index import IGNORED_LABEL as IGNORED_LABEL

Batch = Mapping[str, Tensor]
Update = list[Tensor]
RecordLoss = Callable[[nn.Module, Batch], Tensor]
TokenMean = Callable[[Tensor, Tensor], Tensor]
TokenSum = Callable[[Tensor, Tensor, Tensor], Tensor]

# Batch entries of joined records (`joined_records`). For every token they hold its position in its
# record, how many tokens of the record follow (-1 for padding), and the weight of its prediction.
JOINED_POSITION = "userdp_position"
JOINED_LEFT = "userdp_left"
JOINED_WEIGHT = "userdp_weight"


def records_in(batch: Batch) -> int:
    """How many records a batch holds."""
    return len(next(iter(batch.values())))


def on_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU goes on with what it does while it is copied."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def causal_lm_loss(
    model: nn.Module, batch: Batch, *, token_mean: TokenMean | None = None
) -> Tensor:
    """The loss of each record: mean negative log-likelihood of its own labelled tokens.

    `batch` has `input_ids` and `labels`, one record per row. A token with the label -100 does not
    count. Works on Hugging Face models, and on any module that maps input ids to logits. The own
    loss of a Hugging Face model is not used: it averages over the whole batch, hence over users.
    Records are padded on the right. A causal model never looks there, so no mask is needed.
    """
    # A Hugging Face model would otherwise build a key-value cache that nobody reads.
    options = {"use_cache": False} if hasattr(model, "generation_config") else {}
    output = model(input_ids=batch["input_ids"], **options)
    # The label of a position is the next token. The last position has none.
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    return (token_mean or mean_token_loss)(logits_of(output), labels)


def joined_lm_loss(model: nn.Module, batch: Batch, *, token_sum: TokenSum | None = None) -> Tensor:
    """The loss of each row of joined records: the weighted sum of its tokens' losses.

    `batch` comes from `joined_records`: the label of a token is what follows it in its record. The
    model runs with an attention that takes `record_layout` for its mask (`record_attention`).
    """
    output = model(
        input_ids=batch["input_ids"],
        position_ids=batch[JOINED_POSITION],
        attention_mask=record_layout(batch),
        use_cache=False,
    )
    sum_up = token_sum or weighted_token_loss
    return sum_up(logits_of(output), batch["labels"], batch[JOINED_WEIGHT])


def record_layout(batch: Batch) -> Tensor:
    """Where joined records lie: position and tokens left of each token, (rows, 1, length, 2)."""
    layout = torch.stack((batch[JOINED_POSITION], batch[JOINED_LEFT]), -1)
    return layout[:, None].to(torch.int32)


def masked_lm_loss(
    model: nn.Module, batch: Batch, *, token_mean: TokenMean | None = None
) -> Tensor:
    """The loss of each record for models that fill gaps (BERT): mean over its labelled tokens.

    `batch` has `input_ids` with tokens already masked, `labels` (-100 where nothing is predicted)
    and `attention_mask`. Without that mask the model would read the padding.
    """
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return (token_mean or mean_token_loss)(logits_of(output), batch["labels"])


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each record for models that classify: minus the log-likelihood of its class.

    `batch` has `input_ids`, `attention_mask` and one label per record in `labels`. A record with
    the label -100 has loss zero.
    """
    return F.cross_entropy(
        at_least_float32(class_logits(model, batch)),
        batch["labels"],
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )


def class_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of each record's classes."""
    mask = batch["attention_mask"]
    input_ids = batch["input_ids"]
    # Decoders classify by the last token that is not the padding token. What stands behind a record
    # must be that token, whatever it was padded with.
    config: Any = getattr(model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        input_ids = input_ids.masked_fill(mask == 0, padding)
    return logits_of(model(input_ids=input_ids, attention_mask=mask))


def mean_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Each record's mean negative log-likelihood over the positions with a label."""
    num_labelled = (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1)
    return _token_losses(logits, labels).sum(dim=1) / num_labelled


def weighted_token_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Each row's sum of negative log-likelihoods, each times the weight of its label."""
    losses = _token_losses(logits, labels)
    return (losses * weights.to(losses.dtype)).sum(dim=1)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[:2].numel() != labels.numel():
        raise InputError(
            f"the model predicts {logits.shape[1]} tokens for rows of {labels.shape[1]}. Prompt "
            "tuning does so: it puts tokens before every row. Use LoRA or prefix tuning, or "
            f"{PLAIN} with a record_loss that leaves those tokens out."
        )
    losses = F.cross_entropy(
        at_least_float32(logits).flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return losses.view(labels.shape)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returns: a tensor, or a Hugging Face output."""
    return output if isinstance(output, Tensor) else output.logits


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is wider."""
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def coarsest_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The shortest dtype of floats among these: the codes of quantised weights are no floats."""
    floats = (p.dtype for p in parameters if p.is_floating_point())
    return min(floats, key=lambda dtype: dtype.itemsize)


def counted(batches: Iterable[Batch], expected: int) -> Iterator[Batch]:
    """The batches. Raises at the end if their number is not the number of groups drawn."""
    count = 0
    for batch in batches:
        count += 1
        yield batch
    if count != expected:
        raise InputError(
            "the number of batches is not the number of groups drawn: give one batch per group."
        )
