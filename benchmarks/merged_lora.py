"""Does LoRA train as well when it is merged into the weights, in bfloat16?

The merged weight W + s B A is rounded as a whole, so that an update far below W's own rounding is
not seen by the forward pass until it has grown. Here a small byte-level GPT-2 is trained on public
books in float32 and then, privately, its adapters on other people's text in bfloat16: merged and
not, with the same cohorts and the same noise. Reported: the loss on users held out, in float32.

Run: python benchmarks/merged_lora.py PUBLIC.jsonl.gz PEOPLE.jsonl.gz [--json FILE]
     records {"text": ...} and {"users": [...], "text": ...}
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.data.tokens import TokenRows
from userdp.index import Rows
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask

LENGTH = 64
END = 256


def batches_of(rows: TokenRows, groups: Iterable[Rows]) -> list[Batch]:
    task, nothing_random = CausalTask(pad_token=END), np.random.default_rng(0)
    return [task.batch(rows, group, nothing_random) for group in groups]


HELD_OUT = 40


def read(path: Path) -> list[dict[str, object]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def rows_of(texts: list[str], owners: list[int]) -> TokenRows:
    """Bytes in rows of at most LENGTH, each of one owner."""
    tokens: list[int] = []
    lengths: list[int] = []
    whose: list[int] = []
    for text, owner in zip(texts, owners, strict=True):
        encoded = [*text.encode()[:2000], END]
        for start in range(0, len(encoded), LENGTH):
            row = encoded[start : start + LENGTH]
            if len(row) > 1:
                tokens += row
                lengths.append(len(row))
                whose.append(owner)
    return TokenRows(
        tokens=np.asarray(tokens, np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=np.asarray(whose, np.int64),
        num_users=max(owners) + 1,
    )


def public_model(path: Path, steps: int) -> nn.Module:
    """A byte-level GPT-2 trained in the ordinary way on public text."""
    text = "".join(str(record["text"]) for record in read(path)[:20]).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=257, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=END, eos_token_id=END,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (32,))
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        causal_lm_loss(model, {"input_ids": ids, "labels": ids}).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: TokenRows) -> float:
    """Mean loss of the rows, in the weights' own float32."""
    losses = [
        causal_lm_loss(model, batch).double()
        for batch in batches_of(rows, np.array_split(np.arange(len(rows)), 20))
    ]
    return float(torch.cat(losses).mean())


def fine_tune(
    base: nn.Module, rows: TokenRows, *, merge: bool, rate: float, steps: int, seed: int
) -> nn.Module:
    """The model with adapters trained privately; the seed fixes cohorts and noise."""
    torch.manual_seed(1)
    model = add_lora(copy.deepcopy(base), Lora(rank=8, alpha=16.0)).eval()
    plan = Plan.sample_users(
        num_users=rows.num_users, expected_cohort_size=12, group_size=4, steps=steps,
        clip_norm=0.3, noise_multiplier=0.5, delta=1e-3,
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    step = PrivateStep(
        model,
        torch.optim.AdamW(trained, lr=rate, weight_decay=0.0),
        plan,
        rows.index(),
        settings=StepSettings(compute_dtype=torch.bfloat16, merge_lora=merge),
        secret=RunSecret.fixed_for_tests(seed),
        sequence_length=LENGTH,
    )
    for cohort in step.cohorts():
        step.apply(batches_of(rows, cohort))
    return model


def main() -> None:
    """Every learning rate and seed, merged and not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("public", type=Path)
    parser.add_argument("people", type=Path)
    parser.add_argument("--public-steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", default="1e-5,1e-4,1e-3")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    base = public_model(options.public, options.public_steps)
    records = [r for r in read(options.people) if len(r["users"]) == 1]  # type: ignore[arg-type]
    numbers: dict[str, int] = {}
    owners = [numbers.setdefault(r["users"][0], len(numbers)) for r in records]  # type: ignore[index]
    texts = [str(record["text"]) for record in records]
    kept = [(t, o - HELD_OUT) for t, o in zip(texts, owners, strict=True) if o >= HELD_OUT]
    rest = [(t, o) for t, o in zip(texts, owners, strict=True) if o < HELD_OUT]
    train_rows = rows_of(*map(list, zip(*kept, strict=True)))  # type: ignore[arg-type]
    held_out = rows_of(*map(list, zip(*rest, strict=True)))  # type: ignore[arg-type]
    found = [{"rate": None, "loss": held_out_loss(base, held_out)}]
    print(json.dumps(found[0]), flush=True)
    for rate in map(float, options.rates.split(",")):
        for seed in range(options.seeds):
            for merge in (False, True):
                began = time.time()
                model = fine_tune(
                    base, train_rows, merge=merge, rate=rate, steps=options.steps, seed=seed
                )
                row = {
                    "rate": rate,
                    "seed": seed,
                    "merged": merge,
                    "steps": options.steps,
                    "loss": held_out_loss(model, held_out),
                    "seconds": round(time.time() - began),
                }
                found.append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
