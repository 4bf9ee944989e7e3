"""What each kind of layer hands out about every user's gradient, in the ordinary backward pass.

While the fast path runs, a layer with trainable weights computes what it always computes, but
through an `autograd.Function`. Its backward pass also returns the users' gradients, in one of the
`forms`, as the "gradients" of *probes*: tensors of zeros that take no part in the arithmetic
(`probes`). There are no hooks and no second pass. It is plain autograd, so it works in eager mode,
under torch.compile and inside a CUDA graph.

Dimension 0 of every activation counts rows, and the rows of a user are adjacent. In an equal batch
a layer hands out one gradient for each user, in a ragged one for each row (`Tape.users` says for
how many), unless it is told where users' rows end (`Tape.ends`) and to hand them out by user.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from userdp.clipping.batches.users import power_of_two
from userdp.clipping.execute.layer_swap import Tape, compute_dtype, only, per_user, units_of
from userdp.clipping.gradients.forms import EmbeddingRows, Form, Pair, Stored
from userdp.clipping.kernels.products import products_with_squares, users_products
from userdp.clipping.kernels.user_sums import user_sums
from userdp.losses import wide_dtype
from userdp.sharded_tensors import is_shard

# A device is busy with this many sums at a time, each a few hundred numbers wide.
_AT_ONCE = 16


def summed_tokens(values_ULD: Tensor, users: int | None, ends: Tensor | None = None) -> Tensor:
    """Each user's values added up over its tokens, in float32 at least.

    Where `ends` says at which token each user ends, U counts rows.
    """
    if ends is not None:
        sums, _ = user_sums(values_ULD.flatten(0, 1), None, ends)
        return sums
    wide = wide_dtype(values_ULD.dtype)
    if users is None:
        return values_ULD.sum(1, dtype=wide)
    _, length, width = values_ULD.shape
    # For few users the tokens are summed in several parts, which keeps the device busy.
    parts = math.gcd(length, power_of_two(-(-_AT_ONCE // users)))
    if parts > 1:
        return values_ULD.reshape(users, parts, -1, width).sum(2, dtype=wide).sum(1)
    return values_ULD.sum(1, dtype=wide)


class _Product(torch.autograd.Function):
    """y = x W^T + b; Conv1D holds W transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        users: int | None,
        transposed: bool,
        stored: Tensor | None,
        squares: Tensor | None,
        inputs: Tensor | None,
        outputs: Tensor | None,
        bias_gradients: Tensor | None,
        ends: Tensor | None,
        weight_by_user: bool,
        bias_by_user: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *([] if ends is None else [ends]))
        ctx.weight_by_user, ctx.bias_by_user = weight_by_user, bias_by_user
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
        # The row length is read here: a layer may be called twice, on rows of different length.
        token_ends = ends[0] * x_ULI.shape[1] if ends else None
        if ctx.stored:
            x_NI, y_NO = x_ULI.flatten(0, 1), y_ULO.flatten(0, 1)
            first, second = (x_NI, y_NO) if ctx.transposed else (y_NO, x_NI)
            own_ends = token_ends if ctx.weight_by_user else None
            users = len(x_ULI) if own_ends is None else len(own_ends)
            if ctx.squares:
                divisor = x_ULI.shape[1]
                stored, squares = products_with_squares(first, second, users, own_ends, divisor)
            else:
                stored = users_products(first, second, users, own_ends)
        if ctx.bias:
            bias = summed_tokens(y_ULO, ctx.users, token_ends if ctx.bias_by_user else None)
        inputs, outputs = x_ULI if ctx.inputs else None, y_ULO if ctx.outputs else None
        handed = (stored, squares, inputs, outputs, bias)
        return dx, None, None, None, None, *handed, None, None, None


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
            # Where the model turns autocast off, gradients are rounded to the probe's dtype when
            # they are handed out. Squares taken earlier would belong to other values.
            squares = None
        return _Product.apply(
            x.to(dtype),
            weight,
            bias,
            units_of(tape, x),
            isinstance(module, Conv1D),
            stored,
            squares,
            probe("inputs"),
            probe("outputs"),
            probe("bias"),
            tape.ends,
            tape.weight_by_user,
            tape.adds_by_user,
        )

    @staticmethod
    def forms(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> dict[str, Form]:
        """The weight's and the bias's gradients; another layer may have handed out `inputs`."""
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
        users: int | None,
        weight_gradients: Tensor | None,
        bias_gradients: Tensor | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(h, weight, *([] if ends is None else [ends]))
        ctx.users = users
        ctx.weight, ctx.bias = weight_gradients is not None, bias_gradients is not None
        ctx.product_dtype = compute_dtype(h)
        return h * weight if bias is None else h * weight + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        h, weight, *ends = ctx.saved_tensors
        dh = dy * weight if ctx.needs_input_grad[0] else None
        y_ULD = per_user(dy, ctx.users)
        by_weight, by_bias = None, None
        if ends:
            token_ends = ends[0] * y_ULD.shape[1]
            # One kernel reads the output gradients once for both sums. Both factors are written for
            # it, so they have the dtype of products. float16 would lose large numbers.
            narrow = ctx.product_dtype if ctx.product_dtype == torch.bfloat16 else y_ULD.dtype
            others = per_user(h, ctx.users).flatten(0, 1).to(narrow) if ctx.weight else None
            sums, products = user_sums(y_ULD.flatten(0, 1).to(narrow), others, token_ends)
            by_weight, by_bias = products if ctx.weight else None, sums if ctx.bias else None
        else:
            if ctx.weight:
                by_weight = summed_tokens(per_user(dy * h, ctx.users), ctx.users)
            if ctx.bias:
                by_bias = summed_tokens(y_ULD, ctx.users)
        return dh, None, None, None, by_weight, by_bias, None


class StoredForms:
    """Layers that hand out stored gradients only, one probe for each parameter."""

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
    """w * x / rms(x), with the statistics in float32, as Hugging Face models have it."""

    @staticmethod
    def forward(module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The layer's own output."""
        return _affine(module, rms_normalised(module, only(args, kwargs)))

    @staticmethod
    def describes(module: nn.Module) -> bool:
        """Whether the module is this kind of layer, by its attributes and by trial.

        Attributes are not enough: Gemma's has the same ones and computes (1 + w) * x / rms(x).
        """
        weight = getattr(module, "weight", None)
        if list(module._parameters) != ["weight"] or not hasattr(module, "variance_epsilon"):
            return False
        assert isinstance(weight, Tensor)
        trial = torch.linspace(-2, 3, 2 * 3 * weight.numel(), device=weight.device)
        x = trial.view(2, 3, -1).to(weight.dtype)
        with torch.no_grad():
            if not is_shard(weight):
                return torch.equal(module(x), weight * rms_normalised(module, x))
            # This rank holds a part of the weight, so any other weight is tried.
            other = trial[: weight.numel()].to(weight.dtype)
            output = torch.func.functional_call(module, {"weight": other}, (x,))
            return torch.equal(output, other * rms_normalised(module, x))


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
        units_of(tape, h),
        probe("weight"),
        probe("bias"),
        tape.ends,
    )


class _Tap(torch.autograd.Function):
    """The identity; the backward pass returns the output's gradient to the probe."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:
        # No view: torch forbids to change a view that a function returns in place, as CTRL does.
        return value.detach()

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
            # Positions: all rows of a user touch the same rows of the weight.
            gradients = gradients.view(users, tape.rows // users, *gradients.shape[1:]).sum(1)
            ids_UL = ids.expand(users, -1)
        else:
            ids_UL = ids.reshape(users, -1)
        gradients_ULD = gradients.reshape(users, -1, gradients.shape[-1])
        if module.padding_idx is not None:
            # torch gives this row no gradient.
            gradients_ULD = gradients_ULD * (ids_UL != module.padding_idx)[..., None]
        return {"weight": EmbeddingRows(ids_UL=ids_UL, gradients_ULD=gradients_ULD)}
