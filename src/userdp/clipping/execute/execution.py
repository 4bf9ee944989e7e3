"""How a model is run for one batch: its dtype, what is compiled, and what is put aside meanwhile.

Each decoder block is compiled on its own, once for all blocks. The whole pass can then be captured
as a CUDA graph, so that a small model does not wait for the host. Three things would be in the way
and are put aside while the pass runs: the attention mask (right-padded causal models do not need
it, and it is built on the host), a vocabulary of unaligned width (tensor cores want multiples of
64), and the loss's float32 copy of all logits. The model is the same before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from userdp.clipping.execute.checkpoint import checkpointed_blocks
from userdp.clipping.execute.chunked_head import HiddenHead, chunked_mean, chunked_sum
from userdp.clipping.execute.layer_swap import Tape, only, swapped
from userdp.clipping.execute.models import (
    can_skip_mask,
    head_padding,
    output_layer,
    pretrained,
    vocabulary_size,
)
from userdp.clipping.execute.record_attention import RECORD_ATTENTION, attention_named
from userdp.clipping.kernels.running import allow_recompilations, compiled
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

# Hugging Face builds no mask for an attention whose name it does not know: attention is then causal
# and nothing else.
CAUSAL_ATTENTION = "userdp_causal"
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)


# What stands in for a module's call, by the module and by whether it takes any number of rows.
CompiledCalls = dict[tuple[nn.Module, bool], Any]


@contextlib.contextmanager
def compiled_blocks(
    model: nn.Module, *, any_rows: bool, calls: CompiledCalls | None = None
) -> Iterator[None]:
    """The model's decoder blocks, and the layers outside them, compiled inside the `with` block.

    `any_rows` as in `running.compiled`. `calls` keeps what is compiled for the next time.
    """
    calls = {} if calls is None else calls
    allow_recompilations()
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
        key = (module, any_rows)
        if key not in calls:
            calls[key] = compiled(module._call_impl, any_rows=any_rows)
        module._compiled_call_impl = calls[key]
    try:
        with (
            # Probes hang on the layers, and torch would take the sizes of what hangs on a layer for
            # fixed ones.
            torch._dynamo.config.patch(force_nn_module_property_static_shapes=not any_rows),
            # A block is traced once: remembering its operations takes longer than it saves.
            torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
            # Later processes find what was compiled. torch leaves functions of one's own out, as it
            # cannot tell whether they are pure; ours are, and are compared with the plain loop.
            functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True),
        ):
            yield
    finally:
        for module, own in before.items():
            del module.__dict__["_compiled_call_impl"]
            if own is not None:
                module._compiled_call_impl = own


@cache
def token_mean(vocabulary: int, any_rows: bool) -> TokenMean:
    """`mean_token_loss` of the first `vocabulary` columns, compiled: no float32 logits are kept."""

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        return mean_token_loss(logits[..., :vocabulary], labels)

    return compiled(mean, any_rows=any_rows)


@cache
def token_sum(vocabulary: int, any_rows: bool) -> TokenSum:
    """`weighted_token_loss` of the first `vocabulary` columns, compiled."""

    def weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return weighted_token_loss(logits[..., :vocabulary], labels, weights)

    return compiled(weighted, any_rows=any_rows)


class PaddedHead:
    """An output layer without trainable weights, padded to an aligned width."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's output, and further columns that the loss cuts off."""
        x = only(args, kwargs)
        padding = module.userdp_tape.padding
        return F.linear(x, F.pad(module.weight, (0, 0, 0, padding)), module.bias)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model is run for batches of one length.

    `compute_dtype` is autocast's; None leaves the model's own. `record_loss` as in `updates`.
    `any_rows`: what is compiled takes any number of rows. Executions of one model share `calls`.
    """

    record_loss: RecordLoss
    compute_dtype: torch.dtype | None = None
    compile_blocks: bool = False
    any_rows: bool = False
    skip_mask: bool = False
    head_padding: int = 0
    merge_lora: bool = False
    checkpoint_blocks: bool = False
    chunk_logits: bool = False
    calls: CompiledCalls = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def choose(
        model: nn.Module,
        record_loss: RecordLoss,
        *,
        length: int,
        compute_dtype: torch.dtype | None,
        compile_blocks: bool,
        any_rows: bool = False,
        merge_lora: bool = False,
        checkpoint_blocks: bool = False,
        chunk_logits: bool = False,
        calls: CompiledCalls | None = None,
    ) -> Execution:
        """The fastest way to run this model on rows of this length without changing its output."""
        is_causal = record_loss in (causal_lm_loss, joined_lm_loss)
        skip = compile_blocks and is_causal and can_skip_mask(model, length)
        return Execution(
            record_loss=record_loss,
            compute_dtype=compute_dtype,
            compile_blocks=compile_blocks,
            any_rows=any_rows,
            skip_mask=skip,
            head_padding=head_padding(model) if skip and not chunk_logits else 0,
            merge_lora=merge_lora,
            checkpoint_blocks=checkpoint_blocks,
            chunk_logits=chunk_logits,
            calls={} if calls is None else calls,
        )

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """The attention that the rows need, inside the `with` block."""
        if self.record_loss is joined_lm_loss:
            return attention_named(model, RECORD_ATTENTION)
        if self.skip_mask:
            return attention_named(model, CAUSAL_ATTENTION)
        return contextlib.nullcontext()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss a row."""
        record_loss = self._record_loss(model)
        if self.compute_dtype is None:
            return record_loss(model, batch)
        device = next(iter(batch.values())).device.type
        # Autocast's cache would keep a copy of each weight alive through the whole pass.
        with torch.autocast(device, self.compute_dtype, cache_enabled=False):
            return record_loss(model, batch)

    def _record_loss(self, model: nn.Module) -> RecordLoss:
        """The loss, with its tokens' losses computed piece by piece or by compiled code."""
        is_joined = self.record_loss is joined_lm_loss
        if self.chunk_logits:
            head = output_layer(model)
            if is_joined:
                return partial(joined_lm_loss, token_sum=partial(chunked_sum, head))
            return partial(causal_lm_loss, token_mean=partial(chunked_mean, head))
        if self.skip_mask:
            vocabulary = vocabulary_size(model)
            if is_joined:
                return partial(joined_lm_loss, token_sum=token_sum(vocabulary, self.any_rows))
            return partial(causal_lm_loss, token_mean=token_mean(vocabulary, self.any_rows))
        return self.record_loss

    @contextlib.contextmanager
    def prepared(
        self,
        model: nn.Module,
        layers: Sequence[tuple[nn.Module, Any]] = (),
        tapes: Mapping[nn.Module, Tape] | None = None,
    ) -> Iterator[None]:
        """The model ready to run, with these layers swapped, inside the `with` block."""
        swaps, carried = list(layers), dict(tapes or {})
        head = output_layer(model)
        if self.chunk_logits:
            swaps = [(module, rule) for module, rule in swaps if module is not head]
            swaps.append((head, HiddenHead))
            carried.setdefault(head, Tape(users=1, rows=1))
        elif self.head_padding and head is not None and head not in carried:
            swaps.append((head, PaddedHead))
            carried[head] = Tape(users=1, rows=1, padding=self.head_padding)
        with contextlib.ExitStack() as stack:
            # A caller's autocast would change the backward pass too: only `compute_dtype` counts.
            device = next(model.parameters()).device.type
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(swapped(swaps, carried))
            if self.checkpoint_blocks:
                swapped_layers = [module for module, _ in swaps]
                stack.enter_context(checkpointed_blocks(model, swapped_layers))
            stack.enter_context(self.attention(model))
            if self.compile_blocks:
                stack.enter_context(
                    compiled_blocks(model, any_rows=self.any_rows, calls=self.calls)
                )
            yield
