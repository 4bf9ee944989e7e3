"""Turns sets of user-attributed text into rows of tokens: one file a set, for `compare`.

A set is JSON Lines with `users` (the sender or author first) and `text`. A fifth of the users is
held out. With one owner a record, that is its first user. With `--owners all`, records have all
their owners: a record is for training if none of them is held out, for evaluation if all are, and
left out otherwise. Greedy bounding (Ganesh et al. 2025, Alg. 2) then keeps at most k records an
owner, for each k asked for.

Run: python -m reproductions.finetuning.prepare TOKENIZER SET.jsonl.gz ... --out rows/ --join
     without --join records stay apart, as the selections need them
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HELD_OUT = 0.2
# A user's rows in the file: more are never needed, because a step uses at most 20 of them.
MOST_ROWS = 64
MOST_EVALUATION_ROWS = 8
# Where records stay apart: a user's records in the file, and the tokens of a record, as many as
# GPT-2 reads (Chua et al. 2024, Sec. 5.1: "the maximum record length").
MOST_RECORDS = 64
MOST_TOKENS = 1024


def is_held_out(user: str) -> bool:
    """Whether the user is for evaluation: the same answer in every set and on every machine."""
    digest = hashlib.sha256(f"held out {user}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64


def read(path: Path, only: str | None) -> Iterable[tuple[list[str], str]]:
    """The owners and the text of every record, or of those in which the field `only` is true."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["users"] and record["text"].strip() and (only is None or record[only]):
                yield record["users"], record["text"]


def rows_of(ids: list[int], end: int, length: int) -> list[list[int]]:
    """A record's tokens and their end, cut into rows; a row of one token predicts nothing."""
    closed = [*ids, end]
    cut = (closed[start : start + length] for start in range(0, len(closed), length))
    return [row for row in cut if len(row) > 1]


def saved(rows: list[list[int]], owners: list[int], records: list[int]) -> dict[str, Any]:
    """The arrays of one part of a set."""
    indptr = np.cumsum([0, *map(len, rows)])
    flat = [token for row in rows for token in row]
    return {
        "tokens": np.asarray(flat, np.uint16),
        "indptr": indptr.astype(np.int64),
        "owners": np.asarray(owners, np.int64),
        "record_of_row": np.asarray(records, np.int64),
    }


def one_owner(
    found: list[tuple[list[str], list[int]]], end: int, length: int, most: int, *, join: bool
) -> dict[str, Any]:
    """At most `most` pieces of each user, chosen by a generator of this user's own.

    With `join`, a user's records follow one another as one document, and pieces are its rows.
    Otherwise pieces are records, which keep all their rows up to MOST_TOKENS: selections compare
    whole records.
    """
    mine: dict[str, list[list[list[int]]]] = {}
    documents: dict[str, list[int]] = {}
    for users, ids in found:
        if join:
            documents.setdefault(users[0], []).extend([*ids, end])
        else:
            own = mine.setdefault(users[0], [])
            own.append(rows_of(ids[: MOST_TOKENS - 1], end, length))
    for user, ids in documents.items():
        mine[user] = [[row] for row in rows_of(ids[:-1], end, length)]
    rows: list[list[int]] = []
    owners: list[int] = []
    records: list[int] = []
    number_of_piece = 0
    for number, (user, own) in enumerate(sorted(mine.items())):
        seed = int.from_bytes(hashlib.sha256(f"rows {user}".encode()).digest()[:8], "big")
        kept = np.random.default_rng(seed).permutation(len(own))[:most]
        for place in sorted(kept.tolist()):
            rows += own[place]
            owners += [number] * len(own[place])
            records += [0 if join else number_of_piece] * len(own[place])
            number_of_piece += 1
    return saved(rows, owners, records) | {"num_users": np.int64(len(mine))}


def all_owners(
    found: list[tuple[list[str], list[int]]], end: int, length: int, bounds: list[int]
) -> dict[str, Any]:
    """One row a record, and for every bound k which records greedy bounding keeps."""
    from userdp.bounding.bound import bound
    from userdp.bounding.edges import Edges

    numbers: dict[str, int] = {}
    indptr, indices, rows = [0], list[int](), list[list[int]]()
    for users, ids in found:
        first = rows_of(ids, end, length)[:1]
        if first:
            rows += first
            indices += [numbers.setdefault(user, len(numbers)) for user in dict.fromkeys(users)]
            indptr.append(len(indices))
    edges = Edges.of(np.asarray(indptr), np.asarray(indices), num_users=len(numbers))
    kept: dict[str, NDArray[np.int64]] = {}
    for most in bounds:
        selection = bound(edges, max_records_per_user=most, method="greedy").selection
        kept[f"kept_{most}"] = np.flatnonzero(selection.multiplicity)
    everything = list(range(len(rows)))
    return saved(rows, everything, everything) | {"num_users": np.int64(len(numbers))} | kept


def prepare(
    path: Path,
    tokenizer: Any,
    out: Path,
    *,
    length: int,
    several: bool,
    bounds: list[int],
    only: str | None,
    join: bool,
    suffix: str = "",
) -> dict[str, Any]:
    """Write one set; returns its public sizes."""
    training: list[tuple[list[str], list[int]]] = []
    held_out: list[tuple[list[str], list[int]]] = []
    chosen: list[tuple[list[str], str]] = []
    for users, text in read(path, only):
        users = users if several else users[:1]
        if len({is_held_out(user) for user in users}) == 1:
            chosen.append((users, text))
    encoded = tokenizer([text for _, text in chosen], add_special_tokens=False)["input_ids"]
    for (users, _), ids in zip(chosen, encoded, strict=True):
        (held_out if is_held_out(users[0]) else training).append((users, ids))
    end = tokenizer.eos_token_id
    if several:
        train = all_owners(training, end, length, bounds)
        test = all_owners(held_out, end, length, [])
    else:
        train = one_owner(training, end, length, MOST_ROWS if join else MOST_RECORDS, join=join)
        test = one_owner(held_out, end, length, MOST_EVALUATION_ROWS, join=join)
    name = path.name.removesuffix(".jsonl.gz") + suffix
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out / f"{name}.npz",
        **{f"train_{key}": value for key, value in train.items()},
        **{f"test_{key}": value for key, value in test.items()},
        end=np.int64(end),
    )
    return {
        "set": name,
        "users": int(train["num_users"]),
        "rows": len(train["owners"]),
        "held_out_users": int(test["num_users"]),
        "held_out_rows": len(test["owners"]),
        **{key: len(value) for key, value in train.items() if key.startswith("kept_")},
    }


def main() -> None:
    """Prepare the named sets."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("tokenizer")
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--owners", choices=["first", "all"], default="first")
    parser.add_argument("--join", action="store_true", help="a user's records share rows")
    parser.add_argument("--suffix", default="", help="behind the set's name in the file's")
    parser.add_argument("--only", help="a field that says which records are used")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer)
    for path in options.sets:
        sizes = prepare(
            path,
            tokenizer,
            options.out,
            length=options.length,
            several=options.owners == "all",
            bounds=options.bounds,
            only=options.only,
            join=options.join,
            suffix=options.suffix,
        )
        print(json.dumps(sizes), flush=True)


if __name__ == "__main__":
    main()
