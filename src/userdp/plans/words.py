"""What a plan's statement says: what is promised, what is assumed, and what is not covered.

A part has its own `words`. Words follow from numbers. No number is ever read back from words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from userdp.parts import as_written, is_our_own
from userdp.prices import marked as marked_price
from userdp.prices import marks
from userdp.prices.composition import earlier_in_words, paid_in_words
from userdp.prices.earlier import Earlier
from userdp.prices.marks import AsIfPoisson, Hypothetical, RecordLevel
from userdp.prices.paid import Paid
from userdp.statement import Statement
from userdp.streams import PHILOX
from userdp.units import Adjacency, SamplingUnit, too_large

if TYPE_CHECKING:
    from userdp.plan import Plan

UNCLAIMED = "trained with noise, no guarantee claimed"
# A user who takes part in fewer steps than this, on average, is hardly in the run.
FEW_PARTS = 0.01

# Each row holds up to its epsilon. It says how well a user is protected, and what somebody who has
# the model can learn. An attacker's odds change by a factor of at most 2.7 at epsilon 1, 55 at 4,
# and 22,000 at 10.
_DEGREES = (
    (1.0, "is protected", "would learn nearly the same"),
    (4.0, "is protected to a moderate degree", "would learn much the same"),
    (10.0, "has weak protection", "could learn noticeably more than"),
)


def degree_of(epsilon: float) -> int:
    """How many degrees of protection an epsilon has lost: 0 to 2, or 3 where nothing is said.

    >>> [degree_of(epsilon) for epsilon in (0.5, 1.2, 8.0, 59.7)]
    [0, 1, 2, 3]
    """
    return sum(epsilon > largest for largest, _, _ in _DEGREES)


def promise_in_words(adjacency: Adjacency, epsilon: float) -> str:
    """What a curator may tell the users. Above epsilon 10 nothing reassuring is true: it is empty.

    >>> promise_in_words(Adjacency.ADD_REMOVE, 59.7)
    ''
    """
    lost = degree_of(epsilon)
    if lost == len(_DEGREES):
        return ""
    _, degree, learns = _DEGREES[lost]
    return adjacency.promised(degree, learns)


def of_the_price(epsilon: float | None) -> tuple[str, ...]:
    """A caution where the epsilon of what is said bounds hardly anything.

    There is none where no finite epsilon is said, because that is told anyway.

    >>> of_the_price(8.0)
    ()
    """
    if epsilon is None or not math.isfinite(epsilon) or degree_of(epsilon) < len(_DEGREES):
        return ()
    largest, _, _ = _DEGREES[-1]
    return (
        f"an epsilon above {largest:g} is hardly any protection: somebody who has the model may be "
        "all but certain whether a user's records were used",
    )


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
        mechanism=_mechanism(plan),
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
            *_of_the_record(fixed_seed, unfinished),
            *said.get("more_cautions", ()),
        ),
        assumptions=_assumptions(plan, paid, earlier),
        not_covered=(
            "hyper-parameters tuned on the same users"
            + (", except as listed under paid for" if paid else ""),
            "what others wrote about a user, and copies of a user's text under another id",
            plan.noise.not_covered,
            "anything released beside the model, such as losses on the training users",
        ),
    )


def _mechanism(plan: Plan) -> str:
    """What each group gives, how it is clipped and noised, and what the sum is divided by."""
    words = [*(part.words for part in plan.parts[1:]), f"divisor={plan.divisor:g}"]
    words += [] if plan.randomness == PHILOX else [f"randomness={plan.randomness}"]
    return ", ".join(word for word in words if word)


def _assumptions(plan: Plan, paid: Sequence[Paid], earlier: Sequence[Earlier]) -> tuple[str, ...]:
    """What must be true for the guarantee to hold."""
    found = [
        f"num_users={plan.num_users:,} and every setting named here are public, chosen without "
        "looking at these users' data" + (" except as listed under paid for" if paid else ""),
        "the initial weights, the tokenizer and the training code do not depend on these users"
        + (" except by the earlier runs listed" if earlier else ""),
    ]
    if any(item.people for item in earlier):
        found.append("the people of this run are others than those of the runs declared as such")
    found += [
        "who owns which record is public"
        if plan.adjacency.fixed_graph
        else "a record's owner is the only person it is about",
        "every intermediate model may be seen; the sampled cohorts may not",
    ]
    return (*found, *plan.sampler.assumes)


def _of_the_record(fixed_seed: bool, unfinished: bool) -> tuple[str, ...]:
    """Cautions about what a statement rests on."""
    seed = "a fixed seed was used: whoever knows it can remove the noise"
    return (*[seed] * fixed_seed, *["unfinished: the record has no closing row"] * unfinished)


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
    return "; ".join([*why, *_of_the_record(item.fixed_seed, unfinished=False), *item.doubts])


def cautions_of(plan: Plan) -> list[str]:
    """What a careful reader would ask about, from public numbers alone."""
    found: list[str] = []
    # The draws of all steps together, on average.
    users_drawn = plan.steps * plan.divisor
    if plan.sampler.unit is SamplingUnit.USER and users_drawn < plan.num_users * FEW_PARTS:
        found.append(
            f"num_users={plan.num_users:,} is far from the {users_drawn:,.0f} users that all steps "
            "together draw: hardly anybody takes part. If fewer people are in the data, steps have "
            "fewer users than asked for and are mostly noise"
        )
    people = plan.num_users if plan.mark is None else plan.mark.people(plan.num_users)
    found += [why] if (why := too_large(plan.delta, people)) else []
    for kind in (type(part) for part in plan.parts if not is_our_own(part)):
        found.append(
            f"{kind.__module__}.{kind.__name__} is no part of userdp: that it does what its price "
            "says is its author's word"
        )
    return found
