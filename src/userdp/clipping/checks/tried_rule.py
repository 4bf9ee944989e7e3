"""The clip norm of a trial: one at which most of the tried updates are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from userdp.clipping.rules import ClipRule
from userdp.errors import NothingSeenError, UntriedModelError


def rule_that_clips(rule: ClipRule, found: Sequence[float]) -> ClipRule:
    """The same kind of rule, at a clip norm that clips most updates of these norms."""
    norms = sorted(found)
    middle = norms[len(norms) // 2]
    if not math.isfinite(middle):
        raise UntriedModelError(
            "the gradients of made-up rows are not finite: look at the model's weights."
        )
    if not norms[-1] > 0:
        raise NothingSeenError(
            "the gradients of made-up rows are all zero, so nothing can be seen of the model. Give "
            "PrivateStep.check_model or verify() an example of made-up rows that have a gradient."
        )
    return rule.at(middle / 2 or norms[-1] / 2)
