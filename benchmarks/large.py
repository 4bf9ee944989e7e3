"""Large models on one GPU: 8B with LoRA and 3B with all weights, beside ordinary eager training.

The models have the shapes of Llama 3 8B and Llama 3.2 3B, and random weights made on the device.
The private step is the public one (`PrivateStep`) with every check on: the neighbour probe, every
batch shape compared with the plain loop, clipping, noise, the optimizer. Ordinary training is the
same batch through the model's own loss, `backward` and the optimizer, not compiled; where it does
not fit, halves of it are tried. Further sections compute clipped sums alone: with whole logits,
with checkpointed blocks, and of one user of 32,768 tokens, who runs in pieces.

Peaks are what torch allocated, from before the first step on, with the comparison of the new batch
shape; `steady_gib` leaves the first step out, and `reserved_gib` is what torch holds.

Run: python benchmarks/large.py lora-8b --json FILE     (about two minutes on an H200)
     python benchmarks/large.py full-3b --json FILE     (about two minutes)
     python benchmarks/large.py tiny                    (seconds on a CPU)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.index import UserIndex
from userdp.losses import causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.streams import RunSecret

STARTED = time.perf_counter()
LONG_USER = 32_768


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how much at a time; `rank` 0 trains all weights."""

    layers: int
    width: int
    heads: int
    inner: int
    words: int
    tied: bool
    rank: int
    rows: int
    length: int
    weights: torch.dtype
    group_size: int = 4
    key_heads: int = 8


SETTINGS = {
    "lora-8b": Setting(
        layers=32,
        width=4096,
        heads=32,
        inner=14_336,
        words=128_256,
        tied=False,
        rank=16,
        rows=16,
        length=1_024,
        weights=torch.bfloat16,
    ),
    "full-3b": Setting(
        layers=28,
        width=3072,
        heads=24,
        inner=8192,
        words=128_256,
        tied=True,
        rank=0,
        rows=16,
        length=512,
        weights=torch.float32,
        group_size=8,
    ),
    "tiny": Setting(
        layers=2,
        width=64,
        heads=4,
        inner=128,
        words=512,
        tied=True,
        rank=4,
        rows=8,
        length=16,
        weights=torch.float32,
        key_heads=2,
    ),
}


def build(setting: Setting, device: torch.device) -> nn.Module:
    """The model on the device, with adapters if it has a rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=setting.layers,
        hidden_size=setting.width,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.key_heads,
        intermediate_size=setting.inner,
        vocab_size=setting.words,
        max_position_embeddings=8192,
        tie_word_embeddings=setting.tied,
    )
    torch.set_default_dtype(setting.weights)
    with device:
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if setting.rank:
        model = add_lora(model, Lora(rank=setting.rank, alpha=2.0 * setting.rank)).to(device)
    return model.eval()


def flops_a_token(model: nn.Module, setting: Setting) -> float:
    """Arithmetic of an ordinary step: 2 a weight forwards, 2 backwards, and 2 if it is trained.

    The embedding's rows are looked up and cost nothing, unless they are the output layer too.
    """
    embedding = 0 if setting.tied else setting.words * setting.width
    matrices = [p for p in model.parameters() if p.dim() == 2]
    used = sum(p.numel() for p in matrices) - embedding
    trained = sum(p.numel() for p in matrices if p.requires_grad)
    trained -= 0 if setting.rank else embedding
    attention = 6 * setting.layers * setting.width * setting.length
    return 4.0 * used + 2.0 * trained + attention


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What is trained."""
    return [p for p in model.parameters() if p.requires_grad]


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    """Free what is unused, and begin to measure memory anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """The most memory held since the last reset."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def reserved_gib() -> float | None:
    """What torch holds now, used or not."""
    return torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else None


def seconds_of(function: Callable[[], Any], times: int) -> float:
    """Mean seconds of a call."""
    synchronise()
    start = time.perf_counter()
    for _ in range(times):
        function()
    synchronise()
    return (time.perf_counter() - start) / times


def matrix_rate() -> float | None:
    """Measured bfloat16 TFLOP/s of large square products."""
    if not torch.cuda.is_available():
        return None
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seconds_of(lambda: a @ a, 5)
    return 2 * 8192**3 / seconds_of(lambda: a @ a, 20) / 1e12


def settings_for(setting: Setting, **more: Any) -> StepSettings:
    """Products in bfloat16 on a GPU."""
    on_gpu = torch.cuda.is_available()
    return StepSettings(
        compute_dtype=torch.bfloat16 if on_gpu else None,
        microbatch_tokens=setting.rows * setting.length,
        **more,
    )


def ordinary(model: nn.Module, ids: torch.Tensor, setting: Setting, steps: int) -> dict[str, Any]:
    """Eager training of as many of the rows as fit."""
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-6, fused=ids.is_cuda)

    def step(rows: int) -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = model(input_ids=ids[:rows], labels=ids[:rows], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = setting.rows
    while rows:
        forget()
        try:
            step(rows)
            taken = seconds_of(lambda: step(rows), steps)  # noqa: B023
            return {
                "rows": rows,
                "tokens_a_second": rows * ids.shape[1] / taken,
                "peak_gib": peak_gib(),
            }
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            rows //= 2
    return {"rows": 0}


def private(model: nn.Module, ids: torch.Tensor, setting: Setting, steps: int) -> dict[str, Any]:
    """Seconds of the check and of the first step; tokens a second and memory of later ones."""
    users = setting.rows // setting.group_size
    plan = Plan.sample_users(
        num_users=users,
        expected_cohort_size=users,
        group_size=setting.group_size,
        steps=steps + 2,
        clip_norm=0.1,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    step = PrivateStep(
        model,
        torch.optim.AdamW(trainable(model), lr=1e-6, fused=ids.is_cuda),
        plan,
        UserIndex.from_owners([u for u in range(users) for _ in range(setting.group_size)]),
        settings=settings_for(setting),
        sequence_length=ids.shape[1],
        secret=RunSecret.fixed_for_tests(0),
    )
    forget()
    check_s = seconds_of(step.check_model, 1)
    found: dict[str, Any] = {"check_s": check_s, "check_peak_gib": peak_gib()}
    say("checked", found)
    forget()

    def one() -> None:
        rows = step.draw()
        step.apply({"input_ids": ids[own], "labels": ids[own]} for own in rows)

    found["first_step_s"] = seconds_of(one, 1)
    found["peak_gib"] = peak_gib()
    say("first step", found)
    seconds_of(one, 1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    taken = seconds_of(one, steps)
    return found | {
        "rows": setting.rows,
        "tokens_a_second": setting.rows * ids.shape[1] / taken,
        "steady_gib": peak_gib(),
        "reserved_gib": reserved_gib(),
        "differs": step.state_dict()["model"]["sums"]["differs"],
    }


def sums(
    model: nn.Module, ids: torch.Tensor, group_size: int, steps: int, settings: StepSettings
) -> dict[str, Any]:
    """Clipped sums alone, of users of so many rows."""
    groups = [{"input_ids": rows, "labels": rows} for rows in ids.split(group_size)]
    rule = FlatClip(clip_norm=0.1)
    forget()
    fast = FastClipping(
        model,
        trainable(model),
        rule,
        record_loss=causal_lm_loss,
        settings=settings,
        sequence_length=ids.shape[1],
        every_shape=False,
    )
    found: dict[str, Any] = {"rows": len(ids), "group_size": group_size}
    found["first_s"] = seconds_of(lambda: fast.clipped_sum(groups, rule), 1)
    found["peak_gib"] = peak_gib()
    taken = seconds_of(lambda: fast.clipped_sum(groups, rule), steps)
    return found | {"tokens_a_second": ids.numel() / taken, "reserved_gib": reserved_gib()}


def say(what: str, value: Any) -> None:
    """A line of progress."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {what}: {json.dumps(value)}", flush=True)


class Report:
    """What was found so far, on disk after every section."""

    def __init__(self, path: Path | None, seconds: float, only: list[str] | None) -> None:
        self.found: dict[str, Any] = {}
        self._path, self._until, self._only = path, STARTED + seconds, only

    def section(self, name: str, needs: float, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure, unless no time is left; a failure is said and ends nothing."""
        if self._only is not None and name not in self._only:
            return
        if time.perf_counter() + needs > self._until:
            self.note(name, {"left_out": f"needs {needs:.0f} s"})
            return
        try:
            self.note(name, measure())
        except Exception as error:
            self.note(name, {"failed": f"{type(error).__name__}: {error}"[:300]})
        forget()

    def note(self, name: str, value: Any) -> None:
        """Add one finding."""
        say(name, value)
        self.found[name] = value
        if self._path is not None:
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def main() -> None:
    """Measure one setting."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("setting", choices=SETTINGS, nargs="?", default="tiny")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100, help="begin no section after these")
    parser.add_argument("--only", nargs="+", help="these sections alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setting, steps = SETTINGS[arguments.setting], arguments.steps
    device = torch.device("cuda" if on_gpu else "cpu")
    report = Report(arguments.json, arguments.seconds, arguments.only)
    model = build(setting, device)
    generator = torch.Generator().manual_seed(1)
    shape = (2 * setting.rows, setting.length)
    ids = torch.randint(setting.words, shape, generator=generator).to(device)
    usual = ids[: setting.rows]
    rate, flops = matrix_rate(), flops_a_token(model, setting)
    report.note("model", arguments.setting)
    report.note("device", torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} cores")
    report.note("parameters", sum(p.numel() for p in model.parameters()))
    report.note("trained", sum(p.numel() for p in trainable(model)))
    report.note("gigaflops_a_token", flops / 1e9)
    report.note("matrix_tflops", rate)

    def with_share(result: dict[str, Any]) -> dict[str, Any]:
        if rate is not None and "tokens_a_second" in result:
            result["share_of_matrix_rate"] = result["tokens_a_second"] * flops / rate / 1e12
        return result

    report.section("private", 0, lambda: with_share(private(model, usual, setting, steps)))
    if on_gpu:
        torch.cuda.empty_cache()
    report.section("ordinary_eager", 4, lambda: with_share(ordinary(model, usual, setting, steps)))
    twice = replace(setting, rows=2 * setting.rows)
    long_user = ids.repeat(max(1, LONG_USER // ids.numel()), 1)
    group = setting.group_size
    sections: list[tuple[str, Any]] = [
        ("long_user", (long_user, len(long_user), 1, settings_for(setting))),
        ("checkpointed", (ids, group, steps, settings_for(twice, checkpoint_blocks=True))),
        ("whole_logits", (usual, group, steps, settings_for(setting, chunk_logits=False))),
    ]
    for name, given in sections:
        needs = 22 if on_gpu else 0
        report.section(name, needs, lambda given=given: with_share(sums(model, *given)))


if __name__ == "__main__":
    main()
