"""What the plain private step costs: one user at a time, against the ordinary batched step.

Same tiny GPT-2, same tokens, one process; times are medians of interleaved repetitions, so that a
busy machine slows both. The plain loop is the oracle, not the fast path: this shows the distance.

Run: make bench
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from userdp.clipping.plain import clipped_sum
from userdp.clipping.rules import FlatClip
from userdp.noise.draw import add_gaussian
from userdp.noise.secret import RunSecret
from userdp.updates import causal_lm_loss, mean_gradient

USERS, SEQUENCE_LENGTH = 16, 64


def measure(group_size: int, repetitions: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=2048,
            n_positions=SEQUENCE_LENGTH,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()
    parameters = list(model.parameters())
    ids = torch.randint(0, 2048, (USERS, group_size, SEQUENCE_LENGTH))
    batches = [{"input_ids": user, "labels": user} for user in ids]
    everyone = ids.flatten(0, 1)
    secret = RunSecret.from_system()

    def ordinary() -> None:
        causal_lm_loss(model, {"input_ids": everyone, "labels": everyone}).mean().backward()
        model.zero_grad()

    def plain_loop() -> None:
        total = clipped_sum(
            (mean_gradient(model, parameters, batch) for batch in batches),
            FlatClip(clip_norm=1.0),
            like=parameters,
        )
        add_gaussian(total, noise_stddev=1.0, secret=secret, step=0)

    times: dict[str, list[float]] = {"ordinary": [], "plain_loop": []}
    steps: dict[str, Callable[[], None]] = {"ordinary": ordinary, "plain_loop": plain_loop}
    for repetition in range(repetitions + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition:  # the first one warms up
                times[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return {
        "group_size": group_size,
        "ordinary_ms": medians["ordinary"],
        "plain_loop_ms": medians["plain_loop"],
        "ratio": medians["plain_loop"] / medians["ordinary"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    rows = [measure(group_size, arguments.repetitions) for group_size in (1, 4, 16)]
    for row in rows:
        print(
            f"{USERS} users x {row['group_size']:2.0f} records x {SEQUENCE_LENGTH} tokens: "
            f"ordinary {row['ordinary_ms']:.0f} ms, plain loop {row['plain_loop_ms']:.0f} ms, "
            f"ratio {row['ratio']:.2f}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
