"""One local step of stacked word LSTMs: forward and backward written out, updates in place.

The users' copies stand side by side, and every product is one batched product over them. Compared
with autograd, the words' part of the gates is one product for all positions, the gradient of each
weight is one product over all positions, a weight moves by the product itself, and clipping costs
no pass of its own: a copy is kept as it was before clipping, together with its factor, and the next
step reads it as theta^0 + factor (theta - theta^0).

`models.word_lstm` says what the model computes; with autograd it is the oracle of this file.

Shapes: U users, B records, T positions that predict, N = T B, time first; D width of the words,
H of the state. Gates lie in the order enter, keep, new, leave. All is secret until noise is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from userdp.clipping.stacked.cells import TorchCells, TritonCells
from userdp.clipping.stacked.room import Factors, Room, settle_, squared_norms
from userdp.clipping.stacked.words import TorchWords
from userdp.losses import IGNORED_LABEL, RecordLoss, causal_lm_loss
from userdp.updates.contract import Descent

# At most this many numbers stand side by side in the copies of a microbatch. On a processor more
# would gain nothing: the largest products are taken user by user.
_MOST_STACKED = {"cpu": 6 * 2**20, "cuda": 2**31}
# At most this many numbers belong to the positions of a local batch, over all users.
_MOST_WORKED = {"cpu": 2**26, "cuda": 2**31}
# On a processor every worker should have users, also in a small cohort.
_MOST_USERS = {"cpu": 16, "cuda": 1024}

# This file knows the model by its name: the models are built on top of clipping.
_MODEL = "userdp.models.word_lstm.WordLSTM"
_NAMES = (
    "embedding.weight",
    *(f"{gate}_gate.weight" for gate in ("input", "forget", "cell", "output")),
    *(f"{gate}_gate.bias" for gate in ("input", "forget", "cell", "output")),
    "output_embedding.weight",
    "output_embedding.bias",
)
# Which of them lie in one tensor of this file.
_PIECES = {
    "table": slice(0, 1),
    "weight": slice(1, 5),
    "bias": slice(5, 9),
    "out_weight": slice(9, 10),
    "out_bias": slice(10, 11),
}
_BESIDES = ("weight", "bias", "out_weight", "out_bias")


def stacked_lstm(
    model: nn.Module, parameters: Sequence[Tensor], record_loss: RecordLoss, descent: Descent
) -> StackedLSTM | None:
    """The program for these local steps; None unless the model is exactly the word LSTM."""
    kind = type(model)
    if f"{kind.__module__}.{kind.__qualname__}" != _MODEL or record_loss is not causal_lm_loss:
        return None
    own = dict(model.named_parameters())
    plain = all(
        type(module) in (kind, nn.Embedding, nn.Linear)
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        for module in model.modules()
    )
    dtypes = {parameter.dtype for parameter in parameters}
    fits = (
        plain
        and set(own) == set(_NAMES)
        and {id(parameter) for parameter in parameters} == {id(p) for p in own.values()}
        and len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float64}
    )
    return StackedLSTM(model, parameters, descent) if fits else None


class StackedLSTM:
    """The copies of a microbatch of users, and their local steps."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], descent: Descent) -> None:
        self._made_of = model, parameters, descent
        own = dict(model.named_parameters())
        self._parameters = [own[name] for name in _NAMES]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        # Where each parameter of this file's order stands in the caller's, and the reverse.
        self._places = [places[id(parameter)] for parameter in self._parameters]
        device = self._parameters[0].device
        self._to_own = torch.tensor(self._places, device=device)
        self._to_callers = self._to_own.argsort()
        self._room = Room(self._parameters[0].detach())
        self._eta, self._penalty = descent.rate, descent.penalty
        self._width = self._parameters[0].shape[1]
        self._size = self._parameters[5].shape[0]
        self._smallest = float(model.smallest_length)  # pyright: ignore
        # The kernels are for float32.
        self.has_kernels = device.type == "cuda" and self._parameters[0].dtype == torch.float32

    def another(self) -> StackedLSTM:
        """A program like this one, with memory of its own."""
        return StackedLSTM(*self._made_of)

    def most_users(self, positions: int) -> int:
        """How many users may stand side by side, if a local batch has this many positions."""
        device = self._parameters[0].device.type
        numbers = sum(parameter.numel() for parameter in self._parameters)
        # What is kept of a position: gates, their slopes, cells, states, words and outputs. Logits
        # are written out for one user at a time, if at all.
        worked = positions * (12 * self._size + 6 * self._width)
        fitting = _MOST_STACKED.get(device, 0) // numbers, _MOST_WORKED.get(device, 0) // worked
        return max(1, min(_MOST_USERS.get(device, 1), *fitting))

    def start(self, num_users: int) -> None:
        """Put the copies of all users at the weights of the model."""
        given = [parameter.detach() for parameter in self._parameters]
        self._starts = {name: torch.cat(given[numbers]) for name, numbers in _PIECES.items()}
        self._theta: dict[str, Tensor] = {}
        for name, tensor in self._starts.items():
            copies = self._room.take(f"theta {name}", num_users, *tensor.shape)
            self._theta[name] = copies.copy_(tensor)
        self._factors_PU = given[0].new_ones((len(_NAMES), num_users))
        tables = (self._theta["table"], self._starts["table"], self._smallest)
        if self.has_kernels:
            from userdp.clipping.stacked.triton_words import TritonWords

            self._words, self._cells = TritonWords(*tables), TritonCells(self._room)
        else:
            self._words = TorchWords(*tables, self._room)
            self._cells = TorchCells(self._room)

    def step(
        self,
        ids_UBL: Tensor,
        labels_UBL: Tensor,
        mask_UB: Tensor,
        *,
        resting: int,
        factors: Factors,
    ) -> None:
        """A local step of all users but the first `resting`, who have no records left."""
        users = slice(resting, None)
        mask = mask_UB[users].to(self._factors_PU.dtype)
        ids, labels, weights = _positions(ids_UBL[users], labels_UBL[users], mask)
        positions, records = ids.shape[1], ids_UBL.shape[1]
        if not positions:
            return
        # The clipping that the step before left.
        factor = self._factors_PU[:, users]
        self._words.begin(users, factor[0])
        theta = {name: self._theta[name][users] for name in _PIECES}
        for name in _BESIDES:
            self._settle(*self._by_part(name, theta[name]), factor[_PIECES[name]].T)
        weight, bias, out_weight = theta["weight"], theta["bias"], theta["out_weight"]

        # Forward. Slot t of `read` is what the gates read at position t: word t, state t - 1.
        width = self._width
        read = self._room.take("read", len(ids), positions + records, weight.shape[2])
        entered, states = read[:, :positions], read[:, records:, width:]
        self._words.rows_into(entered[..., :width], ids)
        gates = self._cells.entered(entered[..., :width], weight[..., :width], bias)
        self._cells.forward(gates, read[..., width:], weight[..., width:], records)
        out = torch.baddbmm(theta["out_bias"][:, None], states, out_weight.mT)

        # Backward. Every gradient is taken before its weight moves.
        out_gradient = self._words.output_gradient(out, labels, weights)
        of_states = torch.bmm(out_gradient, out_weight)
        of_gates = self._cells.backward(gates, of_states, weight[..., width:], records)
        of_words = torch.bmm(of_gates, weight[..., :width])
        squares = self._words.step(ids, entered[..., :width], of_words, self._eta, self._penalty)
        self._move(weight, self._starts["weight"], of_gates, entered)
        self._move(out_weight, self._starts["out_weight"], out_gradient, states)
        self._move(bias, self._starts["bias"], of_gates.sum(1))
        self._move(theta["out_bias"], self._starts["out_bias"], out_gradient.sum(1))

        others = [self._squared(*self._by_part(name, theta[name])) for name in _BESIDES]
        squares_PU = torch.cat((squares[None], *others))
        self._factors_PU[:, users] = self._in_callers_order(factors, squares_PU)

    def squared_ways(self) -> Tensor:
        """The squared norms of the users' ways theta - theta^0, clipped, (parameters, users)."""
        squares = [
            self._squared(*self._by_part(name, theta)) for name, theta in self._theta.items()
        ]
        factors = self._factors_PU.double()
        # Squares of what is not finite are not finite, and such a way is zero.
        clipped = torch.where(factors > 0, torch.cat(squares) * factors.square(), 0.0)
        return clipped[self._to_callers]

    def summed_ways(self, weights_PU: Tensor) -> list[Tensor]:
        """The users' ways, clipped, times these weights and added up over the users.

        Parameters are in the caller's order here.
        """
        weights_PU = weights_PU.double()[self._to_own]
        found: dict[int, Tensor] = {}
        for name, numbers in _PIECES.items():
            parts = self._by_part(name, self._theta[name])
            sums = self._summed(*parts, self._factors_PU[numbers].T, weights_PU[numbers].T)
            for number, part in enumerate(sums, numbers.start):
                found[self._places[number]] = part.view_as(self._parameters[number])
        return [found[place] for place in range(len(found))]

    def _summed(
        self, theta_UGX: Tensor, start_GX: Tensor, factor_UG: Tensor, weight_UG: Tensor
    ) -> Tensor:
        if self.has_kernels:
            from userdp.clipping.kernels import local_steps

            return local_steps.summed_ways(theta_UGX, start_GX, factor_UG, weight_UG)
        total = torch.zeros_like(start_GX)
        for theta_GX, factor_G, weight_G in zip(theta_UGX, factor_UG, weight_UG, strict=True):
            way = torch.sub(theta_GX, start_GX, out=self._room.take("way", *start_GX.shape))
            way = torch.where(factor_G[:, None] > 0, way, 0.0) if (factor_G == 0).any() else way
            total.addcmul_(way, (factor_G * weight_G).to(way.dtype)[:, None])
        return total

    def _by_part(self, name: str, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The users' copies as (users, parts, numbers), and their beginning as (parts, numbers).

        The weights of the four gates lie in one tensor, and each is a parameter of its own.
        """
        parts = _PIECES[name].stop - _PIECES[name].start
        return theta.view(len(theta), parts, -1), self._starts[name].view(parts, -1)

    def _settle(self, theta_UGX: Tensor, start_GX: Tensor, factor_UG: Tensor) -> None:
        if self.has_kernels:
            from userdp.clipping.kernels import local_steps

            local_steps.settle_(theta_UGX, start_GX, factor_UG)
        else:
            settle_(theta_UGX, start_GX, factor_UG)

    def _squared(self, theta_UGX: Tensor, start_GX: Tensor) -> Tensor:
        """The squared way from the beginning of each user and each of G parts, (G, U)."""
        if self.has_kernels:
            from userdp.clipping.kernels import local_steps

            return local_steps.squared_ways(theta_UGX, start_GX).T
        way = torch.sub(theta_UGX, start_GX, out=self._room.take("way", *theta_UGX.shape))
        return squared_norms(way).T

    def _move(
        self, theta: Tensor, start: Tensor, left: Tensor, right: Tensor | None = None
    ) -> None:
        """theta -= eta (gradient + penalty (theta - theta^0)); the gradient is left^T right."""
        if right is not None and not self._penalty:
            theta.baddbmm_(left.mT, right, alpha=-self._eta)
            return
        gradient = left if right is None else torch.bmm(left.mT, right)
        if self._penalty:
            gradient = gradient + self._penalty * (theta - start)
        theta.add_(gradient, alpha=-self._eta)

    def _in_callers_order(self, factors: Factors, squares_PU: Tensor) -> Tensor:
        """The factors of squared norms; layers are numbered in the caller's order."""
        return factors(squares_PU[self._to_callers])[self._to_own].to(self._factors_PU.dtype)


def _positions(
    ids_UBL: Tensor, labels_UBL: Tensor, mask_UB: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Words, labels and weights in the loss of all positions but the last, time first, (U, N).

    The loss is the mean over the records of the mean over a record's labels (`causal_lm_loss`).
    """
    labels = labels_UBL[:, :, 1:]
    counts = labels != IGNORED_LABEL
    share = mask_UB / (counts.sum(2).clamp(min=1) * mask_UB.sum(1, keepdim=True).clamp(min=1))
    weights = torch.where(counts, share[..., None], 0.0)
    ids = ids_UBL[:, :, :-1]
    # Any word does where nothing is predicted: its weight is zero.
    labels = torch.where(counts, labels, 0)
    return tuple(tensor.mT.flatten(1) for tensor in (ids, labels, weights))  # type: ignore
