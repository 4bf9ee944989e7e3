"""LoRA adapters: which modules get one, and what of it is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import peft
import torch
import transformers
from torch import nn

from userdp.errors import InputError
from userdp.models.heads import head_of, lora_task
from userdp.names.tasks import TaskName


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on the named modules ("all-linear": every linear layer but the head).

    With `freeze_a`, only B of every product B A is trained, and A stays as it was drawn. Then the
    noise on B enters the weights as it is; with two trained factors the noise of one is multiplied
    by that of the other. A comes from a fixed seed, so it is the same whenever a run goes on.
    Reference: Hu et al. 2021; with user-level privacy, Chua et al. 2024, Sec. 5; one frozen factor,
    Sun et al. 2024 (FFA-LoRA).
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = "all-linear"
    freeze_a: bool = False


def add_lora(model: nn.Module, lora: Lora, *, task: TaskName = "causal") -> nn.Module:
    """The model with trainable adapters. Everything else is frozen, but for a head for classes."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    # What fails may leave some layers replaced.
    layers = _linear_layers(model)
    head = head_of(model) if task == "classification" else []
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        lora_dropout=0.0,
        # GPT-2's Conv1D stores its weight transposed, and peft must be told.
        fan_in_fan_out=any(
            isinstance(module, transformers.pytorch_utils.Conv1D) for module in model.modules()
        ),
        task_type=lora_task(task),
        # peft by itself knows heads of two names only, and adapts what lies beside them.
        modules_to_save=head or None,
        exclude_modules=rf"({'|'.join(head)})(\..*)?" if head else None,
    )
    try:
        adapted = peft.get_peft_model(model, settings)  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError) as error:
        raise InputError(f"LoRA targets {targets!r}: {first_line(error)} {layers}") from error
    if lora.freeze_a:
        _freeze_a(adapted)
    return adapted


def _linear_layers(model: nn.Module) -> str:
    """What the model's linear layers are called, in a sentence."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    found = {name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, kinds)}
    return (
        f"Its linear layers are called {', '.join(sorted(found))}: name those to adapt in a list, "
        "[model.lora] targets = ['one', 'other']."
    )


def _freeze_a(adapted: nn.Module) -> None:
    """Draw every A from a seed of its own, which is public, and freeze it."""
    if any(len(getattr(module, "lora_embedding_A", ())) for module in adapted.modules()):
        raise InputError(
            "freeze_a: the adapter of an embedding begins with A = 0 and would learn nothing. Take "
            "the embedding out of the LoRA targets, or leave freeze_a out."
        )
    for name, weight in adapted.named_parameters():
        if "lora_A" not in name.split("."):
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        # As peft draws it: uniform, with the variance 1 / (3 inputs).
        bound = weight[0].numel() ** -0.5
        uniform = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_((2 * uniform - 1) * bound)
        weight.requires_grad_(False)


def first_line(error: BaseException) -> str:
    """What an error of a library says first, with its cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Some libraries announce the cause on the first line and name it on the second.
    return " ".join(part.strip() for part in lines[: 2 if lines[0].endswith(":") else 1])
