"""What a model keeps of the rows that went through it, and whether it computes at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from userdp.clipping.checks.made_up import MadeUp
from userdp.losses import RecordLoss, on_device
from userdp.models.checks import BufferGuard, trainable_parameters
from userdp.module_state import ModuleState
from userdp.sharded_tensors import leaf_of


def what_it_keeps(
    model: nn.Module, made_up: MadeUp, record_loss: RecordLoss, sequence_length: int
) -> list[str]:
    """The names of what passes leave in the model's modules; raises if it is saved with the model.

    Passes run with and without gradients. Some models write in the backward pass, or only while
    gradients are on.
    """
    guard, note = BufferGuard(model), ModuleState(model)
    device = next(model.parameters()).device
    leaves = [leaf_of(parameter) for parameter in trainable_parameters(model).values()]
    names: list[str] = []
    for length in (sequence_length, min(3, sequence_length)):
        group = made_up.group(1, length if made_up.has_tokens else 1, seed=107)
        own = on_device(group, device)
        with torch.no_grad():
            record_loss(model, own)
        names += note.changed()
    guard.check()
    # The last rows are short. That is enough here: every probe runs a backward pass of long rows.
    torch.autograd.grad(record_loss(model, own).sum(), leaves, allow_unused=True)
    names += note.changed()
    guard.check("the backward pass, or while gradients are on")
    note.restore()
    return names


def is_random(
    model: nn.Module, made_up: MadeUp, record_loss: RecordLoss, sequence_length: int
) -> bool:
    """Whether passes over the same rows differ by torch's random numbers, and by nothing else.

    A model that differs under one and the same seed remembers something: that is not chance.
    """
    device = next(model.parameters()).device
    group = made_up.group(1, sequence_length if made_up.has_tokens else 1, seed=109)
    own = on_device(group, device)
    state = ModuleState(model)
    losses: list[Tensor] = []
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            losses.append(record_loss(model, own))
            state.restore()
    return torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
