"""The words of a statement: what may be promised, what is assumed, and what is not covered.

A part has its own `words`. Words follow from numbers. No number is ever read back from words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from userdp.parts import Part, is_our_own
from userdp.prices.earlier import Earlier
from userdp.units import Adjacency, too_large

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


def assumptions(
    num_users: int, adjacency: Adjacency, paid: bool, earlier: Sequence[Earlier]
) -> tuple[str, ...]:
    """What must be true for the guarantee to hold."""
    found = [
        f"num_users={num_users:,} and every setting named here are public, chosen without looking "
        "at these users' data" + (" except as listed under paid for" if paid else ""),
        "the initial weights, the tokenizer and the training code do not depend on these users"
        + (" except by the earlier runs listed" if earlier else ""),
    ]
    if any(item.people for item in earlier):
        found.append("the people of this run are others than those of the runs declared as such")
    found += [
        "who owns which record is public"
        if adjacency.fixed_graph
        else "a record's owner is the only person it is about",
        "every intermediate model may be seen; the sampled cohorts may not",
    ]
    return tuple(found)


# A user who takes part in fewer steps than this, on average, is hardly in the run.
FEW_PARTS = 0.01


def cautions(
    delta: float,
    num_users: int,
    parts: Sequence[Part],
    *,
    users_drawn: float,
    people: int,
) -> list[str]:
    """What a careful reader would ask about, from public numbers alone.

    `users_drawn` is how many users all steps together take on average, each as often as it is
    drawn; infinite where records are sampled. Delta is for so many `people`,
    which under a mark may be others than the `num_users`.
    """
    found: list[str] = []
    if users_drawn < num_users * FEW_PARTS:
        found.append(
            f"num_users={num_users:,} is far from the {users_drawn:,.0f} users that all steps "
            "together draw: hardly anybody takes part. If fewer people are in the data, steps have "
            "fewer users than asked for and are mostly noise"
        )
    found += [why] if (why := too_large(delta, people)) else []
    for kind in (type(part) for part in parts if not is_our_own(part)):
        found.append(
            f"{kind.__module__}.{kind.__name__} is no part of userdp: that it does what its price "
            "says is its author's word"
        )
    return found


def mechanism_in_words(parts: Sequence[Part], divisor: float) -> str:
    """What each group gives, how it is clipped and noised, and what the sum is divided by."""
    words = [*(part.words for part in parts), f"divisor={divisor:g}"]
    return ", ".join(word for word in words if word)


def not_covered(*, paid: bool, of_noise: str) -> tuple[str, ...]:
    """What the guarantee says nothing about."""
    return (
        "hyper-parameters tuned on the same users"
        + (", except as listed under paid for" if paid else ""),
        "what others wrote about a user, and copies of a user's text under another id",
        of_noise,
        "anything released beside the model, such as losses on the training users",
    )


def of_the_record(fixed_seed: bool, unfinished: bool) -> tuple[str, ...]:
    """Cautions about what a statement rests on."""
    seed = "a fixed seed was used: whoever knows it can remove the noise"
    return (*[seed] * fixed_seed, *["unfinished: the record has no closing row"] * unfinished)
