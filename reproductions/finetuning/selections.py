"""What the selections of Chua et al. 2024 select: their Table 7, on other data.

For each selection: the mean length and perplexity of the selected records, and the share of them
that are shorter than the longest allowed. Nothing is trained here; `compare` trains with selections
(the paper's Tables 2 and 4). The paper resamples users of fewer than k records to k (Sec. 6), so
that all users weigh the same; the numbers are given with and without.

The data is public. Perplexities of records that are trained on are printed, and nothing covers
those.

Run: python -m reproductions.finetuning.selections MODEL rows/SET.npz [--json FILE]
     the set is prepared without --join, so that records are known
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reproductions.finetuning.prepare import MOST_TOKENS
from reproductions.finetuning.sets import Set, record_losses
from userdp.data.choose import Choice, Select, ranked_rows, record_lengths
from userdp.data.tokens import TokenRows
from userdp.models.load import load_model
from userdp.streams import RunSecret, Streams

STATISTICS: tuple[str, ...] = ("mean_length", "mean_perplexity", "share_below_longest")
# Chua et al. 2024, Table 7 (p. 18), k = 10: in the order of STATISTICS.
TABLE_7 = {
    "Enron Email": {
        "random": (240.67, 214.67, 0.73),
        "longest": (274.91, 201.14, 0.69),
        "shortest": (222.28, 278.75, 0.76),
        "highest-perplexity": (233.27, 1123.77, 0.74),
        "lowest-perplexity": (247.18, 188.92, 0.72),
    },
    "BookSum": {
        "random": (557.49, 34.37, 0.61),
        "longest": (817.93, 33.79, 0.30),
        "shortest": (338.43, 41.99, 0.80),
        "highest-perplexity": (483.79, 50.32, 0.66),
        "lowest-perplexity": (539.52, 25.94, 0.65),
    },
}


def selected_records(
    rows: TokenRows, select: str, losses: np.ndarray, *, k: int, streams: Streams
) -> tuple[np.ndarray, np.ndarray]:
    """The records that are selected, at most k of a user, and the user of each."""
    records, owners = np.asarray(rows.records), np.asarray(rows.owners)
    _, first = np.unique(records, return_index=True)
    choice = Choice.of(select)
    if choice.select is not Select.RANDOM:
        scores = losses if choice.needs_losses else None
        kept = ranked_rows(rows, choice, group_size=k, losses=scores).rows
        first = np.intersect1d(first, kept)
        return records[first], owners[first]
    kept_first: list[int] = []
    for user in np.unique(owners[first]).tolist():
        own = first[owners[first] == user]
        kept_first += streams.rng(0, user + 1).permutation(own)[:k].tolist()
    return records[kept_first], owners[kept_first]


def describe(
    records: np.ndarray,
    owners: np.ndarray,
    lengths: np.ndarray,
    losses: np.ndarray,
    *,
    k: int | None,
) -> dict[str, float]:
    """The three statistics. With `k`, every user weighs as much as k records."""
    weights = np.ones(len(records)) if k is None else k / np.bincount(owners)[owners]
    mean = lambda values: float(np.average(values, weights=weights))  # noqa: E731
    return {
        "mean_length": mean(lengths[records]),
        "mean_perplexity": mean(np.exp(losses[records])),
        "share_below_longest": mean(lengths[records] < MOST_TOKENS),
    }


def order(found: dict[str, float]) -> list[str]:
    """The selections, the largest value first."""
    return sorted(found, key=lambda name: -found[name])


def agreement(found: dict[str, dict[str, float]], statistic: str) -> dict[str, Any]:
    """Which pairs of selections are ordered as in the paper's table, and which are not.

    `ordered_alike` counts all ten pairs, for each data set of the paper. `where_both_agree` counts
    those that the paper's two data sets order in the same way; `against_both` names the others.
    """
    place = STATISTICS.index(statistic)
    ours = {name: told[statistic] for name, told in found.items()}
    papers = {
        data: {name: values[place] for name, values in table.items()}
        for data, table in TABLE_7.items()
    }
    pairs = list(itertools.combinations(ours, 2))

    def signs(values: dict[str, float]) -> list[float]:
        return [float(np.sign(values[one] - values[two])) for one, two in pairs]

    here, enron, books = (signs(values) for values in (ours, *papers.values()))
    both = [place for place in range(len(pairs)) if enron[place] == books[place]]
    wrong = [pairs[place] for place in both if here[place] != enron[place]]
    return {
        "order": order(ours),
        "ordered_alike": {
            data: f"{sum(a == b for a, b in zip(here, there, strict=True))} of {len(pairs)}"
            for data, there in (("Enron Email", enron), ("BookSum", books))
        },
        "where_both_agree": f"{len(both) - len(wrong)} of {len(both)}",
        "against_both": [" / ".join(pair) for pair in wrong],
    }


def table_7(rows: TokenRows, losses: np.ndarray, *, k: int, seed: int = 0) -> dict[str, Any]:
    """The statistics of the paper's five selections, and how they are ordered."""
    lengths = record_lengths(rows)
    streams = RunSecret.fixed_for_tests(seed).streams("choose rows")
    told: dict[str, Any] = {}
    for way, weight in (("resampled", k), ("not resampled", None)):
        found: dict[str, dict[str, float]] = {}
        for name in TABLE_7["BookSum"]:
            records, owners = selected_records(rows, name, losses, k=k, streams=streams)
            found[name] = describe(records, owners, lengths, losses, k=weight)
        told[way] = {
            "selections": found,
            "orders": {statistic: agreement(found, statistic) for statistic in STATISTICS},
        }
    return told


def some_users(found: Set, number: int | None) -> Set:
    """The set with its first users only: they are in no order that means anything."""
    if number is None:
        return found
    rows = found.train
    last = int(np.searchsorted(rows.owners, number))
    kept = TokenRows(
        tokens=rows.tokens[: rows.indptr[last]],
        indptr=rows.indptr[: last + 1],
        owners=rows.owners[:last],
        num_users=number,
        records=None if rows.records is None else rows.records[:last],
    )
    return Set(kept, found.test, found.end, found.kept)


def main(arguments: list[str] | None = None) -> None:
    """Print the table and the orders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gguf-file")
    parser.add_argument("--k", type=int, default=10, help="as in the paper")
    parser.add_argument("--users", type=int, help="only so many of them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, _ = load_model(options.model, gguf_file=options.gguf_file, device=device)
    found = some_users(Set.read(options.rows), options.users)
    result = {
        "set": options.rows.stem,
        "users": found.train.num_users,
        "k": options.k,
        **table_7(found.train, record_losses(base, found), k=options.k),
    }
    told = json.dumps(result, indent=2)
    print(told)
    if options.json:
        options.json.write_text(told + "\n")


if __name__ == "__main__":
    main()
