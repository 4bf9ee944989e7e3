"""What each kind of layer hands out, in the ordinary backward pass, about every user's gradient.

While the fast path runs, a layer with trainable weights computes what it always does, through an
`autograd.Function` whose backward returns extra "gradients" to *probes*: tensors of zeros that take
no memory (stride 0) and no part in the arithmetic. Through them leave the users' gradients, in one
of the `forms`. No hooks, no second pass; it is plain autograd, so it works in
eager mode, under torch.compile and inside a CUDA graph.

A batch is users x rows: dimension 0 of every activation counts rows, those of a user adjacent and
equally many for each user.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from userdp.clipping.forms import Form, Pair, Rows, Stored
from userdp.clipping.pack import power_of_two
from userdp.clipping.products import products_with_squares, users_products
from userdp.losses import wide_dtype

# Sums that a device must have to do at the same time; a width of some hundred numbers each.
_AT_ONCE = 16


@dataclass(eq=False, kw_only=True)
class Tape:
    """What one layer needs while the fast path runs, and where it leaves what it saw.

    `probes` by name; a probe that is absent is not asked for.
    """

    users: int
    rows: int
    probes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    ids: Tensor | None = None
    # Which of the tensors given to a layer without a rule count rows first, where that is known.
    by_row: tuple[bool, ...] | None = None
    # Columns added to a head of unaligned width, for speed; they carry nothing.
    padding: int = 0
    # Where users have unlike many rows: the end of each user's rows. The stored gradients of a
    # product are then the users' own; everything else is handed out for every row (`users` = rows).
    ends: Tensor | None = None


def only(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    """The one tensor that a layer was called with, by place or by name."""
    (tensor,) = (*args, *kwargs.values())
    return tensor


def per_user(tensor: Tensor, users: int) -> Tensor:
    """(rows, ..., features) as (users, tokens, features)."""
    return tensor.reshape(users, -1, tensor.shape[-1])


def summed_tokens(values_ULD: Tensor) -> Tensor:
    """Each user's values added up over its tokens, in float32 at least."""
    users, length, width = values_ULD.shape
    wide = wide_dtype(values_ULD.dtype)
    parts = math.gcd(length, power_of_two(-(-_AT_ONCE // users)))
    if parts > 1:
        return values_ULD.reshape(users, parts, -1, width).sum(2, dtype=wide).sum(1)
    return values_ULD.sum(1, dtype=wide)


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a product of x is computed in: autocast's dtype where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Product(torch.autograd.Function):
    """y = x W^T + b, W transposed in Conv1D."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        users: int,
        transposed: bool,
        stored: Tensor | None,
        squares: Tensor | None,
        inputs: Tensor | None,
        outputs: Tensor | None,
        bias_gradients: Tensor | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *([] if ends is None else [ends]))
        ctx.users, ctx.transposed = users, transposed
        ctx.stored, ctx.squares = stored is not None, squares is not None
        ctx.inputs = inputs is not None
        ctx.outputs, ctx.bias = outputs is not None, bias_gradients is not None
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        x, weight, *ends = ctx.saved_tensors
        dx = (dy @ (weight.t() if ctx.transposed else weight)) if ctx.needs_input_grad[0] else None
        x_ULI, y_ULO = per_user(x, ctx.users), per_user(dy, ctx.users)
        stored, squares, bias = None, None, None
        if ctx.stored:
            x_NI, y_NO = x_ULI.flatten(0, 1), y_ULO.flatten(0, 1)
            first, second = (x_NI, y_NO) if ctx.transposed else (y_NO, x_NI)
            # A layer may be called again, on rows of another length.
            token_ends = ends[0] * x_ULI.shape[1] if ends else None
            users = len(ends[0]) if ends else ctx.users
            if ctx.squares:
                divisor = x_ULI.shape[1]
                stored, squares = products_with_squares(first, second, users, token_ends, divisor)
            else:
                stored = users_products(first, second, users, token_ends)
        if ctx.bias:
            bias = summed_tokens(y_ULO)
        inputs, outputs = x_ULI if ctx.inputs else None, y_ULO if ctx.outputs else None
        return dx, None, None, None, None, stored, squares, inputs, outputs, bias, None


class Product:
    """nn.Linear and Conv1D; LoRA's two thin layers are of this kind."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output."""
        x = only(args, kwargs)
        tape: Tape = module.userdp_tape
        dtype = compute_dtype(x)
        weight = module.weight.detach().to(dtype)
        if tape.padding:
            weight = F.pad(weight, (0, 0, 0, tape.padding))
        bias = None if module.bias is None else module.bias.detach().to(dtype)
        probe = tape.probes.get
        stored, squares = probe("weight"), probe("squares")
        if stored is not None and stored.dtype != dtype:
            # Where autocast is off. The gradients that are handed out are rounded to the probe's
            # dtype, and have another norm.
            squares = None
        return _Product.apply(
            x.to(dtype),
            weight,
            bias,
            tape.users,
            isinstance(module, Conv1D),
            stored,
            squares,
            probe("inputs"),
            probe("outputs"),
            probe("bias"),
            tape.ends,
        )

    @staticmethod
    def forms(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> dict[str, Form]:
        """The weight's and the bias's gradients; `inputs` may have left through another layer."""
        found: dict[str, Form] = {}
        if "weight" in handed:
            found["weight"] = Stored(gradients_U=handed["weight"], squares_PU=handed.get("squares"))
        if "outputs" in handed:
            assert inputs is not None
            found["weight"] = Pair(
                inputs_ULI=inputs,
                output_gradients_ULO=handed["outputs"],
                transposed=isinstance(module, Conv1D),
            )
        if "bias" in handed:
            found["bias"] = Stored(gradients_U=handed["bias"])
        return found


class _Affine(torch.autograd.Function):
    """h * w (+ b), the trainable end of LayerNorm and RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        users: int,
        weight_gradients: Tensor | None,
        bias_gradients: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(h, weight)
        ctx.users = users
        ctx.weight, ctx.bias = weight_gradients is not None, bias_gradients is not None
        return h * weight if bias is None else h * weight + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        h, weight = ctx.saved_tensors
        dh = dy * weight if ctx.needs_input_grad[0] else None
        by_weight, by_bias = None, None
        if ctx.weight:
            by_weight = summed_tokens(per_user(dy * h, ctx.users))
        if ctx.bias:
            by_bias = summed_tokens(per_user(dy, ctx.users))
        return dh, None, None, None, by_weight, by_bias


class StoredForms:
    """Layers whose every probe is a parameter's stored gradient."""

    @staticmethod
    def forms(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> dict[str, Form]:
        """The gradients by parameter name."""
        return {name: Stored(gradients_U=gradients) for name, gradients in handed.items()}


class LayerNorm(StoredForms):
    """nn.LayerNorm over the last dimension."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output."""
        x = only(args, kwargs)
        h = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        return _affine(module, h)


class RmsNorm(StoredForms):
    """w * x / rms(x), the statistics in float32 as Hugging Face models take them."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output."""
        return _affine(module, rms_normalised(module, only(args, kwargs)))

    @staticmethod
    def describes(module: nn.Module) -> bool:
        """Whether the module, by attributes and by trial, is this kind of layer.

        Gemma's, for one, has the same attributes and computes (1 + w) * x / rms(x).
        """
        weight = getattr(module, "weight", None)
        if list(module._parameters) != ["weight"] or not hasattr(module, "variance_epsilon"):
            return False
        assert isinstance(weight, Tensor)
        trial = torch.linspace(-2, 3, 2 * 3 * weight.numel(), device=weight.device)
        x = trial.view(2, 3, -1).to(weight.dtype)
        with torch.no_grad():
            return torch.equal(module(x), weight * rms_normalised(module, x))


def rms_normalised(module: Any, x: Tensor) -> Tensor:
    """x divided by its root mean square."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return (wide * scale).to(x.dtype)


def _affine(module: Any, h: Tensor) -> Tensor:
    tape: Tape = module.userdp_tape
    probe = tape.probes.get
    bias = getattr(module, "bias", None)
    return _Affine.apply(
        h,
        module.weight.detach(),
        None if bias is None else bias.detach(),
        tape.users,
        probe("weight"),
        probe("bias"),
    )


class _Tap(torch.autograd.Function):
    """Identity; what comes back from above leaves through the probe."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class Embedding:
    """nn.Embedding of ids (rows, tokens), or (1, tokens) for positions shared by all rows."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output, repeated for every row."""
        ids = only(args, kwargs)
        tape: Tape = module.userdp_tape
        tape.ids = ids
        probe = tape.probes["weight"]
        return _Tap.apply(F.embedding(ids, module.weight.detach()).expand(probe.shape), probe)

    @staticmethod
    def forms(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> dict[str, Form]:
        """The rows of the weight that the users' tokens touch."""
        tape: Tape = module.userdp_tape
        ids, users = tape.ids, tape.users
        assert ids is not None
        gradients = handed["weight"]
        if len(ids) == 1 and tape.rows > 1:
            # Positions: a user's rows meet in the same rows of the weight.
            gradients = gradients.view(users, tape.rows // users, *gradients.shape[1:]).sum(1)
            ids_UL = ids.expand(users, -1)
        else:
            ids_UL = ids.reshape(users, -1)
        gradients_ULD = gradients.reshape(users, -1, gradients.shape[-1])
        if module.padding_idx is not None:
            # torch gives this row no gradient.
            gradients_ULD = gradients_ULD * (ids_UL != module.padding_idx)[..., None]
        return {"weight": Rows(ids_UL=ids_UL, gradients_ULD=gradients_ULD)}
