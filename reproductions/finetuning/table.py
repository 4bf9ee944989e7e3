"""The results of `compare` as Markdown, and as pictures.

The gap is the loss before training less that without privacy, in the same steps. Where there are
several seeds, a table gives their mean, and half of their range.

    epsilon       loss by epsilon, ULS and ELS, and which share of the gap is closed
    planner       our choices against those of Chua et al. 2024, by set and epsilon
    selections    which of a user's records take part, by method and epsilon
    k             rows of a user in a step
    hypothetical  what more users of the same kind would change

Run: python -m reproductions.finetuning.table epsilon results/*.jsonl [--svg FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reproductions.finetuning.pictures import SHADES, Bar, bars, lines

Row = dict[str, Any]
Seeds = dict[int, float]
EPSILONS = (1.0, 3.0, 8.0)
OUR_CLIP_NORM = 0.1
TUNED_ON = "stackexchange_history_meta_posts"
NAMES = {
    "acl_to2022": "ACL abstracts",
    "gitml_2022_2023": "git mailing list",
    "gitml_2022_2023_records": "git mailing list, records apart",
    "scotus_turns_2006_2010": "Supreme Court turns",
    "shakespeare_plays": "Shakespeare",
    "stackexchange_beer_posts": "Stack Exchange (beer)",
}


def read(paths: Iterable[Path]) -> list[Row]:
    """The runs of the files, without those that chose the learning rate."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    # Older files lack the settings that came later: they had their defaults.
    rows = [{"select": "random", "schedule": "linear", "compute": None, **row} for row in rows]
    return [row for row in rows if row["data"] != TUNED_ON]


def mean(values: Iterable[float]) -> float:
    """The mean; of nothing it is not a number."""
    found = list(values)
    return sum(found) / len(found) if found else math.nan


def told(values: Iterable[float], *, sign: str = "") -> str:
    """The mean, and half of the range if there are several values."""
    found = list(values)
    if not found:
        return "-"
    spread = f" ± {(max(found) - min(found)) / 2:.3f}" if len(found) > 1 else ""
    return f"{mean(found):{sign}.3f}{spread}"


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], Seeds]:
    """The losses by the named settings, and then by seed."""
    found: dict[tuple[Any, ...], Seeds] = defaultdict(dict)
    for row in rows:
        found[tuple(row[name] for name in names)][row["seed"]] = row["loss"]
    return found


def before_of(rows: Iterable[Row]) -> dict[str, float]:
    """The loss of each set before training."""
    return {row["data"]: row["loss_before"] for row in rows}


def paired(one: Seeds, other: Seeds) -> list[float]:
    """The differences of runs with the same seed."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def markdown(head: list[str], body: Iterable[list[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def name_of(data: str) -> str:
    """A set's name, to be read."""
    return NAMES.get(data, data.replace("_", " "))


def told_epsilon(epsilon: float | None) -> str:
    """Epsilon, or that there is none."""
    return "no privacy" if epsilon is None else f"ε = {epsilon:g}"


def of_recipe(rows: Iterable[Row], clip_norm: float, rank: int) -> list[Row]:
    """Runs with real users, random rows and this clip norm; without privacy any clip norm."""
    return [
        row
        for row in rows
        if not row["hypothetical"]
        and row["rank"] == rank
        and row["select"] == "random"
        and row["schedule"] == "linear"
        and (row["epsilon"] is None or row["clip_norm"] == clip_norm)
    ]


def share_closed(before: float, private: Iterable[float], free: Iterable[float]) -> float:
    """Which share of the gap a private run closes."""
    return (before - mean(private)) / (before - mean(free))


def epsilon_table(rows: list[Row], clip_norm: float, rank: int) -> tuple[str, str]:
    """One line a set; bars of the share of the gap."""
    own = of_recipe(rows, clip_norm, rank)
    losses, before = by(own, "data", "method", "epsilon"), before_of(own)
    body: list[list[str]] = []
    groups: dict[str, list[Bar]] = {}
    for name in sorted(before):
        free = losses[name, "uls", None].values()
        private = [losses[name, "uls", epsilon].values() for epsilon in EPSILONS]
        if not any(private):
            continue
        els = [told(losses[name, "els", epsilon].values()) for epsilon in EPSILONS[:2]]
        shares = [share_closed(before[name], found, free) for found in private]
        closed = "-" if math.isnan(shares[-1]) else f"{shares[-1]:.0%}"
        body.append(
            [name_of(name), f"{before[name]:.3f}", *map(told, private), told(free), closed, *els]
        )
        groups[name_of(name)] = [
            Bar(max(0.0, share), f"{share:.0%} (ε = {epsilon:g})", shade)
            for share, epsilon, shade in zip(shares, EPSILONS, SHADES, strict=False)
            if not math.isnan(share)
        ]
    head = ["set", "before", *map(told_epsilon, EPSILONS), "no privacy", "gap closed at 8"]
    title = "Share of the gap to non-private training that is closed"
    picture = bars(title, groups, end=1.0, mark="100%")
    return markdown([*head, "ELS, ε = 1", "ELS, ε = 3"], body), picture


def planner_table(rows: list[Row]) -> tuple[str, str]:
    """One line for each set and epsilon; bars of the share of the gap."""
    theirs = [row for row in rows if row["schedule"] == "constant"]
    tuned = by((row for row in theirs if row["rate"] is None), "data", "epsilon")
    published = by((row for row in theirs if row["rate"] is not None), "data", "epsilon")
    own = of_recipe([row for row in rows if row["method"] == "uls"], OUR_CLIP_NORM, 1)
    ours, before = by(own, "data", "epsilon"), before_of(rows)
    body: list[list[str]] = []
    groups: dict[str, list[Bar]] = {}
    for name, epsilon in sorted(tuned):
        free = ours[name, None].values()
        found = [published[name, epsilon], tuned[name, epsilon], ours[name, epsilon]]
        shares = [share_closed(before[name], seeds.values(), free) for seeds in found]
        gains = paired(ours[name, epsilon], tuned[name, epsilon])
        body.append(
            [name_of(name), f"{epsilon:g}", f"{before[name]:.3f}"]
            + [told(seeds.values()) for seeds in found]
            + [told(gains, sign="+"), told(free)]
            + ["-" if math.isnan(share) else f"{share:.0%}" for share in shares[1:]]
        )
        words = ("as published", "theirs, rate tuned", "ours")
        groups[f"{name_of(name)}, ε = {epsilon:g}"] = [
            Bar(share, f"{share:.0%} {word}", shade)
            for share, word, shade in zip(shares, words, SHADES, strict=False)
            if not math.isnan(share)
        ]
    head = ["set", "ε", "before", "Chua et al., published rate", "Chua et al., rate tuned", "ours"]
    head += ["ours less theirs, same seed", "no privacy", "gap closed, theirs", "ours"]
    title = "Share of the gap that is closed, with the choices of Chua et al. and with ours"
    return markdown(head, body), bars(title, groups, end=1.0, mark="100%")


def selections_table(rows: list[Row]) -> tuple[str, str]:
    """One line for each method, epsilon and selection, the best first; bars of the difference."""
    losses = by(rows, "method", "epsilon", "select")
    kinds = sorted({key[:2] for key in losses}, key=lambda kind: (kind[0], kind[1] or math.inf))
    body: list[list[str]] = []
    groups: dict[str, list[Bar]] = {}
    for method, epsilon in reversed(kinds):
        own = {key[2]: seeds for key, seeds in losses.items() if key[:2] == (method, epsilon)}
        label = f"{method.upper()}, {told_epsilon(epsilon)}"
        for select in sorted(own, key=lambda name: mean(own[name].values())):
            to_random = paired(own[select], own.get("random", {}))
            better = f"{sum(gap < 0 for gap in to_random)} of {len(to_random)}"
            perplexity = told(math.exp(loss) for loss in own[select].values())
            body.append(
                [label, select, told(own[select].values()), perplexity]
                + [
                    "" if select == "random" else text
                    for text in (told(to_random, sign="+"), better)
                ]
            )
            if select != "random" and to_random:
                groups.setdefault(label, []).append(
                    Bar(
                        mean(to_random),
                        select,
                        SHADES[1],
                        (min(to_random), max(to_random)),
                    )
                )
    head = ["runs", "selection", "loss", "perplexity", "less random, same seed"]
    title = "Held-out loss less that of random rows, same seed (less is better)"
    return markdown([*head, "seeds better than random"], body), bars(title, groups)


def k_table(rows: list[Row]) -> tuple[str, str]:
    """One line for each set and epsilon; curves over k."""
    losses = by(rows, "data", "epsilon", "k")
    sizes = sorted({key[2] for key in losses})
    body: list[list[str]] = []
    series: dict[str, dict[float, list[float]]] = {}
    for name, epsilon in sorted({key[:2] for key in losses}):
        found = {k: list(losses[name, epsilon, k].values()) for k in sizes}
        body.append([name_of(name), f"{epsilon:g}", *map(told, found.values())])
        label = f"{name_of(name).split()[0]}, ε = {epsilon:g}"
        series[label] = {k: values for k, values in found.items() if values}
    head = ["set", "ε", *(f"k = {k}" for k in sizes)]
    picture = lines("Held-out loss by the rows of a user in a step", "k", series)
    return markdown(head, body), picture


def hypothetical_table(rows: list[Row]) -> tuple[str, str]:
    """One line for each set and epsilon; all but the first column of losses are hypothetical."""
    rows = [row for row in rows if row["select"] == "random" and row["method"] == "uls"]
    rows = [row for row in rows if row["epsilon"] is not None and row["clip_norm"] == OUR_CLIP_NORM]
    more = {row["data"] for row in rows if row["hypothetical"]}
    losses = by((row for row in rows if row["data"] in more), "data", "epsilon", "times_users")
    factors = sorted({key[2] for key in losses})
    body: list[list[str]] = []
    groups: dict[str, list[Bar]] = {}
    before = before_of(rows)
    for name, epsilon in sorted({key[:2] for key in losses}):
        found = [losses[name, epsilon, factor].values() for factor in factors]
        body.append([name_of(name), f"{epsilon:g}", *map(told, found)])
        groups[f"{name_of(name)}, ε = {epsilon:g}"] = [
            Bar(before[name] - mean(values), f"{factor:g} times the users", shade)
            for values, factor, shade in zip(found, factors, SHADES, strict=False)
            if values
        ]
    words = [
        "real users" if factor == 1 else f"hypothetical, {factor:g} times" for factor in factors
    ]
    title = "By how much the loss falls; more users than there are: hypothetical"
    return markdown(["set", "ε", *words], body), bars(title, groups)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; draw the picture if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds: dict[str, Callable[[list[Row]], tuple[str, str]]] = {
        "planner": planner_table,
        "selections": selections_table,
        "k": k_table,
        "hypothetical": hypothetical_table,
    }
    parser.add_argument("kind", choices=["epsilon", *kinds])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--clip-norm", type=float, default=OUR_CLIP_NORM, help="with epsilon")
    parser.add_argument("--rank", type=int, default=1, help="with epsilon; 0 is all weights")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(arguments)
    rows = read(options.results)
    if options.kind == "epsilon":
        found, picture = epsilon_table(rows, options.clip_norm, options.rank)
    else:
        found, picture = kinds[options.kind](rows)
    print(found)
    if options.svg:
        options.svg.write_text(picture)


if __name__ == "__main__":
    main()
