"""Per-user gradients of the word LSTM, whose table of words is read twice and brought to length 1.

The table W has rows of any length, and the model computes with n_v = W_v / |W_v|: as the input of a
word, and as the weight of the head. Let G be the gradient of one user at the rows n, from both uses
together. Then the gradient at W_v is (G_v - <G_v, n_v> n_v) / |W_v|. The head reaches every row, so
G is stored for each user. The four gates have a weight each, on the word and the state before it.
Their gradients are products of those with the gradients at the gates, as in `lstm`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from userdp.clipping.execute.layer_swap import Tape
from userdp.clipping.gradients.layers import StoredForms, per_user
from userdp.clipping.kernels.onednn import product

GATES = ("input_gate", "forget_gate", "cell_gate", "output_gate")
NAMES = (
    "embedding.weight",
    *(f"{gate}.{kind}" for kind in ("weight", "bias") for gate in GATES),
    "output_embedding.weight",
    "output_embedding.bias",
)
# As in the model: rows of a smaller length are divided by this instead.
_SMALLEST_LENGTH = 1e-12


class WordLstm(StoredForms):
    """`userdp.models.word_lstm.WordLSTM`, the whole model as one layer."""

    @staticmethod
    def describes(module: nn.Module) -> bool:
        """Whether the module is exactly this model, and not one that was derived from it."""
        # By name: clipping does not import models. Batches of every new shape are compared with the
        # plain loop in any case.
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" != "userdp.models.word_lstm.WordLSTM":
            return False
        return {name for name, _ in module.named_parameters()} == set(NAMES)

    @staticmethod
    def forward(module: Any, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """The model's own output."""
        tape: Tape = module.userdp_tape
        weights = dict(module.named_parameters())
        # In the weights' own dtype, whatever is computed around it.
        with torch.autocast(input_ids.device.type, enabled=False):
            logits = _WordLstm.apply(
                input_ids,
                *[weights[name].detach() for name in NAMES],
                tape.users,
                *[tape.probes.get(name) for name in NAMES],
            )
        return CausalLMOutput(logits=logits)


def dictionary_size(model: nn.Module) -> int:
    """How many words the word LSTM knows; 0 for other models."""
    return len(model.get_parameter(NAMES[0])) if WordLstm.describes(model) else 0


def _states(gates: Tensor, of_state: Tensor) -> Tensor:
    """The states (rows, times, H) from the gates' inputs of the words (rows, times, 4H)."""
    rows, times, width = gates.shape
    state = cell = gates.new_zeros(rows, width // 4)
    states: list[Tensor] = []
    for time in range(times):
        enter, keep, new, leave = torch.addmm(gates[:, time], state, of_state).chunk(4, dim=1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        state = torch.sigmoid(leave) * torch.tanh(cell)
        states.append(state)
    return torch.stack(states, dim=1)


def _user_by_user(left_ULV: Tensor, right_ULD: Tensor) -> Tensor:
    """left^T right of every user, (U, V, D)."""
    if left_ULV.device.type != "cpu":
        return torch.bmm(left_ULV.mT, right_ULD)
    found = right_ULD.new_empty((len(left_ULV), left_ULV.shape[2], right_ULD.shape[2]))
    for own, left_LV, right_LD in zip(found, left_ULV, right_ULD, strict=True):
        own.copy_(product(left_LV.mT, right_LD.mT))
    return found


class _WordLstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, *given: Any) -> Tensor:
        table, *weights = given[: len(NAMES)]
        users, *probes = given[len(NAMES) :]
        weight, bias = torch.cat(weights[:4]), torch.cat(weights[4:8])
        out_weight, out_bias = weights[8:]
        lengths = table.norm(dim=1, keepdim=True)
        words = table / lengths.clamp(min=_SMALLEST_LENGTH)
        embedded = F.embedding(input_ids, words)
        width = table.shape[1]
        gates = F.linear(embedded, weight[:, :width], bias)
        with torch.enable_grad():
            gates = gates.detach().requires_grad_()
            states = _states(gates, weight[:, width:].T)
        out = F.linear(states.detach(), out_weight, out_bias)
        ctx.save_for_backward(input_ids, lengths, words, embedded, weight, out_weight, out)
        ctx.gates, ctx.states, ctx.users = gates, states, users
        ctx.asked = [probe is not None for probe in probes]
        return product(out.flatten(0, 1), words).unflatten(0, out.shape[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        input_ids, lengths, words, embedded, weight, out_weight, out = ctx.saved_tensors
        users, width = ctx.users, words.shape[1]
        states = ctx.states.detach()
        at_out = product(dy.flatten(0, 1), words.T).view_as(out)
        (at_gates,) = torch.autograd.grad(ctx.states, ctx.gates, at_out @ out_weight)
        before = F.pad(states[:, :-1], (0, 0, 1, 0))
        inputs_ULI = per_user(torch.cat([embedded, before], -1), users)
        gates_UL4 = per_user(at_gates, users)
        out_ULD = per_user(at_out, users)

        def table() -> Tensor:
            at_words = _user_by_user(per_user(dy, users), per_user(out, users))
            at_embedded = per_user(at_gates @ weight[:, :width], users)
            # Words of the input add to the same rows.
            own = torch.arange(users, device=dy.device)[:, None] * len(words)
            places = own + input_ids.reshape(users, -1)
            at_words.view(-1, width).index_add_(0, places.flatten(), at_embedded.flatten(0, 1))
            along = (at_words * words).sum(-1, keepdim=True)
            # A row at the smallest length is only divided by it.
            along = torch.where(lengths >= _SMALLEST_LENGTH, along, 0.0)
            at_words.addcmul_(along, words, value=-1)
            return at_words.div_(lengths.clamp(min=_SMALLEST_LENGTH))

        found = [
            table() if ctx.asked[0] else None,
            *torch.bmm(gates_UL4.mT, inputs_ULI).chunk(4, dim=1),
            *gates_UL4.sum(1).chunk(4, dim=1),
            torch.bmm(out_ULD.mT, per_user(states, users)),
            out_ULD.sum(1),
        ]
        handed = [
            None if not asked or gradient is None else gradient.contiguous()
            for gradient, asked in zip(found, ctx.asked, strict=True)
        ]
        return None, *[None] * len(NAMES), None, *handed
