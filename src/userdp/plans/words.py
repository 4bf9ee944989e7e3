"""What a plan's statement says: the plan's numbers, its parts' words, and what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from userdp.parts import as_written
from userdp.plans.wording import (
    assumptions,
    cautions,
    mechanism_in_words,
    not_covered,
    of_the_price,
    of_the_record,
    promise_in_words,
)
from userdp.prices import marked as marked_price
from userdp.prices import marks
from userdp.prices.composition import earlier_in_words, paid_in_words
from userdp.prices.earlier import Earlier
from userdp.prices.marks import AsIfPoisson, Hypothetical, RecordLevel
from userdp.prices.paid import Paid
from userdp.statement import Statement
from userdp.streams import PHILOX
from userdp.units import SamplingUnit, too_large

if TYPE_CHECKING:
    from userdp.plan import Plan

UNCLAIMED = "trained with noise, no guarantee claimed"


class Said(TypedDict, total=False):
    """What a record says beside its plan and its steps."""

    fixed_seed: bool
    paid: Sequence[Paid]
    earlier: Sequence[Earlier]
    unfinished: bool
    model_check: str
    doubts: Sequence[str]
    others: Sequence[str]
    epsilon_of_all: float | None
    more_cautions: Sequence[str]


def statement_of(plan: Plan, steps: int, **said: Unpack[Said]) -> Statement:
    """What may be said about a model after `steps` steps of the plan."""
    paid, earlier = said.get("paid", ()), said.get("earlier", ())
    unfinished = said.get("unfinished", False)
    found = plan.evaluation(steps, paid, earlier)
    fixed_seed = said.get("fixed_seed", False) or any(item.fixed_seed for item in earlier)
    doubts = (*said.get("doubts", ()), *(reason for item in earlier for reason in item.doubts))
    mark = mark_in_words(plan)
    if plan.has_price and not mark and (why := too_large(plan.delta, plan.num_users)):
        # A plan is refused for this, but a record may hold one that was made in another way.
        doubts = (*doubts, why)
    promised = not fixed_seed and not unfinished and not doubts and not mark
    marked = marked_price.epsilon_of(plan, steps, paid=paid, earlier=earlier)
    at_record_level = isinstance(plan.mark, RecordLevel)
    return Statement(
        epsilon=found.epsilon,
        delta=plan.delta,
        adjacency=plan.adjacency.value,
        neighbours=plan.adjacency.meaning,
        promise=promise_in_words(plan.adjacency, found.epsilon) if promised else "",
        sampler=plan.sampler.words,
        sampling=plan.sampler.unit.value,
        noise=plan.noise.title,
        mechanism=mechanism_in_words(plan.parts[1:], plan.divisor) + _randomness(plan),
        steps=steps,
        num_users=plan.num_users,
        certified_by=found.certified_by,
        mark=mark,
        record_level_epsilon=marked if at_record_level else None,
        hypothetical_epsilon=marked if isinstance(plan.mark, Hypothetical) else None,
        as_if_epsilon=marked if isinstance(plan.mark, AsIfPoisson) else None,
        paid=tuple(paid_in_words(item, plan.delta, plan.adjacency) for item in paid),
        earlier=tuple(
            earlier_in_words(item, plan.delta, plan.adjacency, unpromised=_unpromised(item))
            for item in earlier
        ),
        model_check=said.get("model_check", ""),
        fixed_seed=fixed_seed,
        unfinished=unfinished,
        doubts=doubts,
        others=tuple(said.get("others", ())),
        epsilon_of_all=said.get("epsilon_of_all"),
        cautions=(
            *(caution for caution in cautions_of(plan) if caution not in doubts),
            *of_the_price(marked if mark else found.epsilon),
            *of_the_record(fixed_seed, unfinished),
            *said.get("more_cautions", ()),
        ),
        assumptions=(
            *assumptions(plan.num_users, plan.adjacency, bool(paid), earlier),
            *plan.sampler.assumes,
        ),
        not_covered=not_covered(paid=bool(paid), of_noise=plan.noise.not_covered),
    )


def _randomness(plan: Plan) -> str:
    return "" if plan.randomness == PHILOX else f", randomness={plan.randomness}"


def mark_in_words(plan: Plan) -> str:
    """The first words of a statement that promises nothing by choice; else empty."""
    if plan.mark is not None:
        return plan.mark.words(num_users=plan.num_users, groups=plan.divisor)
    return UNCLAIMED if plan.non_private and plan.noise.noise_multiplier > 0 else ""


def _unpromised(item: Earlier) -> str:
    """Why an earlier run promised nothing; empty if it did.

    Its mark is read without its parts, which may be of a package that is not here.
    """
    why = ["no guarantee claimed"] * item.non_private
    with as_written("an earlier run's plan"):
        if (mark := marks.from_json(item.plan)) is not None:
            why = [mark.words(num_users=item.plan["num_users"], groups=item.plan["divisor"])]
    return "; ".join([*why, *of_the_record(item.fixed_seed, unfinished=False), *item.doubts])


def cautions_of(plan: Plan) -> list[str]:
    """What a careful reader would ask about, in words."""
    drawn = plan.steps * (plan.divisor if plan.sampler.unit is SamplingUnit.USER else math.inf)
    people = plan.num_users if plan.mark is None else plan.mark.people(plan.num_users)
    return cautions(plan.delta, plan.num_users, plan.parts, users_drawn=drawn, people=people)
