"""What the fast path needs to know of a Hugging Face model: its mask, its head, its positions."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from userdp.losses import RecordLoss, causal_lm_loss

# Tensor cores want the width of the output layer to be a multiple of this.
ALIGNMENT = 64
# The names under which configurations give the longest row that they have positions for.
_POSITIONS = "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx".split()


def pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The Hugging Face model itself, or the one inside a PEFT model."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def can_skip_mask(model: nn.Module, length: int) -> bool:
    """Whether the model's attention on rows of this length is causal and nothing else.

    That is false for encoders, and for attention windows or chunks shorter than a row.
    """
    inner = pretrained(model)
    if inner is None or not inner._supports_sdpa or not inner.can_generate():
        return False
    if getattr(inner.config, "is_encoder_decoder", False):
        return False
    windows = [
        getattr(settings, key, None)
        for settings in _settings(inner)
        for key in ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
    ]
    return all(window is None or window >= length for window in windows)


def output_layer(model: nn.Module) -> Any:
    """The layer that gives a Hugging Face model's logits; None for other models."""
    inner = pretrained(model)
    return inner.get_output_embeddings() if inner is not None else None


def _settings(inner: PreTrainedModel) -> tuple[Any, Any]:
    """The configurations of the model and of its text part, which may be one level down."""
    return inner.config, inner.config.get_text_config()


def head_padding(model: nn.Module) -> int:
    """How many rows to add to the output layer to align it; 0 unless it is a plain product."""
    head = output_layer(model)
    if type(head) is not nn.Linear or head.bias is not None:
        return 0
    return -head.out_features % ALIGNMENT


def padded_rows(model: nn.Module) -> dict[Tensor, int]:
    """How many rows a weight's gradient may have beyond its own: those of the head's padding."""
    head = output_layer(model)
    return {head.weight: head_padding(model)} if head is not None else {}


def has_aligned_head(model: nn.Module, record_loss: RecordLoss) -> bool:
    """Whether CUDA's grouped products can read every head that is tied to an embedding uncopied.

    The answer holds for rows of any length, whatever `Execution.choose` decides for them.
    """
    head = output_layer(model)
    is_padded = record_loss is causal_lm_loss and can_skip_mask(model, sys.maxsize)
    padding = head_padding(model) if is_padded else 0
    modules = list(model.modules())
    embeddings = {id(module.weight) for module in modules if type(module) is nn.Embedding}
    tied = [m for m in modules if type(m) is nn.Linear and id(m.weight) in embeddings]
    return all(
        module.in_features % 8 == 0
        and (module.out_features + (padding if module is head else 0)) % 8 == 0
        for module in tied
        if module.weight.requires_grad
    )


def most_positions(model: nn.Module) -> int | None:
    """The longest row that a Hugging Face model has positions for; None if it does not say."""
    inner = pretrained(model)
    if inner is None:
        return None
    said = [getattr(one, name, None) for one in _settings(inner) for name in _POSITIONS]
    most = next((value for value in said if isinstance(value, int) and value > 0), None)
    return None if most is None else most - _places_of_padding(inner)


def _places_of_padding(inner: PreTrainedModel) -> int:
    """How many positions no token has: all up to the position of padding, as in RoBERTa."""
    found = (
        module.padding_idx + 1
        for name, module in inner.named_modules()
        if name.endswith("position_embeddings")
        and isinstance(module, nn.Embedding)
        and module.padding_idx is not None
    )
    return next(found, 0)


def num_classes_of(model: nn.Module) -> int | None:
    """How many classes a Hugging Face model knows; None if it does not classify texts."""
    inner = pretrained(model)
    if inner is None or not type(inner).__name__.endswith("ForSequenceClassification"):
        return None
    return inner.config.num_labels


def vocabulary_size(model: nn.Module) -> int:
    """Columns of the model's logits."""
    return len(output_layer(model).weight)
