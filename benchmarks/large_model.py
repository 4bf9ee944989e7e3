"""Eight billion weights on one GPU: LoRA with every check on, beside ordinary eager training.

The model has the shape of Llama 3.1 8B, random weights and bfloat16. The private step is the public
one (`PrivateStep`): the neighbour probe before the first step, every batch shape compared with the
plain loop, clipping, noise and the optimizer. Ordinary training is the same batch through its
own loss and `backward`, without compiling; where it does not fit, halves of it are tried.

Run: python benchmarks/large_model.py [--json FILE]   (without a GPU: a tiny model)
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.index import UserIndex
from userdp.models.load import Lora, add_lora
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
    },
    "llama-3b": {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
}
LENGTH = 1_024


def build(name: str, rank: int, device: torch.device) -> nn.Module:
    """The model with adapters, frozen weights in bfloat16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPES[name], max_position_embeddings=8192, tie_word_embeddings=False
    )
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return add_lora(model, Lora(rank=rank, alpha=2.0 * rank)).to(device).eval()


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float | None:
    """The most memory held since the last reset."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def reset_peak() -> None:
    """Forget what was held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def private(model: nn.Module, ids: torch.Tensor, group_size: int, steps: int) -> dict[str, Any]:
    """Seconds of the check and of the first step; tokens a second and memory of later ones."""
    users = len(ids) // group_size
    plan = Plan.sample_users(
        num_users=users,
        expected_cohort_size=users,
        group_size=group_size,
        steps=steps + 3,
        clip_norm=0.1,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    step = PrivateStep(
        model,
        torch.optim.AdamW(trainable, lr=1e-4, fused=torch.cuda.is_available()),
        plan,
        UserIndex.from_owners([u for u in range(users) for _ in range(group_size)]),
        settings=StepSettings(compute_dtype=torch.bfloat16 if ids.is_cuda else None),
        sequence_length=ids.shape[1],
        secret=RunSecret.fixed_for_tests(0),
    )
    times = [time.perf_counter()]

    def lap() -> None:
        synchronise()
        times.append(time.perf_counter())

    reset_peak()
    step.check_model()
    lap()
    check_peak = peak_gib()
    reset_peak()
    for number, cohort in enumerate(step.cohorts()):
        step.apply({"input_ids": ids[rows], "labels": ids[rows]} for rows in cohort)
        if number in (0, 2, steps + 2):
            lap()
    taken = times[4] - times[3]
    return {
        "check_s": times[1] - times[0],
        "check_peak_gib": check_peak,
        "first_step_s": times[2] - times[1],
        "tokens_a_second": steps * ids.numel() / taken,
        "peak_gib": peak_gib(),
    }


def ordinary(model: nn.Module, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """The same for eager training of as many of the rows as fit."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    rows = len(ids)
    while rows:
        reset_peak()
        try:
            for number in range(steps + 1):
                if number == 1:
                    synchronise()
                    start = time.perf_counter()
                model(input_ids=ids[:rows], labels=ids[:rows], use_cache=False).loss.backward()
                for parameter in trainable:
                    parameter.grad = None
            synchronise()
            seconds = time.perf_counter() - start
            return {
                "rows": rows,
                "tokens_a_second": steps * rows * ids.shape[1] / seconds,
                "peak_gib": peak_gib(),
            }
        except torch.OutOfMemoryError:
            for parameter in trainable:
                parameter.grad = None
            rows //= 2
    return {"rows": 0}


def main() -> None:
    """Measure one shape."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=SHAPES, default="llama-8b" if on_gpu else "tiny")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    length, rows = (LENGTH, 16) if on_gpu else (16, 8)
    model = build(arguments.model, arguments.rank, device)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        SHAPES[arguments.model]["vocab_size"], (rows, length), generator=generator
    ).to(device)
    found = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "rank": arguments.rank,
        "group_size": arguments.group_size,
        "sequence_length": length,
        "rows": rows,
        # First, while nothing else holds memory.
        "ordinary_eager": ordinary(model, ids, arguments.steps),
        "private": private(model, ids, arguments.group_size, arguments.steps),
    }
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
