"""How much faster several ranks are than one, and what they send each other.

    PYTHONPATH=src python benchmarks/scaling.py [--ranks 2] [--rounds 5] [--quick] [--out FILE]

Each rank is a process with one thread, on the CPU over gloo. The same steps of a private run (the
same users, the same noise) are timed on one rank and on several, in turns, because other work on
the machine slows both down. Told are the users a second of each, their ratio, and the bytes that a
rank hands to the reduction in a step, beside the bytes of the trained parameters.

Give it as many idle cores as there are ranks. On a busy machine `cpu_ratio` tells more: users a
second of processor time of the busiest rank, which other work does not slow down.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

USERS, GROUP = 2_000, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(quick=given.quick, rounds=given.rounds)
        return
    found = compared(given.ranks, rounds=given.rounds, quick=given.quick)
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


def compared(ranks: int, *, rounds: int, quick: bool) -> dict[str, Any]:
    """The rates of one rank and of several, both told by the processes themselves."""
    both = [Launched(1, rounds, quick), Launched(ranks, rounds, quick)]
    times: list[list[dict[str, float]]] = [[], []]
    for _ in range(rounds):
        for launched, told in zip(both, times, strict=True):
            told.append(launched.round())
    ended = [launched.end() for launched in both]
    one, several = (
        {
            "users_per_second": max(told["users"] / told["seconds"] for told in rows),
            "users_per_cpu_second": statistics.median(
                told["users"] / told["busiest_cpu_seconds"] for told in rows
            ),
        }
        for rows in times
    )
    wire = ended[1]
    return {
        "ranks": ranks,
        "parameters": wire["parameters"],
        "one_rank": one,
        "several_ranks": several,
        "ratio": several["users_per_second"] / one["users_per_second"],
        "cpu_ratio": several["users_per_cpu_second"] / one["users_per_cpu_second"],
        "bytes_a_step": wire["bytes_a_step"],
        "parameter_bytes": wire["parameters"] * 4,
        "bytes_over_parameters": wire["bytes_a_step"] / (wire["parameters"] * 4),
        "weights_differ_by": abs(ended[0]["norm"] - wire["norm"]) / ended[0]["norm"],
    }


class Launched:
    """The ranks of one setting. They take the steps of a round when they are told to."""

    def __init__(self, count: int, rounds: int, quick: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--worker", "--rounds", str(rounds)]
        self._ranks = [
            subprocess.Popen(
                [*command, "--quick"] if quick else command,
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        self._lines()

    def _lines(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit("a rank ended: see its error above.")
            found.append(json.loads(line))
        return found

    def round(self) -> dict[str, float]:
        """One round of steps on all ranks: the time of the slowest."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        told = self._lines()
        return {
            "users": sum(line["users"] for line in told),
            "seconds": max(line["seconds"] for line in told),
            "busiest_cpu_seconds": max(line["cpu_seconds"] for line in told),
        }

    def end(self) -> dict[str, float]:
        """What the first rank tells at the end."""
        told = self._lines()
        for rank in self._ranks:
            rank.wait(60)
        return told[0]


def work(*, quick: bool, rounds: int) -> None:
    """One rank: warm up, then a round of steps for every line on stdin."""
    import torch
    import transformers

    from userdp import Plan, PrivateStep, UserIndex
    from userdp.ranks import Ranks
    from userdp.streams import RunSecret

    torch.set_num_threads(1)
    ranks = Ranks.found()
    width, layers, length, cohort, steps = (32, 1, 16, 16, 2) if quick else (192, 4, 64, 128, 2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=512,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()
    rows = torch.randint(512, (USERS * GROUP, length))
    warm = 2
    plan = Plan.sample_users(
        num_users=USERS,
        expected_cohort_size=cohort,
        group_size=GROUP,
        steps=warm + rounds * steps,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners([row // GROUP for row in range(len(rows))]),
        sequence_length=length,
        secret=RunSecret.fixed_for_tests(0),
    )
    step.check_model()

    def take() -> int:
        groups = step.draw()
        step.apply({"input_ids": rows[own], "labels": rows[own]} for own in groups)
        return len(groups)

    for _ in range(warm):
        take()
    _tell({"ready": 1.0})
    sent = ranks.bytes_added_up
    for _ in range(rounds):
        if not sys.stdin.readline():
            # Whoever asked is gone.
            return
        began, busy = time.perf_counter(), time.process_time()
        users = sum(take() for _ in range(steps))
        _tell(
            {
                "users": users,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - busy,
            }
        )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    _tell(
        {
            "bytes_a_step": (ranks.bytes_added_up - sent) / (rounds * steps),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "norm": float(weights.double().norm()),
        }
    )
    Ranks.leave()


def _tell(numbers: dict[str, float]) -> None:
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
