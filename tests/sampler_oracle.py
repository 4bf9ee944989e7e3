"""What a run with any sampler and Gaussian noise costs, recomputed from its ledger.

    python tests/sampler_oracle.py RUN

This imports nothing of `userdp`. It reads the plan in the first row of `RUN/ledger.jsonl`. Where
`dp_accounting` has an event, that library prices it. Random allocation has none, so its privacy
loss is simulated, with the exact density of the mechanism: the answer is then a confidence
interval of 5 standard errors. For cohorts without replacement the least epsilon is that of a
simulated attacker, and the largest is the library's for a cohort that is cut at random.
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
    # Mixtures take many times as long on the usual grid of 1e-4.
    grid = 1e-3 if "Records" in sampler["type"] else 1e-4
    accountant = pld.PLDAccountant(RELATIONS[plan["adjacency"]], value_discretization_interval=grid)
    accountant.compose(*_event(sampler, steps, noise))
    epsilon = accountant.get_epsilon(plan["delta"])
    if sampler["type"] != "WithoutReplacement":
        return epsilon, epsilon
    rate = sampler["cohort_size"] / sampler["num_users"]
    return _pushed_out(rate, steps, noise, delta=plan["delta"]), epsilon


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
        case "WithoutReplacement":
            event = dp_event.TruncatedSubsampledGaussianDpEvent(
                sampler["num_users"], 1.0, sampler["cohort_size"], noise
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


def _pushed_out(rate: float, steps: int, noise: float, *, delta: float) -> float:
    """The least epsilon where all others pull against the user, whose place may be empty.

    In a step the user takes the place of somebody who pulls by -1, or its empty place does.
    """
    rng = np.random.default_rng(21)
    total = np.zeros(SAMPLES)
    for _ in range(steps):
        is_drawn = rng.random(SAMPLES) < rate
        output = np.where(is_drawn, 2.0, 0.0) + noise * rng.standard_normal(SAMPLES)
        ratio = [
            1 - rate + rate * np.exp((2 * moved * output - moved**2) / (2 * noise**2))
            for moved in (2.0, 1.0)
        ]
        total += np.log(ratio[0]) - np.log(ratio[1])
    return _interval(total, delta)[0]


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
