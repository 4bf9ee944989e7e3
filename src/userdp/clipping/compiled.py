"""Running Hugging Face models compiled and captured, without changing them.

Each decoder block is compiled on its own, once for all blocks; the whole pass is then captured as a
CUDA graph, so that a small model is not held up by the host. Three things stand in the way and are
put aside while the pass runs: the attention mask (not needed by right-padded causal models, and
built on the host), a vocabulary of unaligned width (tensor cores want multiples of 64), and the
full-size float32 logits of the loss.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from userdp.clipping import kernels
from userdp.clipping.checkpointed import checkpointed_blocks
from userdp.clipping.layers import Tape, only
from userdp.clipping.swap import swapped
from userdp.losses import (
    Batch,
    RecordLoss,
    TokenMean,
    TokenSum,
    causal_lm_loss,
    joined_lm_loss,
    mean_token_loss,
    weighted_token_loss,
)

# The mask registry does not know this name, so no mask is built and attention is plainly causal.
CAUSAL_ATTENTION = "userdp_causal"
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)

ALIGNMENT = 64


def pretrained(model: nn.Module) -> PreTrainedModel | None:
    """The Hugging Face model itself, or the one inside a PEFT model."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def can_skip_mask(model: nn.Module, length: int) -> bool:
    """Whether causal attention without a mask is what the model computes on such rows.

    False for encoders, and for windows or chunks of attention shorter than a row.
    """
    inner = pretrained(model)
    if inner is None or not inner._supports_sdpa or not inner.can_generate():
        return False
    config: Any = inner.config
    if getattr(config, "is_encoder_decoder", False):
        return False
    # A model of text and images has the text's settings one level down.
    windows = [
        getattr(settings, key, None)
        for settings in (config, config.get_text_config())
        for key in ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
    ]
    return all(window is None or window >= length for window in windows)


@contextlib.contextmanager
def without_mask(model: nn.Module) -> Iterator[None]:
    """Causal attention without a mask, for the length of the block."""
    inner = pretrained(model)
    assert inner is not None
    before: Any = inner.config._attn_implementation
    inner.set_attn_implementation(CAUSAL_ATTENTION)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


@contextlib.contextmanager
def compiled_blocks(model: nn.Module) -> Iterator[None]:
    """The model's repeated blocks, and the layers outside them, compiled while the block runs."""
    kernels.allow_recompilations()
    inner = pretrained(model)
    names: set[str] = set(inner._no_split_modules or ()) if inner is not None else set()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    inside = {id(module) for block in blocks for module in block.modules()}
    alone = [
        module
        for module in model.modules()
        if module._parameters
        and id(module) not in inside
        and not any(module.children())
        and not isinstance(module, nn.Embedding | nn.LSTM)
    ]
    todo = blocks + alone
    before = {module: module.__dict__.get("_compiled_call_impl") for module in todo}
    for module in todo:
        module.compile(dynamic=False)
    try:
        yield
    finally:
        for module, own in before.items():
            del module.__dict__["_compiled_call_impl"]
            if own is not None:
                module._compiled_call_impl = own


@cache
def token_mean(vocabulary: int) -> TokenMean:
    """`mean_token_loss` of the first `vocabulary` columns, compiled: no float32 logits are kept."""

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        return mean_token_loss(logits[..., :vocabulary], labels)

    return torch.compile(mean, dynamic=False)


@cache
def token_sum(vocabulary: int) -> TokenSum:
    """`weighted_token_loss` of the first `vocabulary` columns, compiled."""

    def weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return weighted_token_loss(logits[..., :vocabulary], labels, weights)

    return torch.compile(weighted, dynamic=False)


def head_padding(model: nn.Module) -> int:
    """Rows to add to the output layer to align it; 0 where it has a bias or another form."""
    inner = pretrained(model)
    head = inner.get_output_embeddings() if inner is not None else None
    if type(head) is not nn.Linear or head.bias is not None:
        return 0
    return -head.out_features % ALIGNMENT


def padded_rows(model: nn.Module) -> dict[Tensor, int]:
    """How many rows the gradient of the output layer may have more than its weight."""
    inner = pretrained(model)
    head: Any = inner.get_output_embeddings() if inner is not None else None
    return {head.weight: head_padding(model)} if head is not None else {}


def has_aligned_head(model: nn.Module, record_loss: RecordLoss) -> bool:
    """Whether grouped products form the gradients of heads tied to an embedding without a copy.

    For rows of any length, whatever `Execution.choose` says of them.
    """
    inner = pretrained(model)
    head = inner.get_output_embeddings() if inner is not None else None
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


# What configurations call the longest row they have positions for.
_POSITIONS = "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx".split()


def most_positions(model: nn.Module) -> int | None:
    """The longest row that a Hugging Face model has positions for; None if it does not say."""
    inner = pretrained(model)
    if inner is None:
        return None
    # A model of text and images has the text's settings one level down.
    settings = (inner.config, inner.config.get_text_config())
    said = [getattr(one, name, None) for one in settings for name in _POSITIONS]
    return next((value for value in said if isinstance(value, int) and value > 0), None)


def vocabulary_size(model: nn.Module) -> int:
    """Columns of the model's logits."""
    inner = pretrained(model)
    assert inner is not None
    head: Any = inner.get_output_embeddings()
    return len(head.weight)


class PaddedHead:
    """An output layer that hands nothing out, padded to an aligned width."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's output and columns that the loss cuts off."""
        x = only(args, kwargs)
        padding = module.userdp_tape.padding
        return F.linear(x, F.pad(module.weight, (0, 0, 0, padding)), module.bias)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model is run for batches of one length: in which dtype, compiled or not.

    `compute_dtype` is autocast's; None leaves the model's own. `record_loss` as in `updates`.
    `checkpoint_blocks` runs blocks a second time instead of keeping what they computed.
    """

    record_loss: RecordLoss
    compute_dtype: torch.dtype | None = None
    compile_blocks: bool = False
    skip_mask: bool = False
    head_padding: int = 0
    merge_lora: bool = False
    checkpoint_blocks: bool = False

    @staticmethod
    def choose(
        model: nn.Module,
        record_loss: RecordLoss,
        *,
        length: int,
        compute_dtype: torch.dtype | None,
        compile_blocks: bool,
        merge_lora: bool = False,
        checkpoint_blocks: bool = False,
    ) -> Execution:
        """The fastest way to run this model on such rows that gives what it always gives."""
        is_causal = record_loss in (causal_lm_loss, joined_lm_loss)
        skip = compile_blocks and is_causal and can_skip_mask(model, length)
        return Execution(
            record_loss=record_loss,
            compute_dtype=compute_dtype,
            compile_blocks=compile_blocks,
            skip_mask=skip,
            head_padding=head_padding(model) if skip else 0,
            merge_lora=merge_lora,
            checkpoint_blocks=checkpoint_blocks,
        )

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss a row."""
        record_loss = self.record_loss
        if self.skip_mask:
            vocabulary = vocabulary_size(model)
            if record_loss is joined_lm_loss:
                record_loss = partial(joined_lm_loss, token_sum=token_sum(vocabulary))
            else:
                record_loss = partial(causal_lm_loss, token_mean=token_mean(vocabulary))
        if self.compute_dtype is None:
            return record_loss(model, batch)
        device = next(iter(batch.values())).device.type
        # The cache would keep one cast of each weight alive through the whole pass.
        with torch.autocast(device, self.compute_dtype, cache_enabled=False):
            return record_loss(model, batch)

    @contextlib.contextmanager
    def prepared(
        self,
        model: nn.Module,
        layers: Sequence[tuple[nn.Module, Any]] = (),
        tapes: Mapping[nn.Module, Tape] | None = None,
    ) -> Iterator[None]:
        """The model ready to run so, with these layers swapped, for the length of the block."""
        swaps, carried = list(layers), dict(tapes or {})
        inner = pretrained(model)
        head = inner.get_output_embeddings() if inner is not None else None
        if self.head_padding and head is not None and head not in carried:
            swaps.append((head, PaddedHead))
            carried[head] = Tape(users=1, rows=1, padding=self.head_padding)
        with contextlib.ExitStack() as stack:
            # The settings alone choose a dtype: backward passes, too, follow a caller's autocast.
            device = next(model.parameters()).device.type
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(swapped(swaps, carried))
            if self.checkpoint_blocks:
                swapped_layers = [module for module, _ in swaps]
                stack.enter_context(checkpointed_blocks(model, swapped_layers))
            if self.skip_mask:
                stack.enter_context(without_mask(model))
            if self.compile_blocks:
                stack.enter_context(compiled_blocks(model))
            yield


class Graph:
    """A function of fixed-shape CUDA tensors, captured once and replayed."""

    def __init__(
        self, function: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], *, pool: Any
    ) -> None:
        # Kept: replays read what the function allocated, such as tables of addresses.
        self._function = function
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="relaxed"):
            self._output = function(self._inputs)

    def __call__(self, inputs: list[Tensor]) -> Tensor:
        """The function's value for other inputs of these shapes; overwritten by the next call."""
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output
