"""What limits a private step: how long users' updates are, how alike, and how large the noise is.

At the public weights, the update of a user is the gradient of the mean loss over k of its rows.
With a clip norm below their lengths, all clipped updates have the length C. Their mean over many
users then has a length of about C sqrt(c), with c the mean cosine between two users. The noise on
that mean has the length sigma C sqrt(d) / M, for d weights and M users a step. C cancels. With a
clip norm that is longer than all updates, the mean is shorter by their length over C, and the noise
is not.

The data is public, and nothing covers these numbers.

Run: python -m reproductions.finetuning.limits MODEL rows/SET.npz ... [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reproductions.finetuning.compare import Bench, full_rows
from reproductions.finetuning.sets import Set
from reproductions.finetuning.settings import Setting, plan_of
from userdp.losses import causal_lm_loss
from userdp.models.load import load_model

EPSILONS = (1.0, 3.0, 8.0)


def updates(bench: Bench, found: Set, users: np.ndarray, *, k: int, length: int) -> torch.Tensor:
    """One update a line: of those users who have at least k rows."""
    device = bench.trained[0].device
    index = found.train.index()
    rows: list[torch.Tensor] = []
    for user in users.tolist():
        own = index.rows_of(user)
        if len(own) < k:
            continue
        chosen = np.random.default_rng(user).permutation(own)[:k]
        batch = full_rows(found.train, chosen, end=found.end, length=length)
        loss = causal_lm_loss(bench.model, {name: t.to(device) for name, t in batch.items()})
        gradient = torch.autograd.grad(loss.mean(), bench.trained)
        rows.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(rows)


def mean_cosine(found: torch.Tensor) -> float:
    """Over all pairs of different lines: (|sum of directions|^2 - n) / (n (n - 1))."""
    directions = found / found.norm(dim=1, keepdim=True)
    number = len(found)
    return float((directions.sum(dim=0).square().sum() - number) / (number * (number - 1)))


def describe(
    bench: Bench, found: Set, *, users: int, k: int, cohort: float, steps: int, length: int
) -> dict[str, Any]:
    """Lengths, cosine, and the signal over the noise of a step, for each epsilon."""
    some = np.random.default_rng(0).permutation(found.train.num_users)[:users]
    longer, single = (updates(bench, found, some, k=size, length=length) for size in (k, 1))
    weights = sum(parameter.numel() for parameter in bench.trained)
    norms = longer.norm(dim=1)
    cosine = mean_cosine(longer)
    told: dict[str, Any] = {
        "users": found.train.num_users,
        "looked_at": len(longer),
        "weights": weights,
        "norm": {str(share): float(norms.float().quantile(share)) for share in (0.1, 0.5, 0.9)},
        "norm_of_one_row": float(single.norm(dim=1).median()),
        "mean_cosine": cosine,
    }
    for epsilon in EPSILONS:
        setting = Setting(data="", epsilon=epsilon, k=k, cohort=cohort, steps=steps)
        plan = plan_of(setting, found, found.train.index())
        noise = plan.noise.noise_multiplier * math.sqrt(weights) / plan.divisor
        signal = math.sqrt(max(cosine, 0.0))
        told[f"epsilon {epsilon:g}"] = {
            "noise_multiplier": plan.noise.noise_multiplier,
            "signal_over_noise": signal / noise,
            "signal_over_noise_at_clip_norm_1": signal * min(1.0, float(norms.median())) / noise,
        }
    return told


def main(arguments: list[str] | None = None) -> None:
    """One line a set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--gguf-file")
    parser.add_argument("--users", type=int, default=64, help="so many are looked at")
    parser.add_argument("--rank", type=int, default=1, help="of the adapter; 0 is all weights")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--cohort", type=float, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, _ = load_model(options.model, gguf_file=options.gguf_file, device=device)
    setting = Setting(data="", rank=options.rank)
    bench = Bench(base, setting, length=options.length, compiled=False)
    lines: list[str] = []
    for path in options.rows:
        told = describe(
            bench,
            Set.read(path),
            users=options.users,
            k=options.k,
            cohort=options.cohort,
            steps=options.steps,
            length=options.length,
        )
        lines.append(json.dumps({"set": path.stem, "rank": options.rank, "k": options.k, **told}))
        print(lines[-1], flush=True)
    if options.json:
        options.json.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
