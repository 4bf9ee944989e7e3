"""Noise on a GPU: the reference's numbers, the same for every division of the buffer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from reference_streams import normals

from userdp.noise import draw
from userdp.noise.correlate import add_from_streams_, advance_
from userdp.noise.draw import add_normal_
from userdp.streams import RunSecret

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

both = pytest.mark.parametrize("randomness", ["philox", "chacha20"])
SIZE = 1_000_000


def streams(randomness: str):
    return RunSecret.fixed_for_tests(9).streams("noise", randomness)


def drawn(randomness: str, first: int = 0, last: int = SIZE, step: int = 0) -> torch.Tensor:
    values = torch.zeros(last - first, device="cuda")
    given = {"offset": first, "size": SIZE, "stddev": 1.0, "step": step}
    add_normal_(values, streams=streams(randomness), **given)
    return values


@both
def test_numbers_are_the_references(randomness: str) -> None:
    key = streams(randomness).key(0)
    found = drawn(randomness).double().cpu().numpy()
    for first in (0, 2048 * 200 - 100, SIZE - 5000):
        exact = normals(randomness, key, first, first + 5000)
        assert np.abs(found[first : first + 5000] - exact).max() < 2e-6


@both
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_division_into_ranks_draws_the_same(randomness: str, ranks: int) -> None:
    whole = drawn(randomness)
    edges = [SIZE * rank // ranks + 3 * (0 < rank < ranks) for rank in range(ranks + 1)]
    parts = [drawn(randomness, a, b) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    assert abs(float(whole.double().std()) - 1) < 0.01
    shards = torch.stack([part[: SIZE // ranks - 3] for part in parts]).double()
    # Standard error 0.002 at a quarter of a million numbers, six pairs; the seed is fixed.
    correlations = torch.corrcoef(shards).reshape(ranks, ranks) - torch.eye(ranks, device="cuda")
    assert float(correlations.abs().max()) < 0.004 * max(1, math.sqrt(ranks))


@both
def test_a_million_numbers_are_normal(randomness: str) -> None:
    # Kolmogorov and Smirnov: the largest distance at p = 0.001 is 1.95 / sqrt(n).
    found = np.sort(drawn(randomness, step=5).double().cpu().numpy())
    normal = torch.special.ndtr(torch.from_numpy(found)).numpy()
    ranks = np.arange(SIZE + 1) / SIZE
    distance = max(np.abs(normal - ranks[1:]).max(), np.abs(normal - ranks[:-1]).max())
    assert distance < 1.95 / math.sqrt(SIZE)


@both
def test_correlated_noise_by_kernels_is_that_of_torch(randomness: str, monkeypatch) -> None:
    bands, size = 5, 100_000
    row = (1.0 / np.sqrt(1 + np.arange(bands))).tolist()
    for offset in (0, 12_345):
        given = {"offset": offset, "size": SIZE, "stddev": 2.0, "streams": streams(randomness)}
        by_kernel, by_torch = (torch.zeros(bands - 1, size, device="cuda") for _ in range(2))
        for step in range(7):
            one, other, redrawn, expected = (torch.ones(size, device="cuda") for _ in range(4))
            advance_(one, by_kernel, row[: step + 1], step=step, **given)
            add_from_streams_(redrawn, row, step=step, **given)
            with monkeypatch.context() as patch:
                patch.setattr("userdp.noise.correlate.has_kernels", lambda _: False)
                advance_(other, by_torch, row[: step + 1], step=step, **given)
                add_from_streams_(expected, row, step=step, **given)
            torch.testing.assert_close(one, other, rtol=0, atol=4e-6)
            torch.testing.assert_close(redrawn, expected, rtol=0, atol=6e-6)
        torch.testing.assert_close(by_kernel, by_torch, rtol=0, atol=2e-6)
    assert draw.has_kernels(one)
