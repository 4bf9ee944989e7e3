"""`userdp.bound`: select records so that no user contributes more than a given number of them.

This is the one way in, from Python and from the command line. It checks that the choices fit
together, runs the method, and counts every user's records before it returns a selection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from userdp.bounding.edges import Edges
from userdp.bounding.greedy import check_bound
from userdp.bounding.methods import METHODS, Found, Losses, Task
from userdp.bounding.names import BY_PERPLEXITY, Method, Weight, Where
from userdp.bounding.selection import Selection
from userdp.data.store import UserStore
from userdp.errors import InputError

Name = TypeVar("Name", bound=StrEnum)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """A selection that keeps its bound, and what is known about it.

    `optimal` says whether a larger selection is ruled out, and `upper_bound` what none can exceed;
    both are None where the method does not know. `str()` says it in words.
    """

    selection: Selection
    edges: Edges
    engine: Where
    optimal: bool | None
    upper_bound: int | None
    seconds: float
    extra: dict[str, Any]

    def __repr__(self) -> str:
        return f"Bounded({self.selection!r})"

    def to_json(self) -> dict[str, Any]:
        """Return the numbers that `userdp bound --json` prints, without the selection itself."""
        selection, edges = self.selection, self.edges
        contributed = edges.contributions(selection.multiplicity)
        places = int(contributed.sum())
        return {
            "size": selection.size,
            "distinct": selection.distinct,
            "examples": edges.num_records,
            "users": edges.num_users,
            "incidences": edges.num_incidences,
            "users_with_any": int((contributed > 0).sum()),
            "users_at_bound": int((contributed == selection.max_records_per_user).sum()),
            "mean_users_per_record": places / selection.size if selection.size else 0.0,
            "max_multiplicity": int(selection.multiplicity.max(initial=0)),
            "max_records_per_user": selection.max_records_per_user,
            "realised_bound": selection.realised_bound,
            "method": selection.method,
            "engine": self.engine.value,
            "guarantee": selection.guarantee,
            "optimal": self.optimal,
            "upper_bound": self.upper_bound,
            "separation": selection.separation,
            "sha256": selection.sha256(),
            "edges_digest": selection.edges_digest,
            "seconds": self.seconds,
            **self.extra,
        }

    def __str__(self) -> str:
        found = self.to_json()
        lines = [
            f"{found['size']:,} records selected, {found['distinct']:,} different ones of "
            f"{found['examples']:,}, by {found['method']} in {found['seconds']:.2f} s",
            f"no user owns more than {found['realised_bound']:,} of them; "
            f"{found['users_at_bound']:,} of {found['users']:,} users are at the bound",
            f"{found['mean_users_per_record']:.3f} owners a selected record",
        ]
        if not found["guarantee"]:
            lines[1] = (
                f"NO GUARANTEE: the bound of {found['max_records_per_user']:,} is ignored; a user "
                f"owns {found['realised_bound']:,} of them"
            )
        if found["optimal"]:
            lines.append("proven: no selection within the bound has more")
        elif found["upper_bound"] is not None:
            lines.append(
                f"not proven best: no selection within the bound exceeds {found['upper_bound']:,}"
            )
        if "rounds" in found:
            lines.append(
                f"{found['rounds']} rounds on {found['engine']}, {found['shuffles']} shuffles; "
                f"the last {found['finished_in_memory']:,} incidences in memory"
            )
        if found["separation"] is not None:
            lines.append(f"no user twice in any {found['separation']:,} consecutive batches")
        for point in found.get("front", []):
            lines.append(
                f"few_owners={point['few_owners']} few_run={point['few_run']} "
                f"many_run={point['many_run']}: {point['size']:,} records, "
                f"{point['mean_users_per_record']:.3f} owners each"
            )
        return "\n".join(lines)


def _named(kind: type[Name], name: str, what: str) -> Name:
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(repr(str(one)) for one in kind)
        raise InputError(f"{what}={name!r} is not known; there are {known}.") from None


def bound(
    source: str | Path | UserStore | Edges,
    max_records_per_user: int | None = None,
    *,
    method: str = Method.GREEDY,
    engine: str = Where.LOCAL,
    finish_below: int | None = None,
    weight: str = Weight.EQUAL,
    time_limit: float = 60.0,
    few_owners: int = 1,
    few_run: int = 1,
    many_run: int = 1,
    grid: bool = False,
    steps: int | None = None,
    batch_size: int | None = None,
    separation: int | None = None,
    losses: Losses | None = None,
    seed: int | None = None,
) -> Bounded:
    """Select records so that no user owns more than `max_records_per_user` of them.

    `source` is a store or its directory, an .npz with `indptr`, `indices` and `n_users`, or
    `Edges`. The other arguments belong to single methods, as the options of `userdp bound` do.
    Perplexity methods need `losses`: from a store to the mean loss of each record under a public
    model, one that was not trained on these users.

    Guarantee: every user's records are counted before the selection is returned. Only the methods
    named unbounded ignore the bound, and `Selection.check` refuses to train on what they select.

    >>> edges = Edges.from_lists([[0, 1], [0], [1, 2], [2]], num_users=3)
    >>> bound(edges, 1).selection.multiplicity.tolist()
    [0, 1, 0, 1]
    """
    chosen, where = _named(Method, method, "method"), _named(Where, engine, "engine")
    worth = _named(Weight, weight, "weight")
    if isinstance(source, UserStore):
        source = source.path
    _check(chosen, where, worth, max_records_per_user, losses)
    path = None if isinstance(source, Edges) else Path(source)
    edges = source if isinstance(source, Edges) else Edges.load(Path(source))
    task = Task(
        source=path,
        edges=edges,
        max_records_per_user=max_records_per_user,
        method=chosen,
        engine=where,
        finish_below=finish_below,
        weight=worth,
        time_limit=time_limit,
        few_owners=few_owners,
        few_run=few_run,
        many_run=many_run,
        grid=grid,
        steps=steps,
        batch_size=batch_size,
        separation=separation,
        losses=losses,
        seed=seed,
    )
    start = time.perf_counter()
    found = METHODS[chosen](task)
    seconds = time.perf_counter() - start
    return Bounded(
        selection=_counted(edges, found, chosen),
        edges=edges,
        engine=where,
        optimal=found.optimal,
        upper_bound=found.upper_bound,
        seconds=seconds,
        extra=found.extra,
    )


def _check(
    method: Method,
    engine: Where,
    weight: Weight,
    max_records_per_user: int | None,
    losses: Losses | None,
) -> None:
    """Refuse choices that do not go together, before anything is read."""
    if weight is Weight.OWNERS and method not in (Method.GREEDY, Method.EXACT):
        raise InputError(f"--weight owners goes with greedy or exact, not with {method.value}.")
    if engine is not Where.LOCAL and (method is not Method.GREEDY or weight is not Weight.EQUAL):
        raise InputError(
            f"--engine {engine.value} runs --method greedy with equal weights only: use local."
        )
    if max_records_per_user is None and method is not Method.MIN_SEPARATION:
        raise InputError("give --max-records-per-user, the most records any user may contribute.")
    if max_records_per_user is not None:
        check_bound(max_records_per_user)
    if (losses is not None) != (method in BY_PERPLEXITY):
        raise InputError(
            "--model goes with highest-perplexity and lowest-perplexity, which need it: a public "
            f"model that scores records, not trained on these users. The method is {method.value}."
        )


def _counted(edges: Edges, found: Found, method: Method) -> Selection:
    return Selection.of(
        edges,
        found.multiplicity,
        found.bound,
        method=method.value,
        guarantee=found.guarantee,
        batches=found.batches,
        separation=found.separation,
    )
