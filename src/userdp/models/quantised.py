"""Frozen base models in 4 or 8 bits, with adapters trained on top.

The library bitsandbytes stores the weights of linear layers in few bits; they never change. 4 bits:
NF4 with quantised constants (Dettmers et al. 2023, QLoRA, Sec. 3). 8 bits: one scale for each
output (Dettmers et al. 2022, Sec. 2.1). Adapters are ordinary weights, so clipping and noise are
what they were.

Products are computed with the weights turned back into floats, and not by the library. Its products
in 8 bits round the inputs as well, and look for outliers in the whole *batch* (ibid., Sec. 3): one
user's text would decide how other users are rounded.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from userdp.errors import InputError, MixedExamplesError
from userdp.names.quantisation import Quantisation

# The classes of bitsandbytes, by name: it need not be installed.
_BY_LAYER: dict[str, Quantisation] = {"Linear4bit": "4bit", "Linear8bitLt": "8bit"}


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """In how many bits the model's linear layers are stored; None if as ordinary floats."""
    kinds = {_BY_LAYER.get(type(module).__name__) for module in model.modules()}
    return next((bits for bits in _BY_LAYER.values() if bits in kinds), None)


def loading_options(quantize: Quantisation, device: str) -> dict[str, Any]:
    """What transformers needs to be told to load a model in few bits."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f'quantize = "{quantize}" needs the library bitsandbytes, which is not installed: '
            "pip install 'userdp[quantized]'."
        )
    if quantize == "4bit":
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    else:
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    # Weights are quantised where they will be used: devices round differently.
    return {"quantization_config": settings, "device_map": {"": device}}


def freeze(model: nn.Module) -> None:
    """Freeze a freshly loaded quantised model, and let its layers compute with floats."""
    model.requires_grad_(False)
    for module in model.modules():
        if type(module).__name__ in _BY_LAYER:
            module.__class__ = _with_floats(type(module))


@cache
def _with_floats(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a layer of bitsandbytes that multiplies by floats."""
    return type(kind.__name__, (kind,), {"forward": _forward, "__module__": __name__})


def _forward(module: Any, x: Tensor) -> Tensor:
    product = _FrozenProduct.apply(x, module)
    # The bias is an ordinary weight, and adapters may train it.
    return product if module.bias is None else product + module.bias.to(product.dtype)


class _FrozenProduct(torch.autograd.Function):
    """A linear layer that turns its weight into floats when it needs it, and keeps none of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return F.linear(x, _floats(layer, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        return dy @ _floats(ctx.layer, dy.dtype), None


def _floats(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight of a quantised layer, as floats."""
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    weight = layer.weight
    if _BY_LAYER[type(layer).__name__] == "4bit":
        return functional.dequantize_4bit(weight.data, weight.quant_state).to(dtype)
    return functional.int8_vectorwise_dequant(weight.data, weight.SCB).to(dtype)


def refuse_shared_outliers(name: str, module: Any) -> None:
    """Raise if an 8-bit layer decides by the whole batch how each row is rounded."""
    # peft's adapter on such a layer has the same name, and no state.
    state: Any = getattr(module, "state", None)
    if type(module).__name__ == "Linear8bitLt" and getattr(state, "threshold", 0) > 0:
        raise MixedExamplesError(
            f"Linear8bitLt at {name!r} looks for outliers in the whole batch, so users change each "
            'other\'s gradients. Load the model with userdp.load_model(..., quantize="8bit").'
        )
