"""Tokens a second of local training with adapters, beside the ordinary compiled step.

The model has the shape of SmolLM2-135M with random weights, and LoRA on every linear layer. Users
train side by side, 64 on a GPU, each with 4 local steps of 4 records of 128 tokens. The ordinary
step takes the gradient of as many tokens at once, for one set of adapters, with the same compiled
blocks; on CUDA it is captured as a graph. `fedavg.py` calls this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from userdp.clipping.execute.execution import Execution
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import summation
from userdp.losses import Batch, causal_lm_loss
from userdp.models.adapters import Lora, add_lora
from userdp.models.checks import trainable_parameters
from userdp.updates.fedavg import FedAvg

LENGTH, RECORDS, LOCAL_STEPS = 128, 4, 4
CLIP = FlatClip(clip_norm=1.0)


def smollm2(*, small: bool) -> nn.Module:
    """The shape of SmolLM2-135M; `small` has two blocks and few words, to try the file out."""
    config = transformers.LlamaConfig(
        vocab_size=512 if small else 49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=2 if small else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
    )
    return add_lora(transformers.LlamaForCausalLM(config), Lora(rank=8)).eval()


def _seconds(call: Callable[[], object], device: str, repeat: int) -> float:
    found: list[float] = []
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)


def _ordinary(model: nn.Module, batch: Batch, settings: StepSettings, device: str) -> float:
    """Seconds of the gradient of the batch by the model's own adapters, and of their step."""
    parameters = list(trainable_parameters(model).values())
    execution = Execution.choose(
        model,
        causal_lm_loss,
        length=LENGTH,
        compute_dtype=settings.compute_dtype,
        compile_blocks=bool(settings.compile_blocks),
    )

    def step() -> None:
        loss = execution.losses(model, batch).mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-1e-9)  # pyright: ignore

    with execution.prepared(model):
        if device != "cuda":
            step()
            return _seconds(step, device, 3)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return _seconds(graph.replay, device, 8)


def row(*, users: int, device: str, small: bool) -> dict[str, Any]:
    """Tokens a second of both, and their ratio."""
    torch.manual_seed(0)
    model = smollm2(small=small).to(device)
    on_gpu = device == "cuda"
    settings = StepSettings(
        compute_dtype=torch.bfloat16 if on_gpu else None,
        compile_blocks=on_gpu,
        microbatch_tokens=users * RECORDS * LENGTH,
    )
    words = model.get_input_embeddings().weight.shape[0]  # pyright: ignore

    def records(number: int) -> Batch:
        ids = torch.randint(0, words, (number, LENGTH), device=device)
        return {"input_ids": ids, "labels": ids}

    cohort = [records(LOCAL_STEPS * RECORDS) for _ in range(users)]
    many = summation(
        model,
        list(trainable_parameters(model).values()),
        FedAvg(local_learning_rate=0.1, local_batch_size=RECORDS),
        CLIP,
        record_loss=causal_lm_loss,
        settings=settings,
        sequence_length=LENGTH,
    )
    first = _seconds(lambda: many.clipped_sum(cohort, CLIP), device, 1)
    assert many.trains_many_at_once  # type: ignore[attr-defined]
    at_once = _seconds(lambda: many.clipped_sum(cohort, CLIP), device, 3 if on_gpu else 1)
    tokens = users * RECORDS * LENGTH
    ordinary = _ordinary(model, records(users * RECORDS), settings, device)
    return {
        "row": "lora",
        "users": users,
        "local_steps": LOCAL_STEPS,
        "adapters": sum(p.numel() for p in trainable_parameters(model).values()),
        "tokens_a_second": LOCAL_STEPS * tokens / at_once,
        "ordinary_tokens_a_second": tokens / ordinary,
        "share_of_ordinary": LOCAL_STEPS * ordinary / at_once,
        "first_call_seconds": first,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }
