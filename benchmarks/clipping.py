"""What private clipping costs: the same tokens, one process, ratio to the best ordinary step.

Methods, all giving gradients of the same 16,384 tokens in bfloat16 (CPU: 4,096 in float32):

    ordinary   the floor: Hugging Face model, blocks compiled, whole step in one CUDA graph
    eager      ordinary training as most people run it: autocast, the model's own loss, backward
    userdp     this library's step: gradients, clipped per user, summed; of a cohort of one batch
    userdp-merged   the same with LoRA merged into its weights
    userdp-checkpointed   the same with blocks run again in the backward pass, for their memory
    plain      one user at a time (the oracle)
    vmap       per-user gradients by torch.func
    ghost      two passes: norms first, then the gradient of the reweighted loss
    opacus, opacus-ghost   Opacus per record, if it is installed (it has no users: group size 1),
               on CUDA with weights in bfloat16; ghost refuses tied weights

Times are CUDA-event medians; peak memory is that of one ungraphed step. Each setting runs in
processes of its own, which compile side by side and are timed one at a time. Captured steps take
turns of a second, so that clocks that drift do not favour one of them.

Run: python benchmarks/clipping.py            (CPU: a small version, two minutes)
     python benchmarks/clipping.py --models gpt2 --finetune full --lengths 128 --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from userdp.clipping.batches.users import Users
from userdp.clipping.execute.capture import Graph
from userdp.clipping.execute.execution import Execution
from userdp.clipping.execute.models import padded_rows, pretrained, vocabulary_size
from userdp.clipping.flat import FlatBuffer
from userdp.clipping.gradients.many_users import ManyUsers
from userdp.clipping.gradients.one_user import OneUser
from userdp.clipping.plain import clipped_sum
from userdp.clipping.rules import FlatClip
from userdp.losses import causal_lm_loss
from userdp.report import svg
from userdp.updates.mean_gradient import mean_gradient

Step = Callable[[], Any]
Variant = tuple[str, int]
SettingName = tuple[str, str, int, list[int]]

GPT2 = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 2048},
}
LLAMA = {
    "smollm2-135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "llama-1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
}
RANK = 32
CLIP = FlatClip(clip_norm=1.0)


def build(name: str, finetune: str, device: torch.device) -> nn.Module:
    """A model of the named shape with random weights."""
    torch.manual_seed(0)
    with device:
        if name in GPT2:
            # No dropout: Opacus sees activations in training mode only.
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = transformers.GPT2Config(**GPT2[name], **dropout, n_positions=1024)
            model: Any = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.LlamaConfig(
                **LLAMA[name], tie_word_embeddings=True, max_position_embeddings=2048
            )
            model = transformers.LlamaForCausalLM(config)
    if finetune == "lora":
        import peft

        targets = ["c_attn", "c_proj", "c_fc"] if name in GPT2 else "all-linear"
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules=targets, init_lora_weights=False
            ),
        )
    return model.to(device).eval()


def num_rows(tokens: int, length: int) -> int:
    """Rows of a batch."""
    return max(1, tokens // length)


class Setting:
    """One model, way of fine-tuning and sequence length, and the steps to compare on it."""

    def __init__(self, name: str, finetune: str, length: int, tokens: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else None
        self.model = build(name, finetune, self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.key = {"model": name, "finetune": finetune, "sequence_length": length}
        self.length, self.rows = length, num_rows(tokens, length)
        vocabulary = vocabulary_size(self.model)
        torch.manual_seed(1)
        self.ids = torch.randint(0, vocabulary, (self.rows, length), device=self.device)
        self.batch = {"input_ids": self.ids, "labels": self.ids}
        self.total = FlatBuffer(self.parameters, padded_rows(self.model) if self.on_gpu else None)
        self.execution = Execution.choose(
            self.model,
            causal_lm_loss,
            length=length,
            compute_dtype=self.dtype,
            compile_blocks=self.on_gpu,
        )

    def autocast(self) -> Any:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def ordinary(self) -> Step:
        def step(*_: Any) -> Tensor:
            with self.execution.prepared(self.model):
                loss = self.execution.losses(self.model, self.batch).mean()
                torch.autograd.grad(loss, self.parameters)
            return loss.detach()

        return step

    def eager(self) -> Step:
        def step(*_: Any) -> None:
            with torch.autocast(self.device.type, self.dtype or torch.float32, enabled=self.on_gpu):
                loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            for parameter in self.parameters:
                parameter.grad = None

        return step

    def users(self, group_size: int) -> Users:
        """As many whole users as the batch has rows for."""
        rows = self.rows - self.rows % group_size
        weights = torch.full((rows,), 1 / group_size, device=self.device)
        batch = {name: tensor[:rows] for name, tensor in self.batch.items()}
        return Users(batch=batch, weights=weights, count=rows // group_size)

    def userdp_merged(self, group_size: int) -> Step:
        if self.key["finetune"] != "lora":
            raise ValueError("there is no LoRA to merge")
        if self.users(group_size).count == 1:
            raise ValueError("a user that fills the batch is not computed with merged weights")
        return self.userdp(group_size, replace(self.execution, merge_lora=True))

    def userdp_checkpointed(self, group_size: int) -> Step:
        return self.userdp(group_size, replace(self.execution, checkpoint_blocks=True))

    def userdp(self, group_size: int, execution: Execution | None = None) -> Step:
        users, execution = self.users(group_size), execution or self.execution
        one_user = OneUser(self.model, self.parameters, CLIP)
        many_users = None
        if users.count > 1:
            many_users = ManyUsers(self.model, self.parameters, CLIP, users, execution=execution)

        def step(*_: Any) -> Tensor:
            self.total.zero_()
            if many_users is not None:
                return many_users(users, self.total.roomy)
            return one_user.add_clipped(one_user.gradient(users, execution), self.total.views)

        return step

    def ghost(self, group_size: int) -> Step:
        users = self.users(group_size)
        many_users = ManyUsers(self.model, self.parameters, CLIP, users, execution=self.execution)

        def step(*_: Any) -> Tensor:
            factors = (CLIP.clip_norm / many_users.norms(users)).clamp(max=1)
            with self.execution.prepared(self.model):
                losses = self.execution.losses(self.model, self.batch)
                weights = factors.repeat_interleave(group_size) / group_size
                torch.autograd.grad((losses * weights).sum(), self.parameters)
            return factors

        return step

    def by_user(self, group_size: int) -> list[dict[str, Tensor]]:
        return [{"input_ids": ids, "labels": ids} for ids in self.ids.split(group_size)]

    def plain(self, group_size: int) -> Step:
        def step(*_: Any) -> None:
            with self.autocast():
                clipped_sum(
                    (
                        mean_gradient(self.model, self.parameters, b)
                        for b in self.by_user(group_size)
                    ),
                    CLIP,
                    like=self.parameters,
                )

        return step

    def vmap(self, group_size: int) -> Step:
        weights = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

        def loss(trained: dict[str, Tensor], ids: Tensor) -> Tensor:
            def call(input_ids: Tensor, **options: Any) -> Any:
                return torch.func.functional_call(
                    self.model, trained, (), {"input_ids": input_ids, **options}
                )

            call.generation_config = None  # type: ignore[attr-defined]
            return causal_lm_loss(call, {"input_ids": ids, "labels": ids}).mean()  # type: ignore[arg-type]

        def step(*_: Any) -> None:
            ids = self.ids.view(-1, group_size, self.length)
            with self.autocast():
                gradients = torch.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
            squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
            factors = (CLIP.clip_norm / squares.sum(0).sqrt()).clamp(max=1)
            for gradient in gradients.values():
                torch.tensordot(factors, gradient, 1)

        return step

    def opacus(self, *, ghost: bool) -> Step:
        from opacus.grad_sample import GradSampleModule
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
            GradSampleModuleFastGradientClipping,
        )

        kind = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
        options = {"max_grad_norm": CLIP.clip_norm, "use_ghost_clipping": True} if ghost else {}
        wrapped = kind(self.model, batch_first=True, loss_reduction="sum", strict=False, **options)
        positions = torch.arange(self.length, device=self.device).expand(self.rows, -1)

        def losses() -> Tensor:
            logits = wrapped(input_ids=self.ids, position_ids=positions, use_cache=False).logits
            token = nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), self.ids[:, 1:], reduction="none"
            )
            return token.mean(1)

        def step(*_: Any) -> None:
            each = losses()
            if ghost:
                each.sum().backward(retain_graph=True)
                factors = wrapped.get_clipping_coef()
                wrapped.disable_hooks()
                for parameter in self.parameters:
                    parameter.grad = None
                (each * factors).sum().backward()
                wrapped.enable_hooks()
            else:
                each.sum().backward()
                samples = [p.grad_sample for p in self.parameters]
                squares = torch.stack([g.flatten(1).square().sum(1) for g in samples])
                factors = (CLIP.clip_norm / squares.sum(0).sqrt()).clamp(max=1)
                for sample in samples:
                    torch.tensordot(factors, sample, 1)
            for parameter in self.parameters:
                parameter.grad = None
                parameter.grad_sample = None

        def cleanup() -> None:
            wrapped.to_standard_module()
            self.model.float().eval()

        self.model.train()
        if self.dtype is not None:
            # Weights as well: under autocast it multiplies tensors of unlike dtype and fails.
            self.model.to(self.dtype)
        self.cleanup = cleanup
        return step

    def make(self, method: str, group_size: int) -> Step:
        """The named method's step."""
        if method == "ordinary":
            return self.ordinary()
        if method == "eager":
            return self.eager()
        if method.startswith("opacus"):
            return self.opacus(ghost=method.endswith("ghost"))
        by_users = {
            "userdp": self.userdp,
            "userdp-merged": self.userdp_merged,
            "userdp-checkpointed": self.userdp_checkpointed,
            "plain": self.plain,
            "vmap": self.vmap,
            "ghost": self.ghost,
        }
        return by_users[method](group_size)


IN_TURNS = ("ordinary", "userdp", "userdp-merged", "userdp-checkpointed")
GRAPHED = (*IN_TURNS, "ghost")
METHODS = (*GRAPHED, "eager", "plain", "vmap", "opacus", "opacus-ghost")
ATTEMPTS = 8
SECONDS_A_TURN = 1.0
# What is freed is kept for the next step (glibc): a fifth of a CPU's step, of any method, goes into
# memory that the system takes back and gives out again, and most of the noise.
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
}


def milliseconds(step: Step, repetitions: int, on_gpu: bool) -> float:
    """The median time of a step; the first is not counted."""
    return statistics.median(in_a_row(step, repetitions + 1, on_gpu)[1:])


def interleaved(steps: list[Step], repetitions: int, on_gpu: bool) -> list[float]:
    """The median time of each step.

    Steps take turns, so that slow drift touches all alike. A GPU's clock also follows the power
    that a step draws: there a turn lasts long enough to settle at the step's own clock, as it would
    in training. The first third of a turn is not counted.
    """
    times: list[list[float]] = [[] for _ in steps]
    turns = -(-repetitions // 2)
    for _ in range(turns):
        for step, own in zip(steps, times, strict=True):
            length = 3
            if on_gpu:
                (first,) = in_a_row(step, 1, on_gpu)
                length = max(length, math.ceil(1000 * SECONDS_A_TURN / first))
            own += in_a_row(step, length, on_gpu)[length // 3 :]
    return [statistics.median(own) for own in times]


def in_a_row(step: Step, times: int, on_gpu: bool) -> list[float]:
    """Milliseconds that each of so many steps takes.

    As in training, a GPU has the next when one ends: what it costs to launch a graph of thousands
    of kernels is not seen but for the first.
    """
    if on_gpu:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in itertools.pairwise(marks)]
    clock = [time.perf_counter()]
    for _ in range(times):
        step()
        clock.append(time.perf_counter())
    return [1000 * (stop - start) for start, stop in itertools.pairwise(clock)]


def matrix_rate() -> float:
    """Measured bfloat16 TFLOP/s of one large square product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    took = milliseconds(lambda: a @ a, 9, True)
    return 2 * 8192**3 / took / 1e9


def flops(setting: Setting) -> float:
    """Arithmetic of an ordinary full step: 6 per weight in a product and token, and attention."""
    inner = pretrained(setting.model)
    assert inner is not None
    config: Any = inner.config
    embedding = inner.get_input_embeddings()
    weights = sum(p.numel() for n, p in setting.model.named_parameters() if p.dim() == 2)
    positions = getattr(config, "n_positions", 0) * config.hidden_size
    tied = inner.get_output_embeddings().weight is embedding.weight
    used = weights - positions - (0 if tied else embedding.weight.numel())
    tokens = setting.rows * setting.length
    attention = 6 * config.num_hidden_layers * config.hidden_size * setting.length * tokens
    return 6.0 * used * tokens + attention


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def variants(methods: list[str], groups: list[int]) -> list[Variant]:
    """Every method with every group size it distinguishes."""
    found: list[Variant] = []
    for method in methods:
        if method in ("ordinary", "eager") or method.startswith("opacus"):
            found.append((method, 1))
        else:
            found += [(method, group) for group in groups]
    return found


def work(options: argparse.Namespace) -> None:
    """One process: compile every variant, wait for the others, then time all, alone."""
    warnings.filterwarnings("ignore")
    started = time.time()
    tokens = options.tokens
    setting = Setting(options.models[0], options.finetune[0], options.lengths[0], tokens)
    key = setting.key
    steps: dict[Variant, Step] = {}
    todo = variants(options.methods, options.groups)
    if setting.on_gpu:
        for variant in todo:
            if variant[0] in GRAPHED:
                began = time.time()
                with reported(variant):
                    steps[variant] = compiled(setting, variant)
                    took, age = time.time() - began, time.time() - started
                    print("compiled", key, variant, f"{took:.0f} s, at {age:.0f} s", flush=True)
        meet(options)
        todo = [variant for variant in todo if variant in steps or variant[0] not in GRAPHED]
    with open(options.work_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Of the others, some change the model, and on a GPU all need much memory of their own.
        together = GRAPHED if setting.on_gpu else (*IN_TURNS, "eager")
        rows = in_turns(setting, [v for v in todo if v[0] in together], steps, options)
        steps.clear()
        rows += alone(setting, [v for v in todo if v[0] not in together], options)
        rate = matrix_rate() if setting.on_gpu else None
        print("timed", key, f"at {time.time() - started:.0f} s", flush=True)
        clear()
    floor = next((row["milliseconds"] for row in rows if row["method"] == "ordinary"), None)
    for row in rows:
        row |= key
        row["unit"] = "record" if row["group_size"] == 1 else "user"
        row["ratio"] = row["milliseconds"] / floor if floor else None
        row["tokens_per_second"] = setting.rows * setting.length / row["milliseconds"] * 1000
        if rate and key["finetune"] == "full":
            row["share_of_matrix_rate"] = flops(setting) / row["milliseconds"] / 1e9 / rate
        print(json.dumps(row), flush=True)
    with open(options.work_dir / "rows.jsonl", "a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def compiled(setting: Setting, variant: Variant) -> Step:
    """A step that has run once; other processes may hold the device's memory for a moment."""
    step = setting.make(*variant)
    for attempt in range(ATTEMPTS):
        try:
            step()
            torch.cuda.synchronize()
            break
        except torch.cuda.OutOfMemoryError:
            if attempt + 1 == ATTEMPTS:
                raise
            clear()
            time.sleep(1 + attempt)
    clear()
    return step


def in_turns(
    setting: Setting, todo: list[Variant], steps: dict[Variant, Step], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of the variants whose ratios to each other matter: all are timed in the same rounds."""
    rows: list[dict[str, Any]] = []
    ready: list[Step] = []
    # One pool: a graph's memory is free for the others while it does not run.
    pool = torch.cuda.graph_pool_handle() if setting.on_gpu else None
    for variant in todo:
        with reported(variant):
            step = steps.get(variant) or setting.make(*variant)
            row = new_row(setting, variant, step)
            if setting.on_gpu:
                if options.profile:
                    profile(step, " ".join(map(str, (*setting.key.values(), *variant))))
                step = captured(step, pool)
            rows.append(row)
            ready.append(step)
    times = interleaved(ready, options.repetitions, setting.on_gpu)
    return [row | {"milliseconds": took} for row, took in zip(rows, times, strict=True)]


def captured(step: Step, pool: Any) -> Step:
    """The step as one CUDA graph."""
    graph = Graph(lambda _: step(), [], pool=pool)
    clear()
    return lambda: graph([])


def alone(
    setting: Setting, todo: list[Variant], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of variants that are timed one after the other."""
    rows: list[dict[str, Any]] = []
    for variant in todo:
        setting.cleanup = lambda: None
        clear()
        with reported(variant):
            step = setting.make(*variant)
            row = new_row(setting, variant, step)
            # Their ratios are coarse enough to see in few.
            row["milliseconds"] = milliseconds(step, -(-options.repetitions // 4), setting.on_gpu)
            rows.append(row)
        step = None
        setting.cleanup()
    return rows


def new_row(setting: Setting, variant: Variant, step: Step) -> dict[str, Any]:
    """The variant's name and the peak memory of one of its steps, not captured."""
    method, group_size = variant
    row: dict[str, Any] = {"method": method, "group_size": group_size, "peak_gib": None}
    clear()
    step()
    if setting.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if not method.startswith("userdp"):
            # What clipped gradients are added up in is there for the others.
            peak -= setting.total.values.nbytes
        row["peak_gib"] = peak / 2**30
    clear()
    return row


@contextlib.contextmanager
def reported(variant: Variant) -> Iterator[None]:
    """A variant that fails is said to, and left out."""
    try:
        yield
    except Exception as error:
        print("failed", variant, f"{type(error).__name__}: {error}"[:300], flush=True)


def profile(step: Step, title: str) -> None:
    """Print where the GPU's time goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    with recorded(activities=[ProfilerActivity.CUDA]) as run:
        step()
        torch.cuda.synchronize()
    events = sorted(run.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1000
    path = Path(os.environ.get("OUT", ".")) / "profile.txt"
    with path.open("a") as out:
        out.write(f"{title}: {total:.2f} ms in {sum(e.count for e in events)} kernels\n")
        for event in events[:120]:
            spent = event.self_device_time_total / 1000
            out.write(f"  {spent:8.3f} ms x{event.count:4d} {event.key[:110]}\n")


def meet(options: argparse.Namespace) -> None:
    """Wait until every process has compiled."""
    (options.work_dir / f"ready.{os.getpid()}").touch()
    began = time.time()
    while len(list(options.work_dir.glob("ready.*"))) < options.processes:
        if time.time() - began > options.patience:
            print("not waiting any longer", flush=True)
            return
        time.sleep(0.2)


def main() -> None:
    """Run every setting asked for, each in its own process."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=words, default=["gpt2"] if gpu else ["gpt2-tiny"])
    parser.add_argument(
        "--settings",
        type=setting_names,
        help="model:finetune:length or model:finetune:length:groups (1/4/16) instead of a grid",
    )
    parser.add_argument("--finetune", type=words, default=["lora", "full"])
    parser.add_argument("--lengths", type=counts, default=[128, 1024] if gpu else [64])
    parser.add_argument("--groups", type=counts, default=[1, 4, 16])
    parser.add_argument(
        "--methods",
        type=words,
        default=["ordinary", "eager", "userdp"]
        + ([] if gpu else ["plain", "vmap", "ghost", "opacus", "opacus-ghost"]),
    )
    parser.add_argument("--tokens", type=count, default=16384 if gpu else 4096)
    parser.add_argument("--repetitions", type=count, default=6)
    parser.add_argument("--repeats", type=count, default=1, help="processes a setting")
    parser.add_argument("--side-by-side", type=count, default=8, help="processes at once")
    parser.add_argument("--patience", type=float, default=300)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=new_file)
    parser.add_argument("--plot", type=new_file, help="an SVG of the ratios")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.work_dir is not None:
        work(options)
        return
    grid = itertools.product(options.models, options.finetune, options.lengths)
    settings: list[SettingName] = [(*setting, options.groups) for setting in grid]
    if options.settings:
        settings = [(*setting, groups or options.groups) for *setting, groups in options.settings]
    refuse_wrong(parser, settings, options)
    settings *= options.repeats
    rows: list[dict[str, Any]] = []
    width = options.side_by_side if gpu else 1
    for start in range(0, len(settings), width):
        part = settings[start : start + width]
        with tempfile.TemporaryDirectory() as scratch:
            run_side_by_side(part, Path(scratch), options)
            result = Path(scratch) / "rows.jsonl"
            if result.exists():
                rows += [json.loads(line) for line in result.read_text().splitlines()]
        if options.json:
            options.json.write_text(json.dumps(medians(rows), indent=1) + "\n")
        if options.plot:
            options.plot.write_text(picture(medians(rows)))
    if not rows:
        sys.exit("nothing could be measured")


def count(text: str) -> int:
    """A number from one on, as the command line gives it."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def counts(text: str) -> list[int]:
    """Several, between commas."""
    return [count(part) for part in text.split(",")]


def new_file(text: str) -> Path:
    """Where something is written at the end: its folder is there now."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def setting_names(text: str) -> list[tuple[str, str, int, list[int] | None]]:
    """Settings as the command line names them."""
    found: list[tuple[str, str, int, list[int] | None]] = []
    for name in text.split(","):
        try:
            model, finetune, length, *rest = name.split(":")
            groups = [count(group) for part in rest for group in part.split("/")]
            found.append((model, finetune, count(length), groups or None))
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not model:finetune:length or model:finetune:length:groups"
            ) from error
    return found


def refuse_wrong(
    parser: argparse.ArgumentParser, settings: list[SettingName], options: argparse.Namespace
) -> None:
    """End before anything runs: an unknown name, or groups that do not go into the rows."""
    asked = {
        "model": ({model for model, *_ in settings}, (*GPT2, *LLAMA)),
        "way of fine-tuning": ({finetune for _, finetune, *_ in settings}, ("lora", "full")),
        "method": (set(options.methods), METHODS),
    }
    for what, (names, known) in asked.items():
        if unknown := sorted(names - set(known)):
            parser.error(f"no such {what}: {unknown[0]!r}; there are {', '.join(known)}")
    for _, _, length, groups in settings:
        for group in groups:
            refuse_uneven(parser, options.tokens, length, group)


def refuse_uneven(
    parser: argparse.ArgumentParser, tokens: int, length: int, group_size: int
) -> None:
    """End if a batch is not made of whole users."""
    rows = num_rows(tokens, length)
    if rows % group_size:
        parser.error(f"{rows} rows of {length} tokens are not users of {group_size} rows each")


KEY = ("model", "finetune", "unit", "group_size", "sequence_length", "method")


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a setting and method: the median over its processes of every number."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    found: list[dict[str, Any]] = []
    for key, members in groups.items():
        merged: dict[str, Any] = dict(zip(KEY, key, strict=True))
        for name in members[0].keys() - set(KEY):
            values = [row[name] for row in members if row.get(name) is not None]
            numbers = all(isinstance(value, int | float) for value in values)
            merged[name] = (statistics.median(values) if numbers else values[0]) if values else None
        found.append(merged | {"processes": len(members)})
    return found


def picture(rows: list[dict[str, Any]]) -> str:
    """Bars of every private method's time as a multiple of the ordinary step's."""
    shown = [row for row in rows if row["method"] != "ordinary" and row["ratio"] is not None]
    shown.sort(key=lambda row: (row["finetune"], row["model"], row["sequence_length"]))
    entries = [
        svg.Bar(
            label=f"{row['model']} {row['finetune']} {row['sequence_length']}x{row['group_size']}",
            value=row["ratio"],
            text=f"{row['ratio']:.2f} {row['method']}",
            colour=svg.COLOURS[1 if row["method"].startswith("userdp") else 0],
        )
        for row in shown
    ]
    drawn = svg.bars(entries, title="time of a step as a multiple of the best ordinary step")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def run_side_by_side(
    settings: list[SettingName], scratch: Path, options: argparse.Namespace
) -> None:
    """Start one process a setting and wait for all."""
    # Each would start as many compilers as there are cores.
    threads = max(1, (os.cpu_count() or 1) // len(settings))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | KEEP_MEMORY | os.environ
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--models", model, "--finetune", finetune]
            + ["--lengths", str(length), "--groups", ",".join(map(str, groups))]
            + ["--methods", ",".join(options.methods), "--tokens", str(options.tokens)]
            + ["--repetitions", str(options.repetitions), "--patience", str(options.patience)]
            + ["--work-dir", str(scratch), "--processes", str(len(settings))]
            + (["--profile"] if options.profile else []),
            env=environment,
        )
        for model, finetune, length, groups in settings
    ]
    for process in running:
        process.wait()


if __name__ == "__main__":
    main()
