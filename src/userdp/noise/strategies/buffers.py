"""The best decays and scales of a few buffers, by L-BFGS.

What is minimised is the mean variance in the model times the squared sensitivity, for a user who
takes part every `separation` steps. The workload's learning rate is taken to be constant, as C is
Toeplitz. Derivatives are differences: there are only two numbers for each buffer.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from userdp.noise.strategies.compiled import compiled
from userdp.noise.strategies.sensitivity import unrounded
from userdp.noise.strategies.unbanded import Buffered, buffered, buffered_series
from userdp.noise.strategies.workload import Workload

Floats = NDArray[np.float64]

# Digits that are kept of a decay and a scale. They stand in the ledger.
DIGITS = 9
LARGEST_ERROR = 1e30


@functools.lru_cache(maxsize=16)
def optimised_buffers(workload: Workload, buffers: int, separation: int) -> Buffered:
    """The best strategy with so many buffers for a user who takes part every `separation` steps."""
    n = workload.steps
    if buffers == 0 or n == 1:
        return buffered(np.zeros(0), np.zeros(0), n)

    def split(logs: Floats) -> tuple[Floats, Floats]:
        return 1 - np.exp(logs[:buffers]), np.exp(logs[buffers:])

    def objective(logs: Floats) -> float:
        decays, scales = split(logs)
        column = buffered_series(tuple(decays), tuple(scales), n)
        sensitivity = unrounded(column, separation=separation, participations=n)
        error = buffered_error(workload, decays, scales)
        # Scales that are too large make the noise grow without bound.
        return math.log(sensitivity**2 * error) if error < LARGEST_ERROR else math.log(1e30)

    # 1 / sqrt(pi k) = 1/pi times the integral of exp(-k g) sqrt(g) d(log g): the square root of
    # prefix sums, with a buffer for each piece of the integral.
    edges = np.linspace(math.log(min(0.5, 1 / n)), math.log(0.9), buffers + 1)
    gaps = (edges[1:] + edges[:-1]) / 2
    start = np.concatenate([gaps, np.log(np.diff(edges) / math.pi) + gaps / 2])
    start[buffers:] -= max(0.0, math.log(float(np.exp(start[buffers:]).sum())))
    low, high = math.log(1e-3 / n), math.log(0.999)
    bounds = [(low, high)] * buffers + [(-30.0, 0.0)] * buffers
    options = {"maxiter": 1000, "maxfun": 10**6, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 30}
    found: Any = minimize(
        objective, start, method="L-BFGS-B", jac="3-point", bounds=bounds, options=options
    )
    best = found.x if found.fun <= objective(start) else start
    decays, scales = split(best)
    order = np.argsort(-decays)
    return buffered(np.round(decays[order], DIGITS), np.round(scales[order], DIGITS), n)


def buffered_error(workload: Workload, decays: Floats, scales: Floats) -> float:
    """The mean over the steps of the variance in the model, for a diagonal of 1."""
    response = np.zeros(workload.steps)
    _response(decays, scales, workload.momentum, 1 - workload.decay, response)
    if not np.abs(response).max() < math.sqrt(LARGEST_ERROR):
        return math.inf
    return float(np.arange(workload.steps, 0, -1.0) @ response**2) / workload.steps


@compiled
def _response(
    decays: Floats, scales: Floats, momentum: float, kept: float, response: Floats
) -> None:
    """The first column of A C^-1."""
    memory = np.zeros(len(decays))
    moment = 0.0
    model = 0.0
    for step in range(len(response)):
        noise = 1.0 if step == 0 else 0.0
        for i in range(len(decays)):
            noise -= scales[i] * memory[i]
        for i in range(len(decays)):
            memory[i] = decays[i] * memory[i] + noise
        moment = momentum * moment + noise
        model = kept * model + moment
        response[step] = model
