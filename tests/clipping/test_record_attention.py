"""Attention within joined records is ordinary attention with a mask that keeps records apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from userdp.clipping.execute.record_attention import gradients_one_by_one, one_by_one

SCALE = 0.3


def layout(lengths: list[int], row: int) -> tuple[Tensor, Tensor]:
    """Positions and tokens left of records of these lengths, and of one more row of padding."""
    position = torch.cat([torch.arange(length) for length in lengths])
    left = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])
    padding = -len(position) % row + row
    found = F.pad(position, (0, padding)), F.pad(left, (0, padding), value=-1)
    return found[0].view(-1, row), found[1].view(-1, row)


def masked(q: Tensor, k: Tensor, v: Tensor, position: Tensor, left: Tensor) -> Tensor:
    """All tokens in one row, with a mask: the oracle."""
    place = torch.arange(position.numel())
    start = place - position.flatten()
    sees = (place[None] >= start[:, None]) & (place[None] <= place[:, None])
    heads = q.shape[1]
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // len(t), 0) for t in (k, v))
    weights = (q @ k.mT * SCALE).masked_fill(~sees, -torch.inf).softmax(-1)
    found = (weights @ v).transpose(0, 1).unflatten(0, position.shape)
    return found * (left >= 0)[..., None, None]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [[5, 9, 1, 1, 17, 3], [16], [1, 1], [40, 2]])
def test_outputs_and_gradients_are_those_of_a_mask(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    position, left = layout(lengths, 8)

    def drawn(count: int) -> Tensor:
        return torch.randn(len(position), count, 8, 6, generator=generator, dtype=torch.float64)

    q, k, v = (drawn(count).requires_grad_() for count in (heads[0], heads[1], heads[1]))
    d_out = drawn(heads[0]).transpose(1, 2)
    expected = masked(q, k, v, position, left)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out)
    found = one_by_one(q, k, v, position, left, SCALE)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (q, k, v), d_out), wanted)
    by_hand = gradients_one_by_one(d_out, q, k, v, position, left, SCALE)
    torch.testing.assert_close(tuple(g.transpose(1, 2) for g in by_hand), wanted)
