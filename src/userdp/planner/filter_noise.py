"""Whether the filter of Asi & Liu pays: the noise it leaves on the mean gradient, compared.

Reference: Chua et al. 2024, Sec. 5.3, Fig. 3 and 7 (effective noise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from userdp.accounting.filter import filter_plan
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.updates.filter import Filter


@dataclass(frozen=True, kw_only=True)
class EffectiveNoise:
    """Standard deviations of the noise on each coordinate of the mean, in clip norms.

    `filtered` is what is trained here, `paper` what Chua et al. 2024, Alg. 3 print, and `user_wise`
    the same run without a filter. Each is for the same epsilon and delta.
    """

    concentration: float
    filtered: float
    paper: float
    user_wise: float

    @property
    def break_even(self) -> float:
        """tau over the clip norm below which the filter leaves less noise."""
        return self.concentration * self.user_wise / self.filtered

    @property
    def paper_break_even(self) -> float:
        """The same, by the paper's constants."""
        return self.concentration * self.user_wise / self.paper


def whether_it_pays(plan: Plan) -> str:
    """A sentence on a plan's filter, from public numbers alone; empty for other plans.

    The noise with the filter is about in proportion to the concentration, so one number says about
    where it begins to pay.
    """
    test = plan.halting_test
    epsilon = math.inf if test is None else plan.epsilon()
    if test is None or not 0 < epsilon < math.inf:
        return ""
    try:
        without = Plan.sample_users(
            num_users=plan.num_users,
            expected_cohort_size=plan.num_users,
            group_size=1,
            steps=plan.steps,
            clip_norm=1.0,
            epsilon=epsilon,
            delta=plan.delta,
            adjacency=plan.adjacency,
        )
    except InputError:
        # Nothing to compare with. The advice must not end a run that has a price.
        return ""
    filtered = plan.noise_stddev / plan.divisor / plan.clip.bound
    even = test.concentration * (without.noise_stddev / without.divisor) / filtered
    told = (
        f"the filter leaves less noise than the same run without it below a concentration of "
        f"about {even:.2g}"
    )
    if test.concentration < even:
        return f"{told}; yours is {test.concentration:g}"
    return (
        f"{told}; yours is {test.concentration:g}, so it does not pay: use update = 'gradient', or "
        "a lower concentration if gradients are as close as that"
    )


def effective_noise(
    *,
    num_users: int,
    steps: int,
    epsilon: float,
    delta: float,
    concentration: float = 0.1,
    expected_cohort_size: float | None = None,
) -> EffectiveNoise:
    """The noise on the mean with and without the filter, which gets half of epsilon and delta.

    Without it, cohorts may be sampled: `expected_cohort_size` users, by default all.

    >>> found = effective_noise(num_users=3000, steps=100, epsilon=3.0, delta=1e-5)
    >>> found.filtered > found.user_wise, round(found.break_even, 3)
    (True, 0.029)
    """
    rule = Filter(
        concentration=concentration, threshold_epsilon=epsilon / 2, threshold_delta=delta / 2
    )

    def planned(update: Filter | None, cohort_size: float) -> float:
        plan = Plan.sample_users(
            num_users=num_users,
            expected_cohort_size=cohort_size,
            group_size=1,
            steps=steps,
            clip_norm=1.0,
            epsilon=epsilon,
            delta=delta,
            update=update,
        )
        return plan.noise_stddev / plan.divisor

    paper = filter_plan(
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        num_users=num_users,
        concentration=concentration,
    )
    return EffectiveNoise(
        concentration=concentration,
        filtered=planned(rule, num_users),
        paper=paper.noise_stddev,
        user_wise=planned(None, expected_cohort_size or num_users),
    )
