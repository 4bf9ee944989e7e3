"""`userdp bound`: a selection of records to which no user contributes more than a bound."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from userdp.cli import common
from userdp.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from userdp.bounding.edges import Edges, Ints
    from userdp.data.store import UserStore


class Method(StrEnum):
    """How records are chosen. Those named unbounded ignore the bound: baselines, no guarantee."""

    GREEDY = "greedy"
    GREEDY_DUPLICATES = "greedy-duplicates"
    EXACT = "exact"
    EXACT_DUPLICATES = "exact-duplicates"
    BALANCED = "balanced"
    MIN_SEPARATION = "min-separation"
    RANDOM = "random"
    LONGEST = "longest"
    SHORTEST = "shortest"
    HIGHEST_PERPLEXITY = "highest-perplexity"
    LOWEST_PERPLEXITY = "lowest-perplexity"
    UNBOUNDED_RANDOM = "unbounded-random"
    UNBOUNDED_RANDOM_LOW = "unbounded-random-low"
    UNBOUNDED_RANDOM_HIGH = "unbounded-random-high"


BY_PERPLEXITY = (Method.HIGHEST_PERPLEXITY, Method.LOWEST_PERPLEXITY)
BY_TEXT = (Method.LONGEST, Method.SHORTEST, *BY_PERPLEXITY)

# Tokens a row when records are scored, as `train` and `evaluate` cut them by default.
ROW_TOKENS = 128


class Where(StrEnum):
    """Where the selection is computed: in memory, or in rounds on an engine."""

    LOCAL = "local"
    DUCKDB = "duckdb"
    SPARK = "spark"


class Weight(StrEnum):
    """What a record is worth to the methods greedy and exact."""

    EQUAL = "equal"
    OWNERS = "owners"


@dataclass(kw_only=True)
class _Found:
    """A selection, and what the method knows about it."""

    multiplicity: Ints
    bound: int
    guarantee: bool = True
    optimal: bool | None = None
    upper_bound: int | None = None
    batches: Ints | None = None
    separation: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def bound(
    source: Annotated[
        Path, typer.Argument(help="A store, or an .npz with indptr, indices and n_users.")
    ],
    max_records_per_user: Annotated[
        int | None,
        typer.Option(
            help="The most selected records any user may own; optional for min-separation."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the selection to this .npz.")] = None,
    method: Annotated[Method, typer.Option(help="How records are chosen.")] = Method.GREEDY,
    engine: Annotated[
        Where, typer.Option(help="With greedy: in memory, or in parallel rounds on an engine.")
    ] = Where.LOCAL,
    finish_below: Annotated[
        int | None,
        typer.Option(
            help="With an engine: undecided incidences to finish in memory, not in rounds."
        ),
    ] = None,
    weight: Annotated[
        Weight, typer.Option(help="With greedy or exact: what a record is worth.")
    ] = Weight.EQUAL,
    time_limit: Annotated[
        float, typer.Option(help="With exact methods: seconds before the best found is returned.")
    ] = 60.0,
    few_owners: Annotated[
        int, typer.Option(help="With balanced: a record of at most this many owners has few (u).")
    ] = 1,
    few_run: Annotated[
        int, typer.Option(help="With balanced: records of few owners visited in a row (c1).")
    ] = 1,
    many_run: Annotated[
        int, typer.Option(help="With balanced: records of many owners visited in a row (c2).")
    ] = 1,
    grid: Annotated[
        bool, typer.Option("--grid", help="With balanced: also the Pareto front of 80 settings.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="With min-separation: batches (T).")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With min-separation: records a batch (B).")
    ] = None,
    separation: Annotated[
        int | None,
        typer.Option(help="With min-separation: b; left out, the largest that is found."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With perplexity methods: a public model's path or name, not of these users."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With random methods: fixes the draw, which is no secret.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Choose records so that no user owns more than K of them.

    From the owners alone; longest, shortest and the perplexity methods read the texts of a store
    whose records have one owner each.
    """
    from userdp.bounding.edges import Edges
    from userdp.bounding.greedy import check_bound
    from userdp.bounding.selection import Selection

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
    if (model is not None) != (method in BY_PERPLEXITY):
        raise InputError(
            "--model goes with highest-perplexity and lowest-perplexity, which need it: a public "
            f"model that scores records, not trained on these users. The method is {method.value}."
        )
    edges = Edges.load(source)

    start = time.perf_counter()
    if method is Method.MIN_SEPARATION:
        found = _min_separation(edges, steps, batch_size, separation, max_records_per_user)
    else:
        assert max_records_per_user is not None
        if engine is not Where.LOCAL:
            found = _in_rounds(edges, max_records_per_user, engine, finish_below)
        elif method is Method.BALANCED:
            found = _balanced(edges, max_records_per_user, few_owners, few_run, many_run, grid)
        elif method in BY_TEXT:
            found = _by_text(source, max_records_per_user, method, model)
        elif method in (Method.EXACT, Method.EXACT_DUPLICATES):
            found = _exact(edges, max_records_per_user, method, weight, time_limit)
        else:
            found = _heuristic(edges, max_records_per_user, method, weight, seed)
    seconds = time.perf_counter() - start

    selection = Selection.of(
        edges,
        found.multiplicity,
        found.bound,
        method=method.value,
        guarantee=found.guarantee,
        batches=found.batches,
        separation=found.separation,
    )
    if out is not None:
        selection.save(out)
    contributed = edges.contributions(selection.multiplicity)
    places = int(contributed.sum())
    payload: dict[str, Any] = {
        "size": selection.size,
        "distinct": selection.distinct,
        "examples": edges.num_records,
        "users": edges.num_users,
        "incidences": edges.num_incidences,
        "users_with_any": int((contributed > 0).sum()),
        "users_at_bound": int((contributed == found.bound).sum()),
        "mean_users_per_record": places / selection.size if selection.size else 0.0,
        "max_multiplicity": int(selection.multiplicity.max(initial=0)),
        "max_records_per_user": found.bound,
        "realised_bound": selection.realised_bound,
        "method": method.value,
        "engine": engine.value,
        "guarantee": found.guarantee,
        "optimal": found.optimal,
        "upper_bound": found.upper_bound,
        "separation": found.separation,
        "sha256": selection.sha256(),
        "edges_digest": selection.edges_digest,
        "out": str(out) if out else None,
        "seconds": seconds,
        **found.extra,
    }
    common.emit(json, payload, _in_words(payload))


def _in_words(found: dict[str, Any]) -> str:
    lines = [
        f"{found['size']:,} records selected, {found['distinct']:,} different ones of "
        f"{found['examples']:,}, by {found['method']} in {found['seconds']:.2f} s",
        f"no user owns more than {found['realised_bound']:,} of them; "
        f"{found['users_at_bound']:,} of {found['users']:,} users are at the bound",
        f"{found['mean_users_per_record']:.3f} owners a selected record",
    ]
    if not found["guarantee"]:
        lines[1] = (
            f"NO GUARANTEE: the bound of {found['max_records_per_user']:,} is ignored; a user owns "
            f"{found['realised_bound']:,} of them"
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


def _heuristic(edges: Edges, k: int, method: Method, weight: Weight, seed: int | None) -> _Found:
    import numpy as np

    from userdp.bounding import balanced, exact, greedy

    # Which records a random method takes is public under fixed-graph privacy, like the graph; a
    # draw from the system's entropy by default, so that nobody plans for it.
    rng = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    cardinality = edges.cardinality()
    if method is Method.GREEDY and weight is Weight.OWNERS:
        multiplicity = greedy.greedy_weighted(edges, cardinality, k)
        return _Found(
            multiplicity=multiplicity, bound=k, extra={"value": int(cardinality @ multiplicity)}
        )
    baselines = {
        Method.UNBOUNDED_RANDOM: balanced.Baseline.ANY,
        Method.UNBOUNDED_RANDOM_LOW: balanced.Baseline.LOW,
        Method.UNBOUNDED_RANDOM_HIGH: balanced.Baseline.HIGH,
    }
    if method in baselines:
        size = int(greedy.greedy(edges, k).sum())
        multiplicity = balanced.unbounded_random(edges, size, rng=rng, among=baselines[method])
        return _Found(multiplicity=multiplicity, bound=k, guarantee=False)
    if method is Method.GREEDY_DUPLICATES:
        multiplicity = greedy.greedy_duplicates(edges, k)
        upper = exact.size_bound(edges, k, duplicates=True)
    elif method is Method.RANDOM:
        multiplicity = greedy.greedy_random_order(edges, k, rng=rng)
        upper = exact.size_bound(edges, k)
    else:
        multiplicity = greedy.greedy(edges, k)
        upper = exact.size_bound(edges, k)
    return _Found(
        multiplicity=multiplicity,
        bound=k,
        upper_bound=upper,
        optimal=int(multiplicity.sum()) == upper,
    )


def _by_text(source: Path, k: int, method: Method, model: str | None) -> _Found:
    from userdp.data.select import best_records, check_single_owners
    from userdp.data.store import UserStore

    if not source.is_dir():
        raise InputError(
            f"--method {method.value} chooses by what records say, and {source} holds owners only: "
            "give the store's directory, or a method such as greedy."
        )
    store = UserStore.open(source)
    check_single_owners(store)
    scores = store.bytes_per_record().astype(float) if model is None else _losses(store, model)
    if method in (Method.SHORTEST, Method.LOWEST_PERPLEXITY):
        scores = -scores
    # A record in which nothing is predicted has no perplexity, and comes last either way.
    scores[scores != scores] = float("-inf")
    multiplicity = best_records(store, scores, at_most=k)
    # Every user keeps as many records as the bound allows.
    size = int(multiplicity.sum())
    return _Found(multiplicity=multiplicity, bound=k, upper_bound=size, optimal=True)


def _losses(store: UserStore, model: str) -> NDArray[np.float64]:
    """The mean loss of each record under a model: the logarithm of its perplexity."""
    common.quiet_transformers()
    from userdp.data.tokens import tokenise_with_records
    from userdp.evaluation import mean_losses
    from userdp.models.load import load_model

    scorer, tokenizer = load_model(model)
    positions = getattr(scorer.config, "max_position_embeddings", None) or ROW_TOKENS
    rows, record_of_row = tokenise_with_records(
        store, tokenizer, sequence_length=min(ROW_TOKENS, positions)
    )
    return mean_losses(
        scorer,
        rows,
        record_of_row,
        num_records=store.num_records,
        pad_token=tokenizer.pad_token_id,
    )


def _in_rounds(edges: Edges, k: int, engine: Where, finish_below: int | None) -> _Found:
    from userdp.bounding import exact, rounds
    from userdp.bounding.engines import Engine

    if finish_below is None:
        finish_below = rounds.FINISH_BELOW
    done = rounds.greedy_rounds(edges, k, engine=Engine(engine.value), finish_below=finish_below)
    upper = exact.size_bound(edges, k)
    return _Found(
        multiplicity=done.multiplicity,
        bound=k,
        upper_bound=upper,
        optimal=int(done.multiplicity.sum()) == upper,
        extra={
            "rounds": done.rounds,
            "shuffles": done.shuffles,
            "undecided": list(done.undecided),
            "finished_in_memory": done.finished,
            "held_bytes": done.held_bytes,
        },
    )


def _exact(edges: Edges, k: int, method: Method, weight: Weight, time_limit: float) -> _Found:
    from userdp.bounding import exact

    if method is Method.EXACT_DUPLICATES:
        best = exact.exact_duplicates(edges, k, time_limit=time_limit)
    else:
        weights = edges.cardinality() if weight is Weight.OWNERS else None
        best = exact.exact(edges, k, weights=weights, time_limit=time_limit)
    return _Found(
        multiplicity=best.multiplicity,
        bound=k,
        optimal=best.optimal,
        upper_bound=best.upper_bound,
        extra={"value": best.value, "residual": best.residual},
    )


def _balanced(
    edges: Edges, k: int, few_owners: int, few_run: int, many_run: int, grid: bool
) -> _Found:
    from userdp.bounding import balanced, exact

    alternation = balanced.Alternation(few_owners=few_owners, few_run=few_run, many_run=many_run)
    multiplicity = balanced.balanced(edges, k, alternation)
    upper = exact.size_bound(edges, k)
    found = _Found(
        multiplicity=multiplicity,
        bound=k,
        upper_bound=upper,
        optimal=int(multiplicity.sum()) == upper,
    )
    if grid:
        found.extra["front"] = [
            asdict(point.alternation)
            | {"size": point.size, "mean_users_per_record": point.mean_users_per_record}
            for point in balanced.pareto_front(balanced.grid(edges, k))
        ]
    return found


def _min_separation(
    edges: Edges, steps: int | None, batch_size: int | None, separation: int | None, k: int | None
) -> _Found:
    from userdp.bounding import min_sep

    if steps is None or batch_size is None:
        raise InputError("min-separation needs --steps and --batch-size.")
    if separation is None:
        # If nothing fits, a separation of 1 fails below with the reason.
        largest = min_sep.largest_separation(edges, steps=steps, batch_size=batch_size)
        separation = max(1, largest)
    found = min_sep.min_separation(edges, steps=steps, batch_size=batch_size, separation=separation)
    if k is not None and found.realised_bound > k:
        raise InputError(
            f"at separation {separation} a user owns {found.realised_bound} records, more than "
            f"--max-records-per-user {k}. Raise the separation or the bound, or take fewer steps."
        )
    return _Found(
        multiplicity=found.multiplicity(edges.num_records),
        bound=found.realised_bound if k is None else k,
        batches=found.batches,
        separation=separation,
    )
