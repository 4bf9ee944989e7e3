"""The recurrence of stacked LSTMs over the positions, forward and backward.

Reference: the equations of `models.word_lstm`: c_t = keep c + enter new, h_t = leave tanh(c_t).

Shapes as in `stacked.lstm`: (users, positions times records, gates times state), time first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from userdp.clipping.stacked.room import Room


class TorchCells:
    """The cells of one local step. Forward leaves the gates' values in place for backward."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def entered(self, words: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What words and biases contribute to the gates, for `forward`."""
        gates = self._room.take("gates", *words.shape[:2], weight.shape[1])
        return torch.baddbmm(bias[:, None], words, weight.mT, out=gates)

    def forward(self, gates: Tensor, states: Tensor, weight: Tensor, records: int) -> None:
        """Fill `states` (one slot more than positions): slot t + 1 is the state after position t.

        `gates` come as `entered` gave them, and become the gates' values.
        """
        users, positions, wide = gates.shape
        size = wide // 4
        cells = self._room.take("cells", users, positions + records, size)
        tanhs = self._room.take("tanhs", users, positions, size)
        states[:, :records] = 0
        cells[:, :records] = 0
        for first in range(0, positions, records):
            now, after = slice(first, first + records), slice(first + records, first + 2 * records)
            gate = gates[:, now]
            if first:
                gate.baddbmm_(states[:, now], weight.mT)
            gate[..., : 2 * size].sigmoid_()
            gate[..., 2 * size : 3 * size].tanh_()
            gate[..., 3 * size :].sigmoid_()
            enter, keep, new, leave = gate.split(size, 2)
            cell = torch.mul(keep, cells[:, now], out=cells[:, after])
            cell.addcmul_(enter, new)
            torch.tanh(cell, out=tanhs[:, now])
            torch.mul(leave, tanhs[:, now], out=states[:, after])
        self._cells, self._tanhs = cells, tanhs

    def backward(self, gates: Tensor, of_states: Tensor, weight: Tensor, records: int) -> Tensor:
        """The gradient before the gates' functions, from the states' gradient, which is lost.

        What does not depend on the recurrence is computed for all positions at once: the gradient
        of a gate is that of its cell (or of the state) times `slopes`.
        """
        users, positions, wide = gates.shape
        size = wide // 4
        enter, keep, new, leave = gates.unflatten(2, (4, size)).unbind(2)
        slopes = self._room.take("slopes", users, positions, 4, size)
        for number, (gate, other) in enumerate(
            ((enter, new), (keep, self._cells[:, :positions]), (new, enter), (leave, self._tanhs))
        ):
            slope = slopes[:, :, number]
            torch.mul(gate, gate, out=slope)
            if gate is new:
                slope.neg_().add_(1)
            else:
                torch.sub(gate, slope, out=slope)
            slope *= other
        # How the cell's gradient follows from the state's: leave (1 - tanh^2).
        to_cell = self._tanhs.square_().neg_().add_(1).mul_(leave)
        of_cell = torch.zeros_like(of_states[:, :records])
        for first in range(positions - records, -1, -records):
            now = slice(first, first + records)
            of_state = of_states[:, now]
            if first + records < positions:
                later = slopes[:, first + records : first + 2 * records].flatten(2)
                of_state.baddbmm_(later, weight)
            of_cell.addcmul_(of_state, to_cell[:, now])
            slopes[:, now, :3] *= of_cell[:, :, None]
            slopes[:, now, 3] *= of_state
            of_cell *= keep[:, now]
        return slopes.flatten(2)


class TritonCells:
    """`TorchCells` with one kernel for each position, beside the product."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def entered(self, words: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """What words contribute to the gates, for `forward`."""
        self._bias = bias
        gates = self._room.take("gates", *words.shape[:2], weight.shape[1])
        return torch.bmm(words, weight.mT, out=gates)

    def forward(self, gates: Tensor, states: Tensor, weight: Tensor, records: int) -> None:
        """What `TorchCells.forward` does, but the biases are added here."""
        from userdp.clipping.kernels import local_steps

        users, positions, wide = gates.shape
        self._cells = self._room.take("cells", users, positions + records, wide // 4)
        states[:, :records] = 0
        self._cells[:, :records] = 0
        for first in range(0, positions, records):
            now = slice(first, first + records)
            if first:
                gates[:, now].baddbmm_(states[:, now], weight.mT)
            local_steps.cell(gates, self._bias, self._cells, states, first, records)

    def backward(self, gates: Tensor, of_states: Tensor, weight: Tensor, records: int) -> Tensor:
        """What `TorchCells.backward` does; the gradient overwrites the gates' values."""
        from userdp.clipping.kernels import local_steps

        positions = gates.shape[1]
        of_cells = torch.zeros_like(of_states[:, :records])
        for first in range(positions - records, -1, -records):
            if first + records < positions:
                later = gates[:, first + records : first + 2 * records]
                of_states[:, first : first + records].baddbmm_(later, weight)
            local_steps.cell_gradient(gates, self._cells, of_states, of_cells, first, records)
        return gates
