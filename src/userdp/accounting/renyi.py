"""Older ways to price the same events: RDP, and the moments accountant of 2018.

Both bound epsilon through moments of the privacy loss. So both give a larger epsilon than the
privacy loss distribution (PLD). They are here to reproduce papers. RDP also prices some mechanisms
that nothing else prices: tuning by random stopping, and sampling without replacement.
"""

from __future__ import annotations

import math
from importlib.metadata import version

import attrs
import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from userdp.accounting import certificate, search, steps
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.accounting.special import Floats, gammaln
from userdp.errors import InputError, UnaccountedPlanError
from userdp.units import Adjacency

# Abadi et al. 2016 compute log moments of these integer orders.
MOMENT_ORDERS = range(1, 33)


def library() -> str:
    """The independent RDP accountant, by name and version."""
    return f"dp_accounting {version('dp-accounting')} RDP"


def moments_epsilon(
    *, user_sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Epsilon by the moments accountant: integer moments 1 to 32, classic conversion.

    epsilon = min over L of (T alpha(L) + log(1/delta)) / L, where alpha(L) is the log moment
    log E[(P/Q)^L] under P = N(Bernoulli(q), sigma^2), Q = N(0, sigma^2), the larger direction:

        alpha(L) = log sum_k C(L+1, k) (1-q)^(L+1-k) q^k exp(k (k-1) / (2 sigma^2)).

    q = `user_sampling_prob`, sigma = `noise_multiplier`, T = `steps`.
    Reference: McMahan et al. 2018, Thm. 1 and Tables 1 and 2; Abadi et al. 2016, Thm. 2.

    >>> round(moments_epsilon(
    ...     user_sampling_prob=5000 / 763430, noise_multiplier=1.0, steps=5000, delta=1e-9), 3)
    4.634
    """
    best = math.inf
    for order in MOMENT_ORDERS:
        k: Floats = np.arange(order + 2, dtype=np.float64)
        log_choose = gammaln(order + 2) - gammaln(k + 1) - gammaln(order + 2 - k)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_out = np.where(k == order + 1, 0.0, (order + 1 - k) * np.log1p(-user_sampling_prob))
        log_in = k * math.log(user_sampling_prob)
        terms = log_choose + log_out + log_in + k * (k - 1) / (2 * noise_multiplier**2)
        peak = float(terms.max())
        log_moment = peak + math.log(float(np.exp(terms - peak).sum()))
        best = min(best, (steps * log_moment - math.log(delta)) / order)
    return max(best, 0.0)


def moments_evaluation(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """`moments_epsilon` of an event of Poisson-sampled Gaussian steps."""
    epsilon: float | None = None
    if not adjacency.replaces:
        match steps.of(event, adjacency):
            case []:
                epsilon = 0.0
            case [steps.Mixture() as step] if len(step.shifts[step.shifts > 0]) == 1:
                # A user who is there moves the sum by one known distance, which scales the noise.
                epsilon = moments_epsilon(
                    user_sampling_prob=float(step.weights[step.shifts > 0].sum()),
                    noise_multiplier=step.noise / float(step.shifts.max()),
                    steps=step.count,
                    delta=delta,
                )
            case _:
                pass
    if epsilon is None:
        raise InputError(
            "the moments accountant of 2018 prices Poisson-sampled users under add-remove only: "
            "use --unit user, or --accountant pld."
        )
    return Evaluation(
        epsilon=epsilon,
        certified_by="userdp moments accountant (Abadi et al. 2016, integer moments 1 to 32); "
        "an upper bound, looser than PLD",
        error_bound=math.inf,
    )


def supports(event: DpEvent, adjacency: Adjacency) -> bool:
    """Whether `dp_accounting`'s RDP accountant has a rule for the event.

    >>> best_of_ten = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 10.0, 1.0)
    >>> supports(best_of_ten, Adjacency.ADD_REMOVE)
    True
    """
    return RdpAccountant(neighboring_relation=certificate.relation(adjacency)).supports(event)


def composed(event: DpEvent, adjacency: Adjacency) -> RdpAccountant:
    """`dp_accounting`'s RDP accountant with the event composed, if it `supports` the event."""
    accountant = RdpAccountant(neighboring_relation=certificate.relation(adjacency))
    accountant.compose(_twice_as_far(event) if adjacency.replaces else event)
    return accountant


def _twice_as_far(event: DpEvent) -> DpEvent:
    """The event with half the noise everywhere, which has the price of replacing a user.

    The noise multiplier counts clip norms, and replacing a user moves the sum by two of them.
    `dp_accounting`'s PLD takes that into account. Its RDP does not: there the multiplier counts
    distances between neighbours.
    """
    match event:
        case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent():
            return attrs.evolve(event, noise_multiplier=event.noise_multiplier / 2)
        case dp_event.ComposedDpEvent():
            return dp_event.ComposedDpEvent([_twice_as_far(part) for part in event.events])
        case (
            dp_event.SelfComposedDpEvent()
            | dp_event.RepeatAndSelectDpEvent()
            | dp_event.SampledWithoutReplacementDpEvent()
        ):
            return attrs.evolve(event, event=_twice_as_far(event.event))
        case dp_event.NoOpDpEvent() | dp_event.NonPrivateDpEvent():
            return event
        case _:
            raise UnaccountedPlanError(
                f"RDP cannot price {type(event).__name__} under replace adjacency."
            )


def evaluation(event: DpEvent, *, delta: float, adjacency: Adjacency) -> Evaluation:
    """Epsilon by Renyi differential privacy.

    `dp_accounting`'s RDP accountant prices the event if it has a rule. It refuses mixtures of
    Gaussians. For those, this is the best single moment, integrated numerically.

    >>> step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(2.0))
    >>> event = dp_event.SelfComposedDpEvent(step, 2000)
    >>> round(evaluation(event, delta=1e-6, adjacency=Adjacency.ADD_REMOVE).epsilon, 2)
    1.12
    """
    if supports(event, adjacency):
        return Evaluation(
            epsilon=max(0.0, float(composed(event, adjacency).get_epsilon(delta))),
            certified_by=f"{library()}; looser than PLD",
            error_bound=math.inf,
        )
    mechanism = steps.of(event, adjacency)
    if mechanism is None:
        raise UnaccountedPlanError(
            f"RDP cannot price {type(event).__name__} under {adjacency.value} adjacency."
        )
    return Evaluation(
        epsilon=search.renyi_epsilon(mechanism, delta) * (1 + 1e-6) if mechanism else 0.0,
        certified_by=f"{certificate.own()}, best Renyi moment, integrated; looser than PLD",
        error_bound=math.inf,
    )
