"""The law of every noise at a million numbers, from every kind of stream. The seed is 11.

"Nothing is repeated" cannot mean that no number comes twice. A float32 has 24 digits, so among a
million normal numbers some are alike by chance, and whole numbers on a grid are so more often. A
stream that is used twice repeats whole runs of numbers. So no three numbers in a row may come again
anywhere, in any step.
"""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from part_examples import examples
from scipy import stats

from userdp.noise import NOISES, Banded, Noise
from userdp.streams import RunSecret

SIZE = 1_000_000
SECRET = RunSecret.fixed_for_tests(11)
with_cipher = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)
STREAMS = ["philox", pytest.param("chacha20", marks=with_cipher)]
# Correlated noise draws its numbers as Gaussian noise does. Two of its kinds stand for all.
NOISES_TO_TRY = [
    part
    for part in examples(NOISES)
    if not isinstance(part, Banded)
    or (part.noise_multiplier, part.strategy) in ((0.7, "optimised"), (1.5, "inverse-square-root"))
]

every = pytest.mark.parametrize("part", NOISES_TO_TRY, ids=str)
any_stream = pytest.mark.parametrize("randomness", STREAMS)


def steps_of(
    part: Noise, randomness: str, steps: int, *, first: int = 0, last: int = SIZE
) -> list[np.ndarray]:
    """Unit noise of the first steps, drawn by a rank that holds the positions [first, last)."""
    started, rows = part.started(), []
    for step in range(steps):
        values = torch.zeros(last - first)
        started.add_(
            values,
            offset=first,
            size=SIZE,
            noise_stddev=1.0,
            step=step,
            streams=SECRET.streams("noise", randomness),
        )
        rows.append(values.numpy())
    return rows


def names_of_triples(row: np.ndarray) -> np.ndarray:
    """64 bits for every three numbers in a row. Unlike ones share them by chance: 1e-7 in all."""
    bits = row.view(np.uint32).astype(np.uint64)
    first, second = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    return (bits[:-2] * first + bits[1:-1]) * second + bits[2:]


def repeated(rows: list[np.ndarray]) -> int:
    names = np.sort(np.concatenate([names_of_triples(row) for row in rows]))
    return int((names[1:] == names[:-1]).sum())


def test_numbers_that_come_again_are_found() -> None:
    row = np.random.default_rng(0).standard_normal(1000).astype("f4")
    assert repeated([row]) == 0
    assert repeated([row, row[100:103]]) == 1


@pytest.mark.statistical
@any_stream
@every
def test_a_million_numbers_have_the_stated_law_and_none_is_repeated(
    part: Noise, randomness: str
) -> None:
    # KS: p > 0.001. Deviation within 1%, 14 standard errors. Neighbours' correlation within 4
    # standard errors, failure 6e-5. Three numbers alike by chance: below 1e-6 in all.
    rows = steps_of(part, randomness, 2)
    deviations = np.sqrt((part.mixing(2) ** 2).sum(axis=1))
    for row, deviation in zip(rows, deviations, strict=True):
        unit = row.astype(np.float64) / deviation
        assert stats.kstest(unit, "norm", method="asymp").pvalue > 0.001
        assert unit.std() == pytest.approx(1.0, abs=0.01)
        assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 0.004
    assert repeated(rows) == 0


@pytest.mark.statistical
@any_stream
@every
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_adds_the_same_noise_once(
    part: Noise, randomness: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Standard error of a correlation of 250,000 numbers: 0.002. Six pairs within 0.004 * sqrt(4),
    # 4 standard errors, failure 4e-4 in all; with fewer ranks within 4 of their own.
    monkeypatch.setattr("userdp.noise.draw.PIECE", 2**18)
    edges = [SIZE * rank // ranks for rank in range(ranks + 1)]
    parts = [
        steps_of(part, randomness, 1, first=first, last=last)[0]
        for first, last in itertools.pairwise(edges)
    ]
    (whole,) = steps_of(part, randomness, 1)
    assert np.array_equal(np.concatenate(parts), whole)
    if ranks > 1:
        correlations = np.corrcoef(np.stack(parts)) - np.eye(ranks)
        assert np.abs(correlations).max() < 4 * math.sqrt(ranks / SIZE)
