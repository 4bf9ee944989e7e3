"""Renyi divergences at whole orders: the price of discrete Gaussian noise.

Gaussian noise on integers, restricted to integers, has at whole orders exactly the moments of the
continuous one (proof in docs/accounting.md). Nothing is known about the orders in between, and no
privacy loss distribution dominates it in every direction. So it is priced at whole orders only:

    E_Q[(P/Q)^a] = 1 + sum_{k=2}^a C(a, k) q^k (1-q)^(a-k) (exp(k (k-1) / 2 sigma^2) - 1),

with q = `rate`, sigma = `noise` and a the order. All terms are positive, so the sum has no
cancellation: it is right to 1e-9 and is raised by more. Gaussian steps have the same moments and
can be priced along. The orders of independent steps add up, also if a step depends on those before
it (Mironov 2017, Prop. 1). Epsilon follows by Canonne, Kamath and Steinke 2020, Prop. 12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event

from userdp import __version__
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.accounting.own_events import DiscreteGaussianDpEvent
from userdp.accounting.special import Floats, gammaln
from userdp.units import Adjacency

# Small orders count for large epsilons, where steps of one matter; large ones for small epsilons.
_LARGEST = 2**14
_ORDERS: tuple[int, ...] = tuple(
    sorted({*range(2, 129), *(round(128 * 1.06**i) for i in range(83)), _LARGEST})
)
# The moments are raised by this much (relative), far above their rounding errors.
_RAISED = 1e-7

# The proofs compare a user who may be there with nobody.
_ADJACENCIES = (Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT)


@dataclass(frozen=True, kw_only=True)
class _Step:
    rate: float
    noise: float
    count: int


def supports(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether the event has discrete Gaussian noise, and nothing without moments at whole orders.

    >>> supports(DiscreteGaussianDpEvent(1.0), Adjacency.ADD_REMOVE)
    True
    >>> supports(DiscreteGaussianDpEvent(1.0), Adjacency.REPLACE)
    False
    """
    return adjacency in _ADJACENCIES and _has_discrete(event) and _steps(event, 1) is not None


def evaluate(event: DpEvent, *, delta: float) -> Evaluation:
    """The least epsilon over the orders; an upper bound."""
    best = min(
        moment + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, moment in zip(_ORDERS, _divergences(event), strict=True)
    )
    return Evaluation(
        epsilon=max(0.0, best),
        certified_by=f"userdp {__version__} RDP at whole orders, as discrete noise needs; an upper "
        "bound, looser than PLD",
        error_bound=math.inf,
    )


def delta_at(event: DpEvent, epsilon: float) -> float:
    """The least delta over the orders that goes with `epsilon`; an upper bound."""
    least = min(
        (order - 1) * (moment - epsilon + math.log1p(-1 / order)) - math.log(order)
        for order, moment in zip(_ORDERS, _divergences(event), strict=True)
    )
    return math.exp(min(least, 0.0))


def _divergences(event: DpEvent) -> list[float]:
    """The Renyi divergence of all steps together at each order."""
    steps = _steps(event, 1)
    assert steps is not None
    total = np.zeros(len(_ORDERS))
    for step in steps:
        total += step.count * np.array(_of_one(step.rate, step.noise))
    return [float(value) for value in total]


@lru_cache(maxsize=64)
def _of_one(rate: float, noise: float) -> tuple[float, ...]:
    return tuple(_divergence(order, rate, noise) for order in _ORDERS)


def _divergence(order: int, rate: float, noise: float) -> float:
    """An upper bound on the Renyi divergence of one step, in the worse direction."""
    if noise <= 0:
        return math.inf
    if rate >= 1:
        return order / (2 * noise * noise) * (1 + _RAISED)
    k: Floats = np.arange(2, order + 1, dtype=np.float64)
    power = k * (k - 1) / (2 * noise * noise)
    # log(e^x - 1), which is x up to rounding where e^x is large.
    with np.errstate(over="ignore"):
        log_rise = np.where(power > 30, power, np.log(np.expm1(np.minimum(power, 30))))
    terms = (
        gammaln(order + 1)
        - gammaln(k + 1)
        - gammaln(order + 1 - k)
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
        + log_rise
    )
    peak = float(terms.max())
    log_sum = peak + math.log(float(np.exp(terms - peak).sum()))
    return float(np.logaddexp(0.0, log_sum)) / (order - 1) * (1 + _RAISED)


def _steps(event: DpEvent, count: int) -> list[_Step] | None:
    """The event as steps of a rate and a noise; None if it has anything else."""
    match event:
        case dp_event.NoOpDpEvent():
            return []
        case dp_event.SelfComposedDpEvent():
            return _steps(event.event, count * event.count) if event.count else []
        case dp_event.ComposedDpEvent():
            parts = [_steps(part, count) for part in event.events]
            if any(part is None for part in parts):
                return None
            return [step for part in parts if part is not None for step in part]
        case dp_event.PoissonSampledDpEvent():
            rate, inner = event.sampling_probability, event.event
            if rate <= 0:
                return []
            if isinstance(inner, DiscreteGaussianDpEvent | dp_event.GaussianDpEvent):
                return [_Step(rate=rate, noise=inner.noise_multiplier, count=count)]
            return None
        case DiscreteGaussianDpEvent() | dp_event.GaussianDpEvent():
            return [_Step(rate=1.0, noise=event.noise_multiplier, count=count)]
        case _:
            return None


def _has_discrete(event: DpEvent) -> bool:
    match event:
        case dp_event.ComposedDpEvent():
            return any(_has_discrete(part) for part in event.events)
        case dp_event.SelfComposedDpEvent() | dp_event.PoissonSampledDpEvent():
            return _has_discrete(event.event)
        case _:
            return isinstance(event, DiscreteGaussianDpEvent)
