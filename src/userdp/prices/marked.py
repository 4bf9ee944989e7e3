"""What a plan costs by its mark: at record level, or with hypothetical numbers (`prices/marks.py`).

A mark prices the same noise with another sampler. Earlier runs are priced by the same mark where
they can be. Nothing here is promised to anybody, or counted in a budget: that is `Plan.event`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from userdp.accounting import events
from userdp.errors import InputError, UnaccountedPlanError
from userdp.prices.composition import dearest, total_events
from userdp.prices.earlier import Earlier
from userdp.prices.marks import AsIfPoisson, Hypothetical, Mark, RecordLevel
from userdp.prices.paid import Paid
from userdp.prices.table import event_of
from userdp.sampling import Sampler
from userdp.units import Adjacency

if TYPE_CHECKING:
    from userdp.plan import Plan


def check_mark(plan: Plan) -> None:
    """Refuse a plan whose parts have no price under its mark, or that needs a mark."""
    mark = plan.mark
    if plan.sampler.is_unbounded and not isinstance(mark, RecordLevel):
        raise UnaccountedPlanError(
            "users with any number of records have no price at user level. Give group_size, or "
            "set record_level, which promises nothing to users."
        )
    if plan.sampler.as_if is not None and not plan.non_private:
        _check_as_if(plan)
    if mark is None:
        return
    if plan.non_private:
        raise InputError(
            "non_private claims nothing at all: leave out record_level and hypothetical numbers, "
            "or non_private."
        )
    if not plan.noise.is_independent:
        raise UnaccountedPlanError(
            f"{plan.noise.name} noise is priced as it runs: it has no price under record_level, "
            "hypothetical numbers or shuffled batches. Use gaussian noise there."
        )
    if isinstance(mark, RecordLevel) and plan.adjacency.fixed_graph:
        raise UnaccountedPlanError(
            f"record-level privacy has no price under {plan.adjacency.value} adjacency, where a "
            "record may be kept several times. Use add-remove, zero-out or replace."
        )
    if isinstance(mark, Hypothetical) and plan.clip.count_stddev is not None:
        raise UnaccountedPlanError(
            f"{plan.clip.name} clipping releases a count of the real cohort, which no hypothetical "
            "cohort prices. Use another clipping."
        )
    sampler_of(plan)


def _check_as_if(plan: Plan) -> None:
    """Refuse shuffled batches under a promise, or under a mark that cannot price them."""
    if not isinstance(plan.mark, AsIfPoisson):
        raise UnaccountedPlanError(
            f"{type(plan.sampler).__name__} has no accounting rule: what is drawn would not be "
            "what is priced. Use sampler = 'poisson'; or, to reproduce a paper, leave out "
            "record_level and hypothetical numbers: the statement then says that there is no "
            "guarantee."
        )
    if plan.clip.count_stddev is not None:
        raise UnaccountedPlanError(
            f"{plan.clip.name} clipping has no price as if batches were not shuffled. Use another "
            "clipping."
        )


def check_paid(plan: Plan, paid: Sequence[Paid]) -> None:
    """Refuse looks at users' data, in a run that is priced by the record or behind its weights."""
    if paid and isinstance(plan.mark, RecordLevel):
        raise UnaccountedPlanError(
            "a paid look has a price for users, and none for single records: it cannot be priced "
            "together with record_level. Leave that out, or begin with a model without such a look."
        )


def check_selection(plan: Plan) -> None:
    """Refuse to price by the record what a selection keeps: others may take a record's place."""
    if isinstance(plan.mark, RecordLevel):
        raise InputError(
            "record_level takes all records, or at most group_size of a user at random: leave out "
            "the selection, select, resample and tokens_per_user."
        )


def takes_over(plan: Plan, item: Earlier) -> bool:
    """Whether the plan's mark prices an earlier run, even if its users have no price in it."""
    before = type(plan).from_json(item.plan)
    if isinstance(plan.mark, AsIfPoisson):
        return isinstance(before.mark, AsIfPoisson)
    if not isinstance(plan.mark, RecordLevel) or before.non_private:
        return False
    check_paid(plan, item.paid)
    if item.chose_rows:
        raise UnaccountedPlanError(
            "a run behind the model chose its rows: by a selection, by select, resample or "
            "tokens_per_user. There a record may take part several times or in place of another, "
            "so it has no price under record_level. Leave that out, or begin with another model."
        )
    # Removing one record of a user may turn the user's mean round: only records that are clipped
    # one by one have a price.
    _priced(before, plan.mark)
    return True


def sampler_of(plan: Plan) -> Sampler:
    """The sampler that noise is calibrated for: the plan's own, or the one that its mark prices."""
    return plan.sampler if plan.mark is None else _priced(plan, plan.mark)


def _priced(plan: Plan, mark: Mark) -> Sampler:
    return mark.priced(plan.sampler, num_users=plan.num_users, groups=plan.divisor)


def adjacency_of(plan: Plan, earlier: Sequence[Earlier] = ()) -> Adjacency:
    """The adjacency that noise is calibrated under."""
    if plan.mark is None:
        return plan.adjacency
    samplers = [plan.sampler, *(type(plan).from_json(item.plan).sampler for item in earlier)]
    found = [plan.mark.adjacency(sampler, plan.adjacency) for sampler in samplers]
    return Adjacency.REPLACE if Adjacency.REPLACE in found else found[0]


def earlier_of(plan: Plan, earlier: Sequence[Earlier]) -> list[Earlier]:
    """Earlier runs with the events that the plan's mark gives them."""
    return [replace(item, event=_event_of(plan, item)) for item in earlier]


def _event_of(plan: Plan, item: Earlier) -> events.DpEvent | None:
    before = type(plan).from_json(item.plan)
    if plan.mark is None or not item.steps or before.non_private:
        return item.event
    if isinstance(plan.mark, RecordLevel):
        return event_by(before, plan.mark, item.steps)
    if isinstance(before.mark, type(plan.mark)):
        return event_by(before, before.mark, item.steps)
    return item.event


def event_by(plan: Plan, mark: Mark, steps: int) -> events.DpEvent:
    """What the mark says that the first `steps` steps cost."""
    multiplier = plan.noise.noise_multiplier / mark.noise_ratio(plan.divisor)
    noise = replace(plan.noise, noise_multiplier=multiplier)
    return event_of(_priced(plan, mark), noise, plan.adjacency, steps=steps)


def epsilon_of(
    plan: Plan, steps: int, *, paid: Sequence[Paid] = (), earlier: Sequence[Earlier] = ()
) -> float | None:
    """Epsilon by the plan's mark, with `paid` and `earlier`; None without a mark."""
    if plan.mark is None:
        return None
    before = earlier_of(plan, earlier)
    if any(item.non_private for item in before):
        return math.inf
    own = [event_by(plan, plan.mark, steps)] if steps > 0 else []
    together = total_events(own, paid, before)
    return dearest(together, delta=plan.delta, adjacency=adjacency_of(plan, earlier)).epsilon
