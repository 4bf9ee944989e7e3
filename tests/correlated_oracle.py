"""What a run with correlated noise costs, recomputed from its ledger.

    python tests/correlated_oracle.py RUN

This imports nothing of `userdp`. It reads the plan in the first row of `RUN/ledger.jsonl`. For
strategies without bands it makes C by formulas of its own, and tries every pattern of steps.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event, pld
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.stats import norm


def of_run(run: Path) -> float:
    """The epsilon of the plan in a ledger."""
    with (run / "ledger.jsonl").open() as file:
        return of_plan(json.loads(file.readline())["plan"])


def of_plan(plan: dict[str, Any]) -> float:
    """The same for a plan as plain data."""
    sampler, noise, delta = plan["sampler"], plan["noise"], plan["delta"]
    assert noise["type"] == "Banded"
    assert noise["steps"] == plan["steps"]
    if sampler["type"] == "MinSeparated":
        assert plan["adjacency"].startswith("fixed-graph")
        # Replacing a contribution moves it twice as far as leaving it out.
        moved = _moved(noise, sampler) * (2 if plan["adjacency"].endswith("replace") else 1)
        return _of_gaussian(noise["noise_multiplier"] / moved, delta)
    assert plan["adjacency"] in ("add-remove", "zero-out")
    assert noise["strategy"] in ("optimised", "toeplitz")
    assert sampler["parts"] >= noise["bands"]
    gaussian = dp_event.GaussianDpEvent(noise["noise_multiplier"])
    if sampler["type"] == "CyclicPoissonUsers":
        event: Any = dp_event.PoissonSampledDpEvent(sampler["user_sampling_prob"], gaussian)
    else:
        assert sampler["type"] == "CyclicPoissonRecords"
        p, most = sampler["record_sampling_prob"], sampler["group_size"]
        probs = [math.comb(most, n) * p**n * (1 - p) ** (most - n) for n in range(most + 1)]
        means = [float(n) for n in range(most + 1)]
        event = dp_event.MixtureOfGaussiansDpEvent(noise["noise_multiplier"], means, probs)
    accountant = pld.PLDAccountant(
        NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
    )
    accountant.compose(event, math.ceil(plan["steps"] / sampler["parts"]))
    return accountant.get_epsilon(delta)


def _of_gaussian(multiplier: float, delta: float) -> float:
    """Balle and Wang 2018, Thm. 8, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        a, b = 1 / (2 * multiplier), middle * multiplier
        found = norm.cdf(a - b) - math.exp(middle + norm.logcdf(-a - b))
        low, high = (middle, high) if found > delta else (low, middle)
    return high


def _moved(noise: dict[str, Any], sampler: dict[str, Any]) -> float:
    """How far a user moves C G, over every pattern of steps."""
    steps, apart = noise["steps"], sampler["separation"]
    most = min(sampler["group_size"], math.ceil(steps / apart))
    if noise["strategy"] in ("optimised", "toeplitz"):
        assert apart >= noise["bands"]
        return math.sqrt(most)
    column = _first_column(noise)
    column /= np.linalg.norm(column)
    matrix = np.zeros((steps, steps))
    for s in range(steps):
        matrix[s:, s] = column[: steps - s]
    patterns = (
        pattern
        for k in range(1, most + 1)
        for pattern in itertools.combinations(range(steps), k)
        if all(b - a >= apart for a, b in itertools.pairwise(pattern))
    )
    return max(float(np.linalg.norm(matrix[:, p].sum(axis=1))) for p in patterns)


def _first_column(noise: dict[str, Any]) -> Any:
    steps = noise["steps"]
    if noise["strategy"] == "buffered":
        buffers = list(zip(noise["decays"], noise["scales"], strict=True))
        later = [sum(w * r**k for r, w in buffers) for k in range(steps - 1)]
        return np.array([1.0, *later])
    # The square root of the inverse of prefix sums, cut; C is its inverse.
    assert (noise["momentum"], noise["decay"]) == (0, 0)
    terms = [(-1) ** k * _half_over(k) for k in range(noise["bands"])]
    inverse = sum(np.diag(np.full(steps - k, term), -k) for k, term in enumerate(terms))
    return np.linalg.inv(inverse)[:, 0].copy()


def _half_over(k: int) -> float:
    """The binomial coefficient of one half over k."""
    return math.prod((0.5 - i) / (i + 1) for i in range(k))


if __name__ == "__main__":
    print(of_run(Path(sys.argv[1])))
