"""How a model runs while it is measured: nothing is left behind, and a GPU is filled.

Nothing is compiled: that would take longer than a few measurements of some thousand records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from userdp.sharded_tensors import is_shard

# Tokens in a batch on the CPU, where larger batches are no faster.
_CPU_TOKENS = 8192
# On a GPU, which a small batch does not fill: at most this many, whose logits take at most a tenth
# of its memory. A logit is held once in the dtype of products, and twice in float32.
_CUDA_TOKENS = 32_768
_BYTES_OF_LOGIT = 10
# Tensor cores want widths that are multiples of this.
_ALIGNMENT = 64


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Forward passes inside leave nothing behind: no gradient, no other mode, no random number.

    The mode of every module is put back by itself, because parts of a model may differ in it.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def on_gpu(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block two kinds of layers run in fewer or better kernels.

    A product with 50,257 columns takes several times as long as one with 50,304: columns are added
    to the output layer, and cut off again. GELU by its tanh formula is written as eight operations
    in `transformers`, half of the time of measuring GPT-2.
    """
    gelu: Any = partial(F.gelu, approximate="tanh")
    others: dict[nn.Module, Any] = {
        module: gelu for module in model.modules() if type(module) is NewGELUActivation
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is nn.Linear and head.bias is None and not is_shard(head.weight):
        # Where memory does not suffice, the head stays as it is.
        with suppress(torch.OutOfMemoryError):
            others[head] = partial(_aligned, _with_aligned_rows(head.weight), head.out_features)
    # A layer whose forward was replaced by somebody is left as it is.
    others = {module: own for module, own in others.items() if "forward" not in vars(module)}
    try:
        for module, forward in others.items():
            module.forward = forward
        yield
    finally:
        for module in others:
            vars(module).pop("forward", None)


def _with_aligned_rows(weight: Tensor) -> Tensor:
    return F.pad(weight.detach(), (0, 0, 0, -len(weight) % _ALIGNMENT))


def _aligned(weight: Tensor, words: int, input: Tensor) -> Tensor:
    return F.linear(input, weight)[..., :words]


def usual_tokens(model: nn.Module, device: torch.device) -> int:
    """The tokens of a batch: the same whenever a model is measured on a machine."""
    if device.type != "cuda":
        return _CPU_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    head = getattr(model, "get_output_embeddings", lambda: None)()
    words = getattr(head, "out_features", 1)
    return _power_of_two_within(memory // (10 * _BYTES_OF_LOGIT * words), most=_CUDA_TOKENS)


def _power_of_two_within(number: int, *, most: int) -> int:
    """The largest power of two up to the number and up to `most`; 1 if there is none.

    >>> _power_of_two_within(37_000, most=32_768), _power_of_two_within(5_100, most=32_768)
    (32768, 4096)
    """
    return 1 << (max(1, min(number, most)).bit_length() - 1)
