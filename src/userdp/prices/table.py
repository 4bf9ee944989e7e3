"""The table of prices: what the first t steps of a sampler and a noise cost under an adjacency.

The table is keyed by all three. The adjacency matters, because a sampler that draws one update of a
user where each record has one owner can draw several where owners share records. What is not in the
table cannot be planned.

An entry prices the first t steps as a whole. For independent steps that is the event of one step, t
times (`each_step`). Some runs have no price for a single step: noise may be correlated over steps,
or a sampler may spread a user's records over the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from userdp.accounting import accountant, events
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Banded, Discrete, Gaussian, Noise
from userdp.prices import correlated, independent
from userdp.prices.earlier import Earlier, by_people
from userdp.prices.paid import Paid, all_events
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
    Sampler,
    Shuffled,
    ShuffledRecords,
    WithoutReplacement,
)
from userdp.statement import epsilon_text
from userdp.units import Adjacency
from userdp.updates.halting import HaltingTest

# A price maps a sampler, a noise and t to the event of the first t steps.
Price = Callable[[Any, Any, int], events.DpEvent]


def each_step(step: Callable[[Any, Any], events.DpEvent]) -> Price:
    """The price of independent steps, where `step` gives the event of one step."""
    return lambda sampler, noise, steps: events.repeated(step(sampler, noise), steps)


# Under fixed-graph adjacency each row has a coin of its own, so a user who owns k rows can enter a
# step k times. So there is no rule for sampling "users" there (Ganesh et al. 2025, Def. 2.1).
ONE_OWNER = (Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE)
# For proofs that compare a user with nobody, and not with another user.
PRESENT_OR_NOT = (Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT)
FIXED_GRAPH = (Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.FIXED_GRAPH_REPLACE)

Table = dict[tuple[type[Sampler], type[Noise], Adjacency], Price]
_PRICES: Table = {}


def set_price(
    sampler: type[Sampler], noise: type[Noise], adjacencies: Sequence[Adjacency], price: Price
) -> None:
    """Add a line to the table. A price that is already there cannot be changed."""
    for adjacency in adjacencies:
        if _PRICES.get((sampler, noise, adjacency), price) is not price:
            raise UnaccountedPlanError(
                f"{sampler.__name__} + {noise.__name__} has a price under {adjacency.value} "
                "adjacency already."
            )
    _PRICES.update({(sampler, noise, adjacency): price for adjacency in adjacencies})


set_price(PoissonUsers, Gaussian, ONE_OWNER, each_step(independent.step_of_users))
set_price(PoissonRecords, Gaussian, tuple(Adjacency), each_step(independent.step_of_records))
set_price(CappedPoissonUsers, Gaussian, ONE_OWNER, each_step(independent.step_of_capped_users))
set_price(WithoutReplacement, Gaussian, ONE_OWNER, each_step(independent.step_without_replacement))
set_price(CyclicPoissonUsers, Gaussian, ONE_OWNER, independent.of_users_in_turn)
set_price(CyclicPoissonRecords, Gaussian, tuple(Adjacency), independent.of_records_in_turn)
# Which record is in which batch depends on who owns what, so that must be public.
set_price(MinSeparated, Gaussian, FIXED_GRAPH, independent.of_fixed_order)
set_price(BallsInBins, Gaussian, PRESENT_OR_NOT, independent.of_bins)
set_price(BalancedIteration, Gaussian, PRESENT_OR_NOT, independent.of_rounds)
set_price(Allocation, Gaussian, PRESENT_OR_NOT, independent.of_allocation)
set_price(PoissonUsers, Banded, ONE_OWNER, correlated.of_sampled_users)
set_price(PoissonRecords, Banded, tuple(Adjacency), correlated.of_sampled_records)
set_price(CyclicPoissonUsers, Banded, ONE_OWNER, correlated.of_users_in_turn)
# Where records have several owners, a user's records may be in several parts, with too few steps
# between their turns.
set_price(CyclicPoissonRecords, Banded, ONE_OWNER, correlated.of_records_in_turn)
set_price(BallsInBins, Banded, PRESENT_OR_NOT, correlated.of_bins)
set_price(MinSeparated, Banded, FIXED_GRAPH, correlated.of_fixed_order)
# These two can be planned with a mark alone (`marks.AsIfPoisson`), which prices another sampler.
set_price(Shuffled, Gaussian, ONE_OWNER, independent.no_price)
set_price(ShuffledRecords, Gaussian, ONE_OWNER, independent.no_price)
# For several records of a user there is no proof.
set_price(PoissonUsers, Discrete, PRESENT_OR_NOT, each_step(independent.step_of_users_discrete))

# With a halting test a step's noise is scaled to how far one user moves the filtered mean, and the
# test itself is paid for once (docs/accounting.md). That bound holds for a user who is exchanged,
# too, but the events of replace would count it twice.
_TESTED: Table = {
    (PoissonUsers, Gaussian, adjacency): each_step(independent.step_of_everybody)
    for adjacency in PRESENT_OR_NOT
}


def check_test(test: HaltingTest, delta: float, *, is_usual: bool) -> None:
    """Refuse a test that proves nothing, or that has no price in its plan.

    A plan is usual if its clip norm is finite and fixed, and if it has no mark.
    """
    test.check()
    if not test.delta < delta:
        raise InputError(
            f"threshold_delta={test.delta:g} leaves nothing of delta={delta:g} for the steps: "
            "lower it."
        )
    if not is_usual:
        raise UnaccountedPlanError(
            "a filter takes a fixed, finite clip norm, and neither record_level nor hypothetical "
            "numbers: it has no price otherwise. Use another update."
        )


def event_of(
    sampler: Sampler,
    noise: Noise,
    adjacency: Adjacency,
    *,
    steps: int,
    test: HaltingTest | None = None,
) -> events.DpEvent:
    """The cost of the first `steps` steps of these parts; parts without a price are refused.

    >>> event_of(PoissonUsers(user_sampling_prob=0.1, group_size=4),
    ...          Gaussian(noise_multiplier=2.0), Adjacency.ADD_REMOVE, steps=9).count
    9
    """
    taken = price_of(sampler, noise, adjacency, test)(sampler, noise, steps)
    if test is None:
        return taken
    return events.combined([taken, events.above_threshold(epsilon=test.epsilon, delta=test.delta)])


def price_of(
    sampler: object, noise: object, adjacency: Adjacency, test: HaltingTest | None = None
) -> Price:
    """The table's entry for these parts."""
    table = _PRICES if test is None else _TESTED
    price = table.get((type(sampler), type(noise), adjacency))  # type: ignore[arg-type]
    if price is None:
        pairs = [(s, n) for s, n, a in table if a is adjacency]
        noises = sorted({n.name for s, n in pairs if s is type(sampler)})
        samplers = sorted({f"{s.name} of {s.unit}s" for s, n in pairs if n is type(noise)})
        raise UnaccountedPlanError(
            f"sampler {_called(sampler)} with noise {_called(noise)} has no accounting rule here "
            f"under {adjacency.value} adjacency: what is drawn would not be what is priced. This "
            f"sampler has a price with: {', '.join(noises) or 'no noise'}. This noise has one "
            f"with: {', '.join(samplers) or 'no sampler'}."
        )
    return price


def _called(part: object) -> str:
    """A part's name in a configuration, and its class: a caller's part may share the name."""
    kind = type(part)
    return f"'{getattr(kind, 'name', '')}' ({kind.__name__})"


def is_priced(sampler: type[Sampler], noise: type[Noise], adjacency: Adjacency) -> bool:
    """Whether the table has an entry for these parts."""
    return (sampler, noise, adjacency) in _PRICES


def calibrate(
    sampler: Sampler,
    noise: Noise | None = None,
    *,
    steps: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    paid: Sequence[Paid] = (),
    earlier: Sequence[Earlier] = (),
    test: HaltingTest | None = None,
) -> float:
    """The least noise multiplier at which everything together costs at most `epsilon`.

    Everything is `steps` steps, what was `paid`, and `earlier` runs on the same people. Only the
    noise of the steps can be chosen, since the rest has been released already. `noise` is Gaussian
    by default, and its own multiplier is ignored.
    """
    kind = noise or Gaussian(noise_multiplier=0.0)
    fixed = [*all_events(paid), *by_people(earlier)[0]]
    if fixed:
        accountant.check_epsilon(epsilon)
        spent = accountant.epsilon(events.combined(fixed), delta=delta, adjacency=adjacency)
        if not spent < epsilon:
            raise InputError(
                f"epsilon={epsilon:g} leaves nothing for the steps: what was paid for or spent "
                f"before costs {epsilon_text(spent)} alone at delta={delta:g}. Use a larger "
                "epsilon."
            )
    return accountant.calibrate(
        lambda noise_multiplier: events.combined(
            [
                *fixed,
                event_of(
                    sampler,
                    replace(kind, noise_multiplier=noise_multiplier),
                    adjacency,
                    steps=steps,
                    test=test,
                ),
            ]
        ),
        target=epsilon,
        delta=delta,
        adjacency=adjacency,
    )
