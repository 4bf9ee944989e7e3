"""What a run with any sampler and Gaussian noise costs, recomputed from its ledger.

    python tests/sampler_oracle.py RUN

This imports nothing of `userdp`. It reads the plan in the first row of `RUN/ledger.jsonl`. Where
`dp_accounting` has an event, that library prices it. Random allocation has none, so its privacy
loss is simulated, with the exact density of the mechanism: the answer is then a confidence
interval of 5 standard errors. Sampling without replacement is integrated and convolved on a grid,
with losses rounded down and up.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event, pld
from dp_accounting.privacy_accountant import NeighboringRelation

SAMPLES = 200_000
RELATIONS = {
    "add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "fixed-graph-zero-out": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace": NeighboringRelation.REPLACE_ONE,
}


def of_run(run: Path) -> tuple[float, float]:
    """The least and the largest epsilon that the plan in a ledger may have."""
    with (run / "ledger.jsonl").open() as file:
        return of_plan(json.loads(file.readline())["plan"])


def of_plan(plan: dict[str, Any]) -> tuple[float, float]:
    """The same for a plan as plain data."""
    assert plan["noise"]["type"] == "Gaussian"
    sampler, steps, noise = plan["sampler"], plan["steps"], plan["noise"]["noise_multiplier"]
    allocated = _allocation(sampler, steps, noise)
    if allocated is not None:
        assert plan["adjacency"] in ("add-remove", "zero-out")
        return _simulated(*allocated, delta=plan["delta"])
    if sampler["type"] == "WithoutReplacement":
        rate = sampler["cohort_size"] / sampler["num_users"]
        replaces = plan["adjacency"] == "replace"
        return _two_tails(rate, noise, steps, replaces=replaces, delta=plan["delta"])
    # Mixtures take many times as long on the usual grid of 1e-4.
    grid = 1e-3 if "Records" in sampler["type"] else 1e-4
    accountant = pld.PLDAccountant(RELATIONS[plan["adjacency"]], value_discretization_interval=grid)
    accountant.compose(*_event(sampler, steps, noise))
    epsilon = accountant.get_epsilon(plan["delta"])
    return epsilon, epsilon


def _event(sampler: dict[str, Any], steps: int, noise: float) -> tuple[dp_event.DpEvent, int]:
    """One step, or one turn, and how often it comes."""
    gaussian = dp_event.GaussianDpEvent(noise)
    match sampler["type"]:
        case "PoissonUsers":
            return dp_event.PoissonSampledDpEvent(sampler["user_sampling_prob"], gaussian), steps
        case "CyclicPoissonUsers":
            event = dp_event.PoissonSampledDpEvent(sampler["user_sampling_prob"], gaussian)
            return event, math.ceil(steps / sampler["parts"])
        case "PoissonRecords" | "CyclicPoissonRecords":
            p, most = sampler["record_sampling_prob"], sampler["group_size"]
            counts = range(most + 1)
            probs = [math.comb(most, n) * p**n * (1 - p) ** (most - n) for n in counts]
            event = dp_event.MixtureOfGaussiansDpEvent(noise, list(map(float, counts)), probs)
            return event, math.ceil(steps / sampler.get("parts", 1))
        case "CappedPoissonUsers":
            event = dp_event.TruncatedSubsampledGaussianDpEvent(
                sampler["num_users"], sampler["user_sampling_prob"], sampler["cap"], noise
            )
            return event, steps
        case "MinSeparated":
            often = min(sampler["group_size"], math.ceil(steps / sampler["separation"]))
            return gaussian, often
        case other:
            raise ValueError(f"no rule for {other}")


def _allocation(
    sampler: dict[str, Any], steps: int, noise: float
) -> tuple[int, int, int, float] | None:
    """Steps, participations, how many such rounds, and the noise; None for other samplers."""
    match sampler["type"]:
        case "Allocation":
            assert sampler["steps"] == steps
            return steps, sampler["participations"], 1, noise
        case "BalancedIteration":
            length = sampler["round_length"]
            return length, 1, math.ceil(steps / length), noise
        case "BallsInBins":
            # The same place in every round: the sum of the rounds is all that matters.
            rounds = math.ceil(steps / sampler["bins"])
            return sampler["bins"], 1, 1, noise / math.sqrt(rounds)
    return None


def _two_tails(
    rate: float, noise: float, steps: int, *, replaces: bool, delta: float
) -> tuple[float, float]:
    """Positive losses of removing a user, mirrored losses of adding one, and nothing between."""
    away = np.linspace(0, 14 * noise + 2, 400_001)[:-1] + (14 * noise + 2) / 800_000
    width = (14 * noise + 2) / 400_000

    def density(x: Any, shift: float) -> Any:
        both = (1 - rate) * np.exp(-((x / noise) ** 2) / 2)
        both += rate * np.exp(-(((x - shift) / noise) ** 2) / 2)
        return both * width / (noise * math.sqrt(2 * math.pi))

    (near, far), (low, high) = ((0, 2), (0, 2)) if replaces else ((1, 2), (0, 1))
    gains = [density((near + far) / 2 + away, shift) for shift in (far, near)]
    losses = [density((low + high) / 2 + away, shift) for shift in (low, high)]
    p, q = np.append(gains[0], losses[0]), np.append(gains[1], losses[1])
    loss = np.log(p / q)
    found = [
        [_convolved(sign * loss, mass, steps, delta, rounded) for rounded in (np.floor, np.ceil)]
        for sign, mass in ((1, p), (-1, q))
    ]
    return max(least for least, _ in found), max(most for _, most in found)


def _convolved(loss: Any, mass: Any, steps: int, delta: float, rounded: Any) -> float:
    """Epsilon of so many steps whose losses are rounded to a grid; the rest of the mass has 0."""
    spacing = 2e-4
    index = np.append(rounded(loss / spacing).astype(int), 0)
    mass = np.append(mass, 1 - mass.sum())
    length = 1 << int(np.ptp(index) * steps + 2).bit_length()
    one = np.bincount(index - index.min(), mass, minlength=length)
    composed = np.fft.irfft(np.fft.rfft(one) ** steps, length)
    total = spacing * (np.arange(length) + steps * index.min())
    least, most = 0.0, 200.0
    for _ in range(50):
        middle = (least + most) / 2
        reached = composed @ np.maximum(-np.expm1(np.minimum(middle - total, 0.0)), 0.0)
        least, most = (middle, most) if reached > delta else (least, middle)
    return most


def _simulated(
    steps: int, often: int, rounds: int, noise: float, *, delta: float
) -> tuple[float, float]:
    """The interval of epsilon, from losses drawn on the data with the user and without."""
    rng = np.random.default_rng(20)
    with_user = sum(_losses(steps, often, noise, rng, present=True) for _ in range(rounds))
    without = -sum(_losses(steps, often, noise, rng, present=False) for _ in range(rounds))
    found = [_interval(losses, delta) for losses in (with_user, without)]
    return max(low for low, _ in found), max(high for _, high in found)


def _losses(
    steps: int, often: int, noise: float, rng: np.random.Generator, *, present: bool
) -> Any:
    """log P/Q of one round, where P is the mixture over all sets of `often` steps."""
    outputs = noise * rng.standard_normal((SAMPLES, steps))
    if present:
        places = np.argpartition(rng.random((SAMPLES, steps)), often - 1, axis=1)[:, :often]
        np.put_along_axis(outputs, places, np.take_along_axis(outputs, places, 1) + 1, axis=1)
    ratios = np.exp((2 * outputs - 1) / (2 * noise**2))
    # The sum over all sets of the products of their ratios, one step after another.
    sums = np.zeros((SAMPLES, often + 1))
    sums[:, 0] = 1
    for step in range(steps):
        sums[:, 1:] += ratios[:, step, None] * sums[:, :-1]
    return np.log(sums[:, often] / math.comb(steps, often))


def _interval(losses: Any, delta: float) -> tuple[float, float]:
    """Where E (1 - e^(epsilon - loss))+ is delta, within 5 standard errors."""

    def delta_at(epsilon: float, sign: int) -> float:
        parts = np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))
        return float(parts.mean() + sign * 5 * parts.std() / math.sqrt(len(losses)))

    def solved(sign: int) -> float:
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_at(middle, sign) > delta else (low, middle)
        return high

    return solved(-1), solved(1)


if __name__ == "__main__":
    print(json.dumps(dict(zip(("least", "largest"), of_run(Path(sys.argv[1])), strict=True))))
