"""The embedding table of stacked LSTMs: its part in the loss, and its local step, in torch.

Every user has its own table E (vocabulary, width). Its rows are brought to length 1 where they are
used: w_v = E_v / |E_v|. The output o_t of a position is compared with all rows, so the logits are
l_tv = o_t w_v. With the weight k_t of a position in the loss and its label y_t, the gradients are

    g_tv = k_t (softmax(l_t)_v - [v = y_t])        of the logits,
    d_v  = sum_t g_tv o_t + sum_{t: id_t = v} x'_t     of w_v, where x' is the input's gradient,
    (d_v - w_v (w_v d_v)) / |E_v|                      of E_v.

A row shorter than the smallest length is divided by that constant, which has no gradient.

`kernels.word_table` computes the same on CUDA and reads the table twice a step. Here the softmax is
written out, for one user at a time.

Shapes: U users, N positions, V words, D width. Everything is secret until noise is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from userdp.clipping.kernels.onednn import product
from userdp.clipping.stacked.room import Room, settle_, squared_norms


class TorchWords:
    """The users' tables. `theta_UVD` is before the last clipping, which is its factor."""

    def __init__(self, theta_UVD: Tensor, start_VD: Tensor, smallest: float, room: Room) -> None:
        self._theta, self._start, self._room = theta_UVD, start_VD, room
        self._smallest = smallest
        self._inverse_UV = self._bent_UV = theta_UVD[:0, :, 0]
        self._gradients: list[Tensor] = []

    def begin(self, users: slice, factor_U: Tensor) -> None:
        """A local step of these users begins: clip what the step before left."""
        self._table = self._theta[users]
        settle_(self._table[:, None], self._start[None], factor_U[:, None])
        lengths = torch.linalg.vector_norm(self._table, dim=2)
        self._inverse_UV = 1 / lengths.clamp(min=self._smallest)
        # Where the length is the constant it has no gradient.
        self._turns_UV = (lengths >= self._smallest).to(lengths.dtype)

    def rows_into(self, rows_UND: Tensor, ids_UN: Tensor) -> None:
        """Write the words w of these ids."""
        wide = ids_UN[..., None].expand(-1, -1, self._table.shape[2])
        inverse = self._inverse_UV.gather(1, ids_UN)[..., None]
        torch.mul(self._table.gather(1, wide), inverse, out=rows_UND)

    def output_gradient(self, out_UND: Tensor, labels_UN: Tensor, weights_UN: Tensor) -> Tensor:
        """The gradient of the outputs o; a position of weight zero may have any valid label."""
        found = self._room.take("of outputs", *out_UND.shape)
        self._gradients, bent = [], []
        # One user after the other: what is computed of one table stays in the cache.
        for user, (table, inverse) in enumerate(zip(self._table, self._inverse_UV, strict=True)):
            out, label, weight = out_UND[user], labels_UN[user], weights_UN[user]
            unit = torch.mul(table, inverse[:, None], out=self._room.take("unit", *table.shape))
            logits = product(out, unit)
            # softmax(l) - [v = y]; the weights k are multiplied where fewer numbers are.
            slope = torch.softmax(logits, 1, out=self._room.take("softmax", *logits.shape))
            slope.scatter_add_(1, label[:, None], slope.new_full((len(label), 1), -1.0))
            torch.mul(product(slope, unit.T), weight[:, None], out=found[user])
            self._gradients.append(product(slope.T, (out * weight[:, None]).T))
            # w_v d_v without the inputs: sum_t g_tv l_tv.
            bent.append(weight @ logits.mul_(slope))
        self._bent_UV = torch.stack(bent)
        return found

    def step(
        self, ids_UN: Tensor, inputs_UND: Tensor, gradient_UND: Tensor, eta: float, penalty: float
    ) -> Tensor:
        """theta - eta grad, in place; returns the squared way from the beginning, (U,).

        `inputs_UND` are the words that went in, `gradient_UND` is their gradient.
        """
        turns = self._turns_UV.gather(1, ids_UN)[..., None]
        along = (inputs_UND * gradient_UND).sum(2, keepdim=True) * turns
        own_UND = gradient_UND - inputs_UND * along
        bent_UV = self._bent_UV * self._inverse_UV * self._turns_UV
        squares: list[Tensor] = []
        for user, (table, gradient) in enumerate(zip(self._table, self._gradients, strict=True)):
            own, ids = own_UND[user], ids_UN[user]
            gradient.addcmul_(table, bent_UV[user, :, None], value=-1)
            gradient.scatter_add_(0, ids[:, None].expand_as(own), own)
            way = self._room.take("way", *table.shape)
            if penalty:
                table.add_(torch.sub(table, self._start, out=way), alpha=-eta * penalty)
            table.addcmul_(gradient, self._inverse_UV[user, :, None], value=-eta)
            torch.sub(table, self._start, out=way)
            squares.append(squared_norms(way.flatten()))
        return torch.stack(squares)
