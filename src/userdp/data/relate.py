"""Who owns which record, as relations: the grouping, joining and filtering of an import.

There are three tables of whole numbers:

    edges(record, edge, spelling)          one row per owner named in a record, in order
    people(spelling, person, dropped)      which person a spelling means
    kept(record, edge, user)               after dropping, merging and numbering

Every function returns an Ibis expression, which `engine.py` runs.
"""

from __future__ import annotations

from typing import Any


def persons_of_edges(edges: Any, people: Any, *, may_repeat: bool, first_only: bool) -> Any:
    """Edges (record, edge, person) without dropped persons, and no person twice in a record.

    `may_repeat` says that a record may name a person twice, under one spelling or two. With
    `first_only`, a record belongs to the first person it names who is not dropped.
    """
    known = edges.join(people, "spelling")
    known = known.filter(~known.dropped).select("record", "edge", "person")
    if first_only:
        first = known.group_by("record").agg(edge=known.edge.min())
        return known.semi_join(first, "edge")
    if may_repeat:
        return known.group_by("record", "person").agg(edge=known.edge.min())
    return known


def numbered_users(named: Any) -> Any:
    """Users (user, person), numbered from 0 by first appearance."""
    import ibis

    seen = named.group_by("person").agg(first_edge=named.edge.min())
    return seen.select(
        user=ibis.row_number().over(ibis.window(order_by=seen.first_edge)).cast("int64"),
        person=seen.person,
    )


def kept_edges(named: Any, users: Any) -> Any:
    """Edges (record, edge, user)."""
    joined = named.join(users, "person")
    return joined.select("record", "edge", "user")


def by_record(kept: Any) -> Any:
    """Edges in the order of the source, for the index from records to users."""
    return kept.order_by("edge").select("record", "user")


def by_user(kept: Any) -> Any:
    """Edges by user, then in the order of the source, for the index from users to records."""
    return kept.order_by("user", "edge").select("user", "record")
