"""Per-user gradients of nn.LSTM without unrolling it in Python.

The gates' inputs are one product for all times at once. The recurrence then runs in torch's own
kernel, with the identity as its input weight. So the gradient of that kernel's input is the
gradient at the gates. Every weight's gradient is then a product of it with the inputs or with the
outputs shifted by one time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.clipping.execute.layer_swap import Tape
from userdp.clipping.gradients.layers import StoredForms, per_user
from userdp.errors import PLAIN, InputError
from userdp.losses import wide_dtype


class Lstm(StoredForms):
    """nn.LSTM in one direction, with any number of layers and no dropout between them."""

    @staticmethod
    def describes(module: nn.Module) -> bool:
        """Whether this rule covers the module."""
        return (
            type(module) is nn.LSTM
            and not module.bidirectional
            and module.proj_size == 0
            and module.batch_first
            and (module.dropout == 0 or not module.training)
        )

    @staticmethod
    def forward(module: Any, x: Any, hx: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The outputs, and the last state of every layer (the cell state carries no gradient)."""
        if not isinstance(x, Tensor) or hx is not None:
            raise InputError(
                "the fast path runs an LSTM on padded rows from a zero state: give it a tensor "
                f"alone, or use {PLAIN}."
            )
        tape: Tape = module.userdp_tape
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(module.num_layers):
            names = [
                f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            weights = [getattr(module, name, None) for name in names]
            x, cell = _LstmLayer.apply(
                x,
                *[None if weight is None else weight.detach() for weight in weights],
                tape.users,
                *[tape.probes.get(name) for name in names],
            )
            hidden.append(x[:, -1])
            cells.append(cell)
        return x, (torch.stack(hidden), torch.stack(cells))


def _recurrence(gates: Tensor, weight_hh: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (rows, times, H) and last cell state from the gates' inputs (rows, times, 4H)."""
    rows, _, width = gates.shape
    zeros = gates.new_zeros(1, rows, width // 4)
    identity = torch.eye(width, dtype=gates.dtype, device=gates.device)
    outputs, _, cell = torch._VF.lstm(  # pyright: ignore[reportAttributeAccessIssue]
        gates, (zeros, zeros), [identity, weight_hh], False, 1, 0.0, True, False, True
    )
    return outputs, cell[0]


class _LstmLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None,
        bias_hh: Tensor | None,
        users: int,
        *probes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        gates = F.linear(
            x, weight_ih, None if bias_ih is None or bias_hh is None else bias_ih + bias_hh
        )
        with torch.enable_grad():
            gates = gates.detach().requires_grad_()
            outputs, cell = _recurrence(gates, weight_hh)
        ctx.save_for_backward(x, weight_ih)
        ctx.gates, ctx.outputs, ctx.users = gates, outputs, users
        ctx.asked = [probe is not None for probe in probes]
        cell = cell.detach()
        ctx.mark_non_differentiable(cell)
        return outputs.detach(), cell

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight_ih = ctx.saved_tensors
        (at_gates,) = torch.autograd.grad(ctx.outputs, ctx.gates, gradients[0])
        dx = at_gates @ weight_ih if ctx.needs_input_grad[0] else None
        before = F.pad(ctx.outputs.detach()[:, :-1], (0, 0, 1, 0))
        g_UL4 = per_user(at_gates, ctx.users)
        bias = g_UL4.sum(1, dtype=wide_dtype(g_UL4.dtype))
        found = [
            torch.bmm(g_UL4.mT, per_user(x, ctx.users)),
            torch.bmm(g_UL4.mT, per_user(before, ctx.users)),
            bias,
            bias.clone(),
        ]
        handed = [g if asked else None for g, asked in zip(found, ctx.asked, strict=True)]
        return dx, None, None, None, None, None, *handed
