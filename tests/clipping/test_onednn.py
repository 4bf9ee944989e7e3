"""Products by oneDNN: the same numbers as torch's, and only where they are fast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from userdp.clipping.kernels import onednn
from userdp.clipping.kernels.onednn import product


def layouts(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """One matrix in three layouts; the last lies in pieces."""
    torch.manual_seed(rows)
    whole = torch.randn(rows, columns, dtype=dtype)
    return [whole, whole.T.contiguous().T, torch.cat((whole, whole), 1)[:, :columns]]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_a_product_is_that_of_float64_in_every_layout(dtype: torch.dtype, most: float) -> None:
    for left in layouts(13, 40, dtype):
        for right in layouts(29, 40, dtype):
            exact = left.double() @ right.double().T
            found = product(left, right)
            assert found.dtype == dtype
            assert float((found - exact).norm()) <= most * float(exact.norm())


@pytest.mark.skipif(onednn._onednn() is None, reason="torch without oneDNN's product")
def test_onednn_takes_whole_float32_matrices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def linear(left: Tensor, right: Tensor, *_: object) -> Tensor:
        taken.append((*left.shape, *right.shape))
        return left @ right.T

    monkeypatch.setattr(onednn, "_onednn", lambda: linear)
    whole, turned, pieces = layouts(8, 16, torch.float32)
    product(whole, turned)
    assert len(taken) == 1
    product(whole, pieces)
    product(pieces, whole)
    product(whole.double(), turned.double())
    assert len(taken) == 1


def test_without_onednn_torchs_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, turned, _ = layouts(8, 16, torch.float32)
    monkeypatch.setattr(onednn, "_onednn", lambda: None)
    assert torch.equal(product(whole, turned), whole @ turned.T)


@pytest.mark.parametrize(("rows", "columns", "inner"), [(3, 4, 0), (0, 4, 3), (3, 0, 4)])
def test_a_product_of_matrices_without_numbers_is_torchs(
    rows: int, columns: int, inner: int
) -> None:
    left, right = torch.zeros(rows, inner), torch.zeros(columns, inner)
    assert torch.equal(product(left, right), left @ right.T)
