"""The privacy cost of one training step, as a `dp_accounting` event: one function per theorem.

| symbol | name | meaning |
|---|---|---|
| sigma | `noise_multiplier` | noise standard deviation over the clip norm of one update |
| q | `user_sampling_prob` | a user's chance to take part in a step |
| p | `record_sampling_prob` | a record's chance to take part in a step |
| G | `group_size` | the most records of one user |
| k | `participations` | the most steps one user takes part in, b steps apart |
| b | `bands` | bands of the matrix that correlates the noise |
| T | `steps` | number of steps |

The adjacency is not part of an event. The accountant takes it as a separate argument. `renyi` (RDP,
and the moments accountant of 2018) and `group` (black-box group privacy) price the same events in
other ways. `filter`, `quantile` and `best_of_runs` make the events of other mechanisms.

Once an event is released, its meaning never changes: a new theorem becomes a new function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import attrs
from dp_accounting import dp_event

from userdp.accounting.own_events import (
    BallsInBinsBandedDpEvent,
    DiscreteGaussianDpEvent,
    EpsilonDeltaDpEvent,
    RandomAllocationGaussianDpEvent,
    WithoutReplacementGaussianDpEvent,
)
from userdp.accounting.special import binomial_pmf
from userdp.errors import InputError, LedgerError

DpEvent = dp_event.DpEvent


def poisson_users_gaussian(*, user_sampling_prob: float, noise_multiplier: float) -> DpEvent:
    """One step of user-level sampling: the Poisson-sampled Gaussian mechanism.

    The user's clipped update is present with probability q. So at worst the step's outputs on
    neighbours are N(0, sigma^2) and N(Bernoulli(q), sigma^2).
    Reference: Charles et al. 2024, Thm. 2 and Eq. 3; McMahan et al. 2018, Thm. 1.
    """
    return dp_event.PoissonSampledDpEvent(
        user_sampling_prob, dp_event.GaussianDpEvent(noise_multiplier)
    )


def poisson_records_gaussian(
    *, record_sampling_prob: float, group_size: int, noise_multiplier: float
) -> DpEvent:
    """One step of example-level sampling: a Mixture of Gaussians with Binomial(G, p) means.

    The user has at most G records, and a coin is tossed for each. So at worst the user moves the
    sum by Binomial(G, p) clip norms.
    Reference: Charles et al. 2024, Thm. 3 and Eq. 2.

    With one record a user this is exactly Thm. 2, whose event `dp_accounting` evaluates ten times
    faster.

    >>> poisson_records_gaussian(record_sampling_prob=0.1, group_size=1, noise_multiplier=2.0)
    PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=2.0))
    """
    if group_size == 1:
        return poisson_users_gaussian(
            user_sampling_prob=record_sampling_prob, noise_multiplier=noise_multiplier
        )
    means, probs = _binomial(group_size, record_sampling_prob)
    return dp_event.MixtureOfGaussiansDpEvent(noise_multiplier, list(means), list(probs))


@lru_cache(maxsize=8)
def _binomial(trials: int, probability: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values that Binomial(`trials`, `probability`) may have, and their probabilities.

    A search for noise asks for the same ones at every noise multiplier.
    """
    # A probability that underflows to zero is left out: the mixture never has that mean.
    support = [
        (float(count), prob)
        for count, prob in enumerate(binomial_pmf(trials, probability))
        if prob > 0
    ]
    total = sum(prob for _, prob in support)
    if not abs(total - 1) < 1e-6:
        # Half a record, for one: a mixture of nothing would cost nothing.
        raise InputError(f"{trials} records at rate {probability} have no distribution.")
    return tuple(count for count, _ in support), tuple(prob / total for _, prob in support)


def poisson_users_discrete(*, user_sampling_prob: float, noise_multiplier: float) -> DpEvent:
    """One step of user-level sampling with discrete Gaussian noise on an integer grid.

    At whole orders, the Renyi divergences are at most those of `poisson_users_gaussian`.
    Reference: docs/accounting.md; Canonne, Kamath and Steinke 2020; Mironov et al. 2019.
    """
    return dp_event.PoissonSampledDpEvent(
        user_sampling_prob, DiscreteGaussianDpEvent(noise_multiplier)
    )


def capped_poisson_users_gaussian(
    *, user_sampling_prob: float, cap: int, num_users: int, noise_multiplier: float
) -> DpEvent:
    """One step of user-level sampling where a cohort above `cap` is cut to `cap` users at random.

    A user who pushes the cohort above the cap also pushes another user out. This costs a little
    more than plain Poisson sampling.
    Reference: Ganesh 2025 (arXiv 2508.15089), as implemented in `dp_accounting`.

    >>> capped_poisson_users_gaussian(
    ...     user_sampling_prob=0.01, cap=64, num_users=5000, noise_multiplier=1.0
    ... ).truncated_batch_size
    64
    """
    return dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=num_users,
        sampling_probability=user_sampling_prob,
        truncated_batch_size=cap,
        noise_multiplier=noise_multiplier,
    )


def min_separated_gaussian(*, participations: int, noise_multiplier: float) -> DpEvent:
    """A whole run of matrix-factorisation noise, a user's steps at least b apart: one Gaussian.

    The strategy matrix has b bands and columns of norm 1. A user takes part in at most k steps, and
    every two of them are at least b apart. Then the user's contributions are orthogonal, and the
    run is a Gaussian mechanism with multiplier sigma / sqrt(k). Nothing is sampled, so nothing is
    amplified.
    Reference: Ganesh et al. 2025, Sec. 3; Choquette-Choo et al. 2024.

    >>> min_separated_gaussian(participations=4, noise_multiplier=4.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    return dp_event.GaussianDpEvent(noise_multiplier / participations**0.5)


def correlated_gaussian(*, sensitivity: float, noise_multiplier: float) -> DpEvent:
    """A whole run of matrix-factorisation noise whose strategy a user moves by `sensitivity`.

    In clip norms, over all patterns in which the user may take part (`noise.strategies`). The noise
    is Gaussian and added from the first step to the last, so it covers contributions that depend on
    what was released before.
    Reference: Denisov et al. 2022, Thm. 2.1.

    >>> correlated_gaussian(sensitivity=2.0, noise_multiplier=4.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    return dp_event.GaussianDpEvent(noise_multiplier / sensitivity)


def cyclic_poisson_banded(
    *, user_sampling_prob: float, steps: int, bands: int, noise_multiplier: float
) -> DpEvent:
    """A whole run of b-banded noise where step t samples from part t mod b of the users.

    A user can take part only every b steps, so ceil(T / b) times. Each time it is sampled with
    probability q among the users of its part, so q is b times what it would be over all users. The
    noise of those steps is independent.
    Reference: Choquette-Choo et al. 2024, Thm. 4; Ganesh et al. 2025, App. A.

    >>> cyclic_poisson_banded(
    ...     user_sampling_prob=0.08, steps=100, bands=8, noise_multiplier=1.0
    ... ).count
    13
    """
    return repeated(
        poisson_users_gaussian(
            user_sampling_prob=user_sampling_prob, noise_multiplier=noise_multiplier
        ),
        -(-steps // bands),
    )


def random_allocation_gaussian(
    *, steps: int, participations: int, noise_multiplier: float
) -> DpEvent:
    """A whole run in which a user takes part in exactly k of T steps, a random subset.

    A random subset can be drawn in two stages: divide the steps into k blocks at random, then draw
    one step of each block. An attacker who is told the blocks sees k independent runs, in each of
    which the user takes part in one of about T / k steps. `allocation` has the proof.
    Reference: Feldman and Shenfeld 2025 (arXiv 2502.08202).

    >>> random_allocation_gaussian(steps=100, participations=10, noise_multiplier=1.0).steps
    100
    """
    return RandomAllocationGaussianDpEvent(steps, participations, noise_multiplier)


def balls_in_bins_gaussian(*, bins: int, rounds: int, noise_multiplier: float) -> DpEvent:
    """A whole run in which a user has one bin for good, and every round uses each bin once.

    A user is in the same place of all E rounds. The sum of the outputs over rounds is all that an
    attacker needs: it is a Gaussian that one place moves by E, with noise sqrt(E) sigma. So the run
    is an allocation to one of `bins` steps, with the noise sigma / sqrt(E). A run that ends within
    a round is priced as if it had finished it.
    Reference: Chua et al. 2025 (arXiv 2412.16802); `allocation` has the proof.

    >>> balls_in_bins_gaussian(bins=100, rounds=4, noise_multiplier=2.0).noise_multiplier
    1.0
    """
    if rounds < 1:
        raise InputError(f"rounds={rounds}: a run has at least one round.")
    return random_allocation_gaussian(
        steps=bins, participations=1, noise_multiplier=noise_multiplier / rounds**0.5
    )


def balls_in_bins_banded(*, bins: int, gram: Sequence[float], noise_multiplier: float) -> DpEvent:
    """A whole run of correlated noise in which a user has one bin for good.

    `gram` says how the noise is correlated (`correlated_bins.gram_of` makes it from C). Alone, the
    price is the smaller of a proven bound and a simulated one. Together with other mechanisms it is
    the proven one.
    Reference: Choquette-Choo et al. 2025 (arXiv 2410.06266); `correlated_bins` has the proof.

    >>> balls_in_bins_banded(bins=8, gram=[1.0, 0.5], noise_multiplier=2.0).gram
    (1.0, 0.5)
    """
    return BallsInBinsBandedDpEvent(bins, gram, noise_multiplier)


def balanced_iteration_gaussian(
    *, round_length: int, rounds: int, noise_multiplier: float
) -> DpEvent:
    """A whole run in which a user is in one place of every round, drawn afresh each round.

    >>> balanced_iteration_gaussian(round_length=100, rounds=4, noise_multiplier=2.0).count
    4
    """
    if rounds < 1:
        raise InputError(f"rounds={rounds}: a run has at least one round.")
    one = random_allocation_gaussian(
        steps=round_length, participations=1, noise_multiplier=noise_multiplier
    )
    return repeated(one, rounds)


def fixed_size_users_gaussian(
    *, num_users: int, cohort_size: int, noise_multiplier: float
) -> DpEvent:
    """One step whose cohort is exactly `cohort_size` users, drawn without replacement, by RDP.

    RDP prices it, under replace adjacency only (`renyi.evaluation`). Adding a user changes
    everybody's chances, and `dp_accounting` has no other rule. `without_replacement_gaussian` is
    cheaper, and has a price under add-remove and zero-out as well.
    Reference: Wang, Balle and Kasiviswanathan 2019, Thm. 27.
    """
    return dp_event.SampledWithoutReplacementDpEvent(
        num_users, cohort_size, dp_event.GaussianDpEvent(noise_multiplier)
    )


def without_replacement_gaussian(
    *, num_users: int, cohort_size: int, noise_multiplier: float
) -> DpEvent:
    """One step that takes exactly m of N places, a uniformly random set.

    The number of places is fixed. Under add-remove a place stays empty if nobody has it, and gives
    nothing when it is drawn. `without_replacement` has the worst pairs and the proof.
    Reference: Zhu, Dong and Wang 2022, Thm. 11; Balle, Barthe and Gaboardi 2018.

    >>> without_replacement_gaussian(num_users=100, cohort_size=8, noise_multiplier=1.0).cohort_size
    8
    """
    return WithoutReplacementGaussianDpEvent(num_users, cohort_size, noise_multiplier)


def above_threshold(*, epsilon: float, delta: float) -> EpsilonDeltaDpEvent:
    """AboveThreshold over a whole run, up to its first halt, however many steps it lets pass.

    It is epsilon-DP. With probability `delta` it lets a step pass that it should not, and then
    nothing bounds what that step tells.
    Reference: Dwork and Roth 2014, Alg. 1 and Thm. 3.23.
    """
    return EpsilonDeltaDpEvent(epsilon, delta)


def above_count(*, delta: float) -> EpsilonDeltaDpEvent:
    """Only what many users have is released: with probability `delta` something of one user alone.

    Reference: `heavy_hitters`, with the proof; Korolova et al. 2009.
    """
    return EpsilonDeltaDpEvent(0.0, delta)


def combined(parts: Sequence[DpEvent]) -> DpEvent:
    """Several mechanisms on the same users, such as planning, tuning and training, as one event.

    >>> combined([dp_event.GaussianDpEvent(2.0)])
    GaussianDpEvent(noise_multiplier=2.0)
    """
    return parts[0] if len(parts) == 1 else dp_event.ComposedDpEvent(list(parts))


def repeated(step_event: DpEvent, count: int) -> DpEvent:
    """A step that is repeated `count` times, adaptively."""
    return dp_event.SelfComposedDpEvent(step_event, count)


# The events that a ledger may hold. The list is closed: a ledger names a type and never loads one.
_KNOWN: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        BallsInBinsBandedDpEvent,
        DiscreteGaussianDpEvent,
        EpsilonDeltaDpEvent,
        RandomAllocationGaussianDpEvent,
        WithoutReplacementGaussianDpEvent,
        dp_event.ComposedDpEvent,
        dp_event.GaussianDpEvent,
        dp_event.LaplaceDpEvent,
        dp_event.MixtureOfGaussiansDpEvent,
        dp_event.NonPrivateDpEvent,
        dp_event.NoOpDpEvent,
        dp_event.PoissonSampledDpEvent,
        dp_event.RepeatAndSelectDpEvent,
        dp_event.SampledWithoutReplacementDpEvent,
        dp_event.SelfComposedDpEvent,
        dp_event.TruncatedSubsampledGaussianDpEvent,
    )
}


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as plain data, for the ledger.

    >>> to_json(dp_event.GaussianDpEvent(2.0))
    {'type': 'GaussianDpEvent', 'noise_multiplier': 2.0}
    """
    fields: dict[str, Any] = attrs.asdict(event, recurse=False)
    return {"type": type(event).__name__} | {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return to_json(value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in cast("list[Any]", value)]
    # JSON has no infinity, which is the shape of a Poisson number of runs.
    return "inf" if value == math.inf else value


def from_json(data: dict[str, Any]) -> DpEvent:
    """The event that `to_json` wrote.

    >>> from_json({"type": "GaussianDpEvent", "noise_multiplier": 2.0})
    GaussianDpEvent(noise_multiplier=2.0)
    """
    fields = dict(data)
    name = fields.pop("type", None)
    if name not in _KNOWN:
        raise LedgerError(f"event type {name!r} is not one this version can price.")
    return _KNOWN[name](**{key: _event(value) for key, value in fields.items()})


def _event(value: Any) -> Any:
    if isinstance(value, dict):
        return from_json(cast("dict[str, Any]", value))
    if isinstance(value, list):
        return [_event(entry) for entry in cast("list[Any]", value)]
    return math.inf if value == "inf" else value
