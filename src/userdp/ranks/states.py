"""How the ranks' sums go on from a checkpoint: what each rank has seen of its own groups.

On the same number of ranks every rank goes on with its own state, so repeated steps are rounded as
before. On another number, all ranks go on with the first one's: batches may then have other shapes,
which changes rounding alone. What was seen to be wrong on one rank holds for all.
"""

from __future__ import annotations

from typing import Any

from userdp.ranks.group import Ranks

SUMS, RANKS = "sums", "ranks"


def of_all_ranks(ranks: Ranks, own: dict[str, Any]) -> dict[str, Any]:
    """The state of this rank's model, with the sums of all ranks."""
    if ranks.count == 1:
        return own
    return {**own, SUMS: {RANKS: ranks.gathered(own[SUMS])}}


def of_this_rank(ranks: Ranks, saved: dict[str, Any]) -> dict[str, Any]:
    """The state to go on with, from one that any number of ranks has saved."""
    several: list[dict[str, Any]] | None = saved[SUMS].get(RANKS)
    if several is None:
        return saved
    if len(several) == ranks.count:
        return {**saved, SUMS: several[ranks.rank]}
    merged = dict(several[0])
    if "differs" in merged:
        merged["differs"] = any(one["differs"] for one in several)
    if "alone" in merged:
        merged["alone"] = sorted({kind for one in several for kind in one["alone"]})
    return {**saved, SUMS: merged}
