"""Mechanisms that only RDP prices, together with others that have a privacy loss distribution.

Tuning by random stopping (`best_of_runs.randomly_stopped`) has a bound on its Renyi divergences
(Papernot and Steinke 2022), and no privacy loss distribution (PLD). Together with training it is
priced in two ways, and the smaller bound is stated. The choice does not look at data, so it is
sound. The two ways are:

  * RDP for everything. The divergences add up under adaptive composition (Mironov 2017, Prop. 1).
  * RDP for the parts that nothing else prices, (e1, delta/2), and PLD for all the others,
    (e2, delta/2). By basic composition both together are (e1 + e2, delta), in whatever order the
    parts were interleaved (Dwork and Roth 2014, Thm. B.1; Vadhan and Wang 2021 for the
    interleaving).

The first way is tighter where both kinds cost about the same and the run has an RDP rule. The
second is tighter where training dominates. It is also the way for sampled records, which the
library's RDP cannot price.

Discrete Gaussian noise has moments at whole orders only (`whole_orders`). It takes the place of the
library's RDP in both ways.
"""

from __future__ import annotations

import math

from dp_accounting import dp_event

from userdp.accounting import certificate, events, renyi, whole_orders
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.errors import UnaccountedPlanError
from userdp.units import Adjacency

# In the second way, the parts that RDP prices get this share of delta.
RDP_SHARE = 0.5


def can_price(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether `evaluate` has a rule for the event. Nothing is evaluated.

    >>> run = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(2.0))
    >>> can_price(dp_event.RepeatAndSelectDpEvent(run, 10.0, 1.0), Adjacency.ADD_REMOVE)
    True
    """
    return _has_moments(event, adjacency) or _two_kinds(event, adjacency) is not None


def evaluate(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """The smaller of the two bounds, and how it was found."""
    if not can_price(event, adjacency):
        raise UnaccountedPlanError(
            f"{certificate.library()} and {renyi.library()} cannot price "
            f"{', '.join(sorted({type(part).__name__ for part in _parts(event)}))} under "
            f"{adjacency.value} adjacency."
        )
    found: list[Evaluation] = []
    if whole_orders.supports(event, adjacency):
        found.append(whole_orders.evaluate(event, delta=delta))
    if renyi.supports(event, adjacency):
        found.append(
            Evaluation(
                epsilon=max(0.0, float(renyi.composed(event, adjacency).get_epsilon(delta))),
                certified_by=f"{renyi.library()} for everything: a part has no privacy loss "
                "distribution",
                error_bound=math.inf,
            )
        )
    kinds = _two_kinds(event, adjacency)
    if kinds is not None:
        only_rdp, others = kinds
        first = _by_moments(only_rdp, delta=RDP_SHARE * delta, adjacency=adjacency)
        second = certificate.evaluate(others, delta=(1 - RDP_SHARE) * delta, adjacency=adjacency)
        found.append(
            Evaluation(
                epsilon=first.epsilon + second.epsilon,
                certified_by=f"basic composition, half of delta each: {first.certified_by} "
                f"for what has no privacy loss distribution; {second.certified_by}",
                error_bound=math.inf,
            )
        )
    return min(found, key=lambda one: one.epsilon)


def deltas(
    event: DpEvent, *, epsilons: list[float], delta: float, adjacency: Adjacency
) -> list[float]:
    """An upper bound on the delta that belongs to each epsilon, by the same two ways.

    In the second way, the parts that only RDP prices keep the epsilon that they have at half of
    `delta`. The others give the shape of the curve.
    """
    bounds = [1.0] * len(epsilons)
    if whole_orders.supports(event, adjacency):
        bounds = [whole_orders.delta_at(event, epsilon) for epsilon in epsilons]
    if renyi.supports(event, adjacency):
        whole = renyi.composed(event, adjacency)
        bounds = [min(1.0, float(whole.get_delta(epsilon))) for epsilon in epsilons]
    kinds = _two_kinds(event, adjacency)
    if kinds is not None:
        only_rdp, others = kinds
        fixed = _by_moments(only_rdp, delta=RDP_SHARE * delta, adjacency=adjacency).epsilon
        rest = certificate.deltas(
            others, epsilons=[max(0.0, one - fixed) for one in epsilons], adjacency=adjacency
        )
        for place, (epsilon, one) in enumerate(zip(epsilons, rest, strict=True)):
            if epsilon >= fixed:
                bounds[place] = min(bounds[place], RDP_SHARE * delta + one)
    return bounds


def _has_moments(event: DpEvent, adjacency: Adjacency) -> bool:
    return whole_orders.supports(event, adjacency) or renyi.supports(event, adjacency)


def _by_moments(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    if whole_orders.supports(event, adjacency):
        return whole_orders.evaluate(event, delta=delta)
    return renyi.evaluation(event, delta=delta, adjacency=adjacency)


def _two_kinds(event: DpEvent, adjacency: Adjacency) -> tuple[DpEvent, DpEvent] | None:
    """The parts that only RDP prices, and those that PLD prices; None unless there are both."""
    parts = _parts(event)
    has_pld = [certificate.can_price(part, adjacency) for part in parts]
    if all(has_pld) or not any(has_pld):
        return None
    only_rdp = events.combined([part for part, has in zip(parts, has_pld, strict=True) if not has])
    others = events.combined([part for part, has in zip(parts, has_pld, strict=True) if has])
    if _has_moments(only_rdp, adjacency) and certificate.can_price(others, adjacency):
        return only_rdp, others
    return None


def _parts(event: DpEvent) -> list[DpEvent]:
    if isinstance(event, dp_event.ComposedDpEvent):
        return [part for one in event.events for part in _parts(one)]
    return [event]
