"""Table 1 out of the ledgers of runs that charge for every round and train nothing.

Every run is `userdp train --dry-run` of FedAvg, and its epsilon is what `userdp account` reads from
the ledger by the moments accountant. A round is one row of the ledger.

Run: python -m reproductions.mcmahan2018.table_1 --out DIR [--rounds 10000] [--row 0]
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.models.words import word_tokenizer

# Users, expected users a round, noise; epsilon after 1, 10, ... 10^6 rounds at delta = users^-1.1.
ROWS = [
    (10**5, 10**2, 1.0, "0.97 0.98 1.00 1.07 1.18 2.21 7.50"),
    (10**6, 10**1, 1.0, "0.68 0.69 0.69 0.69 0.69 0.72 0.73"),
    (10**6, 10**3, 1.0, "1.17 1.17 1.20 1.28 1.39 2.44 8.13"),
    (10**6, 10**4, 1.0, "1.73 1.92 2.08 3.06 8.49 32.38 187.01"),
    (10**6, 10**3, 3.0, "0.47 0.47 0.48 0.48 0.49 0.67 1.95"),
    (10**9, 10**3, 1.0, "0.84 0.84 0.84 0.85 0.88 0.88 0.88"),
]


def prepare(place: Path) -> None:
    """A model and a store of two users: a dry run reads neither."""
    if place.exists():
        return
    place.mkdir(parents=True)
    write_store(
        [Record("the cat", (f"user {n}",), f"record {n}") for n in range(2)],
        place / "store",
        key=secrets.token_bytes(32),
    )
    tokenizer = word_tokenizer(["the", "cat"])
    tokenizer.save_pretrained(place / "model")
    config = WordLSTMConfig(vocab_size=len(tokenizer), embedding_size=2, state_size=2)
    WordLSTM(config).save_pretrained(place / "model")


def epsilon(place: Path, row: int, rounds: int) -> float:
    """What the ledger of a dry run of so many rounds says, by the moments accountant."""
    users, sampled, noise, _ = ROWS[row]
    path = place / f"row {row}, {rounds} rounds.toml"
    path.write_text(f"""# userdp train "{path.name}" --out RUN --dry-run
[data]
store = "{place / "store"}"
[model]
path = "{place / "model"}"
[privacy]
num_users = {users}
expected_cohort_size = {sampled}
clip_norm = 15.0
noise_multiplier = {noise}
delta = {users**-1.1!r}
[training]
steps = {rounds}
update = "fedavg"
local_learning_rate = 6.0
optimizer = "sgd"
learning_rate = 1.0
schedule = "constant"
""")
    run = path.with_suffix("")
    _userdp("train", path, "--out", run, "--dry-run")
    told = _userdp("account", run, "--accountant", "moments", "--unfinished")
    assert told["steps"] == rounds
    return told["epsilon"]


def _userdp(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "userdp", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print each entry beside the paper's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, action="append")
    parser.add_argument("--row", type=int, action="append")
    options = parser.parse_args()
    prepare(options.out)
    for rounds in options.rounds or [10_000]:
        for row in options.row or range(len(ROWS)):
            printed = ROWS[row][-1].split()[len(str(rounds)) - 1]
            begun = time.monotonic()
            found = epsilon(options.out, row, rounds)
            ours = f"{found:.{len(printed.partition('.')[2])}f}"
            result = {"row": row, "rounds": rounds, "paper": printed, "ours": ours}
            print(json.dumps(result | {"seconds": round(time.monotonic() - begun, 1)}), flush=True)


if __name__ == "__main__":
    main()
