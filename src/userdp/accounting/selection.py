"""Hyper-parameter tuning has a price: every run on the users' data counts, also the discarded ones.

Either all runs are composed (`swept`), or their number is random and only the best is looked at
(`randomly_stopped`), which costs about two to three runs however many there were.
"""

from __future__ import annotations

from dp_accounting import dp_event

from userdp.accounting.events import DpEvent, repeated
from userdp.errors import InputError

# Shapes of the number of runs: Papernot and Steinke 2022, Sec. 3.
GEOMETRIC, LOGARITHMIC, POISSON = 1.0, 0.0, float("inf")


def swept(run: DpEvent, runs: int) -> DpEvent:
    """`runs` runs on the same users, all of whose results were seen.

    >>> swept(dp_event.GaussianDpEvent(2.0), 10).count
    10
    """
    if runs < 1:
        raise InputError(f"runs={runs}: give at least one.")
    return repeated(run, runs)


def randomly_stopped(run: DpEvent, *, mean_runs: float, shape: float = GEOMETRIC) -> DpEvent:
    """The best of a random number of runs, the number drawn from a truncated negative binomial.

    Each run draws its hyper-parameters at random; only the best run's result leaves. `shape` 1 is
    the geometric distribution, 0 the logarithmic, infinity the Poisson. Priced by RDP (`renyi`).
    Reference: Papernot and Steinke 2022 (arXiv 2110.03620), Thm. 2 and 6.

    >>> randomly_stopped(dp_event.GaussianDpEvent(2.0), mean_runs=10.0).mean
    10.0
    """
    if not mean_runs >= 1:
        raise InputError(f"mean_runs={mean_runs}: at least one run in expectation.")
    return dp_event.RepeatAndSelectDpEvent(run, mean_runs, shape)
