"""LoRA with its update merged into the frozen weight: one product instead of three.

W + s B A is formed once a pass. The adapters' gradients follow from the layer's own input and
output gradient: g_A = (dy s B)^T x and g_B = dy^T (s x A^T). Both are small and are stored for each
user.

In low precision W + s B A is rounded as a whole. The forward pass does not see an update that is
far below W's own rounding until it has grown; the adapters' float32 weights keep it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from userdp.clipping.execute.layer_swap import Tape
from userdp.clipping.gradients.layers import StoredForms, compute_dtype, per_user


class MergedLora(StoredForms):
    """PEFT's `lora.Linear` with one plain adapter on a frozen nn.Linear or Conv1D."""

    @staticmethod
    def describes(module: Any) -> bool:
        """Whether the module is such a layer: no dropout, bias, DoRA or trainable base."""
        adapters = getattr(module, "active_adapters", None)
        if not isinstance(adapters, list) or len(adapters) != 1:
            return False
        base: Any = getattr(module, "base_layer", None)
        name = adapters[0]
        if type(base) not in (nn.Linear, Conv1D) or name not in getattr(module, "lora_A", ()):
            return False
        first, second = module.lora_A[name], module.lora_B[name]
        plain = type(first) is nn.Linear and type(second) is nn.Linear
        dropout = module.lora_dropout[name]
        return (
            plain
            and first.bias is None
            and second.bias is None
            # A may be frozen.
            and second.weight.requires_grad
            and not any(p.requires_grad for p in base.parameters())
            and not (module.merged or module.disable_adapters)
            and not getattr(module, "use_dora", {}).get(name, False)
            and (isinstance(dropout, nn.Identity) or not module.training)
        )

    @staticmethod
    def names(module: Any) -> list[str]:
        """The names of the trained weights of A and B in the module."""
        adapter = module.active_adapters[0]
        trained = {"lora_A": module.lora_A[adapter].weight.requires_grad, "lora_B": True}
        return [f"{part}.{adapter}.weight" for part, is_trained in trained.items() if is_trained]

    @staticmethod
    def forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, except for the rounding of the merged weight."""
        tape: Tape = module.userdp_tape
        adapter = module.active_adapters[0]
        base, scaling = module.base_layer, module.scaling[adapter]
        a, b = module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach()
        dtype, transposed = compute_dtype(x), isinstance(base, Conv1D)
        change = scaling * (b @ a)
        merged = base.weight.detach() + (change.t() if transposed else change)
        probes = [tape.probes.get(f"{part}.{adapter}.weight") for part in ("lora_A", "lora_B")]
        return _Merged.apply(
            x.to(dtype),
            merged.to(dtype),
            None if base.bias is None else base.bias.detach().to(dtype),
            a.to(dtype),
            (scaling * b).to(dtype),
            scaling,
            tape.users,
            transposed,
            *probes,
        )


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        merged: Tensor,
        bias: Tensor | None,
        a: Tensor,
        scaled_b: Tensor,
        scaling: float,
        users: int,
        transposed: bool,
        *probes: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, merged, a, scaled_b)
        ctx.scaling, ctx.users, ctx.transposed = scaling, users, transposed
        ctx.trains_a = probes[0] is not None
        return F.linear(x, merged.t() if transposed else merged, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        x, merged, a, scaled_b = ctx.saved_tensors
        users = ctx.users
        dx = (dy @ (merged.t() if ctx.transposed else merged)) if ctx.needs_input_grad[0] else None
        by_a = None
        if ctx.trains_a:
            by_a = torch.bmm(per_user(dy @ scaled_b, users).mT, per_user(x, users))
        by_b = torch.bmm(per_user(dy, users).mT, per_user(F.linear(x, a) * ctx.scaling, users))
        return dx, None, None, None, None, None, None, None, by_a, by_b
