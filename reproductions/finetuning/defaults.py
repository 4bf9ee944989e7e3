"""Learning rates, clip rules, group sizes and schedules of private fine-tuning, tried out.

A small byte-level GPT-2 is trained on public books in the ordinary way. Then it is fine-tuned
privately on what people said, and its loss is measured on people who were held out. The figures are
in docs/tuning.md, and `userdp.defaults` is built on them.

The people are few, so the noise of few people would drown every choice. Noise is therefore that of
a run on PRICED_USERS users with PRICED_COHORT of them a step: it has the same size on the mean
update. The cohort itself is smaller, so the mean is less exact than it would be there. The numbers
promise nothing to the people in the data.

Run: python -m reproductions.finetuning.defaults PUBLIC.jsonl.gz PEOPLE.jsonl.gz --out FILE.jsonl
     records {"text": ...} and {"users": [...], "text": ...}; only records of one user are used
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gzip
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from userdp.clipping.rules import AutomaticClip, ClipRule, FlatClip, NormalisedClip
from userdp.data.tokens import TokenRows
from userdp.index import Rows
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.optimizers.by_name import make_optimizer, make_schedule
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask

LENGTH = 64
WIDTH = 96
END = 256
HELD_OUT = 60
RECORDS_OF_HELD_OUT = 3
PRICED_USERS, PRICED_COHORT, DELTA = 5000, 256, 5e-5


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of the study."""

    kind: str = "lora"
    epsilon: float = 8.0
    rate: float = 1e-3
    clip: str = "automatic"
    clip_norm: float | None = None
    cohort: int = 16
    group: int = 4
    steps: int = 60
    schedule: str = "linear"
    optimizer: str = "adamw"
    seed: int = 0

    @property
    def clip_rule(self) -> ClipRule:
        """The rule by its name."""
        if self.clip_norm is None:
            return AutomaticClip()
        kinds = {"flat": FlatClip, "normalised": NormalisedClip}
        return kinds[self.clip](clip_norm=self.clip_norm)


def arms() -> Iterator[Arm]:
    """What is tried, the most important first."""
    rates = {"lora": (1e-3, 3e-3, 1e-2, 3e-2), "full": (3e-4, 1e-3, 3e-3, 1e-2)}
    best = {"lora": 1e-2, "full": 3e-3}
    for seed in (0, 1):
        for epsilon, kind in itertools.product((8.0, 1.0), rates):
            for rate in rates[kind]:
                yield Arm(kind=kind, rate=rate, epsilon=epsilon, seed=seed)
        for kind, rate in best.items():
            for clip_norm in (0.1, 1.0, 10.0):
                yield Arm(kind=kind, rate=rate, clip="flat", clip_norm=clip_norm, seed=seed)
            for group in (1, 16):
                yield Arm(kind=kind, rate=rate, group=group, seed=seed)
        for schedule, kind in itertools.product(("constant", "cosine"), best):
            yield Arm(kind=kind, rate=best[kind], schedule=schedule, seed=seed)
        for kind in rates:
            for rate in rates[kind]:
                yield Arm(kind=kind, rate=rate, epsilon=3.0, seed=seed)
        for steps, kind in itertools.product((20, 180), best):
            yield Arm(kind=kind, rate=best[kind], steps=steps, seed=seed)
        for optimizer, kind in itertools.product(("muon", "adafactor"), best):
            yield Arm(kind=kind, rate=best[kind], optimizer=optimizer, seed=seed)


def arms_of_a_wider_model() -> Iterator[Arm]:
    """Do the best rates depend on the model's width? Fewer records a user, to save time."""
    for kind, rate in (("full", 1e-3), ("full", 3e-3), ("lora", 3e-3), ("lora", 1e-2)):
        yield Arm(kind=kind, rate=rate, group=2)
    for kind, rate in (("full", 3e-4), ("lora", 1e-3)):
        yield Arm(kind=kind, rate=rate, group=2)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def rows_of(texts: Iterable[str], owners: Iterable[int]) -> TokenRows:
    """Bytes in rows of at most LENGTH, each of one owner."""
    tokens: list[int] = []
    lengths: list[int] = []
    whose: list[int] = []
    for text, owner in zip(texts, owners, strict=True):
        encoded = [*text.encode()[:1000], END]
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
        num_users=max(whose) + 1,
    )


def people(path: Path) -> tuple[TokenRows, TokenRows]:
    """The rows to train on, and a few of each person held out."""
    records = [record for record in read(path) if len(record["users"]) == 1]
    numbers: dict[str, int] = {}
    owned = [(numbers.setdefault(r["users"][0], len(numbers)), str(r["text"])) for r in records]
    kept = [(text, owner - HELD_OUT) for owner, text in owned if owner >= HELD_OUT]
    rest: dict[int, list[str]] = {}
    for owner, text in owned:
        if owner < HELD_OUT and len(rest.setdefault(owner, [])) < RECORDS_OF_HELD_OUT:
            rest[owner].append(text)
    held_out = [(text, owner) for owner, texts in rest.items() for text in texts]
    return rows_of(*zip(*kept, strict=True)), rows_of(*zip(*held_out, strict=True))


def public_model(path: Path, steps: int, *, width: int, layers: int) -> nn.Module:
    """A byte-level GPT-2 trained in the ordinary way on public text."""
    text = "".join(str(record["text"]) for record in read(path)[:20]).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=257, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=END, eos_token_id=END,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = make_schedule(optimizer, "cosine", steps, warmup_steps=20)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (32,))
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        causal_lm_loss(model, {"input_ids": ids, "labels": ids}).mean().backward()
        optimizer.step()
        schedule.step()  # pyright: ignore[reportOptionalMemberAccess]
        optimizer.zero_grad()
    return model.eval()


def batches_of(rows: TokenRows, groups: Iterable[Rows]) -> list[Batch]:
    """One batch per group."""
    task, nothing_random = CausalTask(pad_token=END), np.random.default_rng(0)
    return [task.batch(rows, group, nothing_random) for group in groups]


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: TokenRows) -> float:
    """Mean loss of the rows."""
    groups = np.array_split(np.arange(len(rows)), 20)
    losses = [causal_lm_loss(model, batch).double() for batch in batches_of(rows, groups)]
    return float(torch.cat(losses).mean())


@functools.cache
def priced_noise(epsilon: float, steps: int) -> float:
    """The noise on the mean update, in clip norms, of the run that is priced."""
    plan = Plan.sample_users(
        num_users=PRICED_USERS, expected_cohort_size=PRICED_COHORT, group_size=1, steps=steps,
        clip_norm=1.0, epsilon=epsilon, delta=DELTA,
    )  # fmt: skip
    return plan.noise_stddev / plan.divisor


def fine_tune(base: nn.Module, rows: TokenRows, arm: Arm) -> nn.Module:
    """The model trained privately; the seed fixes adapters, cohorts and noise."""
    torch.manual_seed(arm.seed)
    model = copy.deepcopy(base)
    if arm.kind == "lora":
        model = add_lora(model, Lora(rank=8, alpha=16.0)).eval()
    plan = Plan.sample_users(
        num_users=rows.num_users,
        expected_cohort_size=arm.cohort,
        group_size=arm.group,
        steps=arm.steps,
        clip=arm.clip_rule,
        noise_multiplier=priced_noise(arm.epsilon, arm.steps) * arm.cohort,
        delta=DELTA,
    )
    optimizer = make_optimizer(model, arm.optimizer, arm.rate, weight_decay=0.0)
    schedule = make_schedule(optimizer, arm.schedule, arm.steps)
    step = PrivateStep(
        model,
        optimizer,
        plan,
        rows.index(),
        secret=RunSecret.fixed_for_tests(arm.seed),
        sequence_length=LENGTH,
    )
    for cohort in step.cohorts():
        step.apply(batches_of(rows, cohort))
        if schedule is not None:
            schedule.step()
    return model


def main() -> None:
    """Every arm that the file does not hold yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("public", type=Path)
    parser.add_argument("people", type=Path)
    parser.add_argument("--public-steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    done = options.out.read_text().splitlines() if options.out.is_file() else []
    found = [json.loads(line) for line in done]
    base = public_model(
        options.public, options.public_steps, width=options.width, layers=options.layers
    )
    chosen = arms() if options.width == WIDTH else arms_of_a_wider_model()
    train_rows, held_out = people(options.people)
    print(f"{train_rows.num_users} users, {len(held_out)} rows held out", flush=True)
    print(f"loss before {held_out_loss(base, held_out):.4f}", flush=True)
    for arm in dict.fromkeys(chosen):
        settings = dataclasses.asdict(arm)
        if any(row["arm"] == settings for row in found):
            continue
        began = time.time()
        loss = held_out_loss(fine_tune(base, train_rows, arm), held_out)
        row = {"arm": settings, "loss": loss, "seconds": round(time.time() - began)}
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
