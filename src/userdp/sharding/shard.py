"""Divides a model over the ranks by rows of its weights, or takes one that was divided already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from userdp.clipping.execute.checkpoint import blocks_of
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import RecordLoss, causal_lm_loss
from userdp.models.proven import is_proven
from userdp.models.quantised import quantisation_of
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.sharded_tensors import device_of, is_shard

if TYPE_CHECKING:
    from userdp.sharding.passes import Passes

Value = TypeVar("Value")
# Optimizers of torch that fail on shards.
_NOT_BY_ROWS = frozenset({"Adafactor"})
_passes: WeakKeyDictionary[nn.Module, Passes] = WeakKeyDictionary()


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight of the model is divided over the ranks."""
    return any(is_shard(parameter) for parameter in model.parameters())


def shard(model: nn.Module, *, ranks: Ranks | None = None, trained: bool = True) -> nn.Module:
    """The model, divided over all ranks. Make the optimizer afterwards.

    Every rank calls this with the same weights, which may still be on the CPU. On GPUs each rank's
    rows move to its own GPU. A block's weights are whole only while the block runs. With one
    process nothing happens.

    With `trained=False` only frozen weights are divided: local training needs whole adapters.
    """
    ranks = ranks or Ranks.found()
    if ranks.count == 1 or is_sharded(model):
        return model
    check_shardable(model)
    device = device_of(model, sharded=True)
    check_backend(device.type)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Adapters are drawn at random: every rank begins with those of the first.
    ranks.copy_from_first_(p for p in model.parameters() if p.requires_grad)
    mesh = init_device_mesh(device.type, (ranks.count,))
    whole = {p for p in model.parameters() if p.requires_grad and not trained}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    return model


def divides_trained(model: nn.Module, plan: Plan) -> bool:
    """Whether the trained weights of the model are divided for this plan, too (`copies`)."""
    has_base = any(not parameter.requires_grad for parameter in model.parameters())
    return plan.update.is_mean_gradient or not has_base


def check_shardable(model: nn.Module) -> None:
    """Refuse a model whose passes might gather weights in an order that depends on the rows."""
    if not hasattr(dist, "reduce_scatter_single"):
        raise InputError(f"torch {torch.__version__} cannot shard for userdp: use 2.13 or newer.")
    if not is_proven(model):
        raise InputError(
            f"{type(model).__name__} cannot be sharded here: only decoders of an architecture that "
            "is proven by tests can be, since all ranks must run the same layers for any rows. "
            "Train it without shards: every rank then holds the whole model."
        )
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None and parameter.device.type != mesh.device_type:
            raise InputError(
                f"the shards lie on {parameter.device.type} and the ranks compute on "
                f"{mesh.device_type}: sums and noise are made where the shards are. Leave out "
                "CPUOffloadPolicy."
            )
    if quantisation_of(model) is not None:
        raise InputError(
            "a quantised model cannot be sharded: its weights are no rows of numbers. Leave out "
            "quantize or shard."
        )


def check_backend(device: str) -> None:
    """Refuse shards on GPUs that only gloo connects: torch ends such a process without a word."""
    if device == "cuda" and f"{device}:gloo" in str(dist.get_backend_config()):
        raise InputError(
            "shards on GPUs over gloo: torch cannot gather them. Use NCCL, with one rank on each "
            "GPU: leave init_process_group out, or give it 'cpu:gloo,cuda:nccl'."
        )


def prepare_step(
    passes: Passes,
    model: nn.Module,
    plan: Plan,
    record_loss: RecordLoss,
    settings: StepSettings,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse steps whose passes are not those that all ranks can run together."""
    if plan.halting_test is not None:
        raise InputError(
            "a sharded model with a filter: the filter compares the whole gradients of all users, "
            "and every rank would have to hold them. Train without shards."
        )
    if plan.update.local_training is None and not plan.update.is_mean_gradient:
        raise InputError(
            f"a sharded model with update {plan.update.name!r}: only mean gradients and local "
            "training are known here. Train without shards."
        )
    if record_loss is not causal_lm_loss:
        raise InputError(
            "a sharded model is trained by causal_lm_loss alone: another loss may run the model "
            "more than once, and the ranks could not follow. Train without shards."
        )
    if type(optimizer).__name__ in _NOT_BY_ROWS:
        raise InputError(
            f"{type(optimizer).__name__} cannot train a sharded model: it has no way to take means "
            "over rows that lie on several ranks. Use AdamW, Muon or SGD."
        )
    if settings.compile_blocks:
        raise InputError(
            "compile_blocks=True with a sharded model: gathering weights cannot be captured. Leave "
            "compile_blocks out."
        )
    # An earlier run on this model may have left its own.
    passes.copies = None
    if not plan.update.is_mean_gradient:
        from userdp.sharding.copies import copies_of

        passes.copies = copies_of(model)


def passes_of(model: nn.Module, ranks: Ranks) -> Passes | None:
    """What makes all ranks run the model together; None if the model is not sharded."""
    if not is_sharded(model):
        return None
    if model not in _passes:
        if ranks.count == 1 or not dist.is_initialized():
            raise InputError(
                "the model is sharded, and this process trains alone: start all ranks with "
                "torchrun, or train a model that is not sharded."
            )
        check_shardable(model)
        check_backend(next(model.parameters()).device.type)
        # torch's part of it takes half a second to load.
        from userdp.sharding.passes import Passes
        from userdp.sharding.pieces import Piece

        for parameter in model.parameters():
            # Frozen ones, too: ranks that share a row of work would have to have the same users.
            Piece.of(parameter, ranks.rank, ranks.count)
        _passes[model] = Passes(model, ranks)
    return _passes[model]


def ending(passes: Passes | None, compute: Callable[[], Value]) -> Callable[[], Value]:
    """`compute`, which then waits until no rank needs another pass of a sharded model.

    All ranks call it together. Where whole weights are needed, all of them have these inside.
    """
    if passes is None:
        return compute
    ended = passes

    def run() -> Value:
        try:
            with nullcontext() if ended.copies is None else ended.copies.in_place():
                return compute()
        finally:
            ended.finish()

    return run


def computing(passes: Passes | None, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """What stands for these parameters inside `ending`: themselves, or whole copies."""
    if passes is None or passes.copies is None:
        return list(parameters)
    return passes.copies.of(parameters)


def first_runs(model: nn.Module, ranks: Ranks, make: Callable[[], object]) -> object:
    """What the first rank alone computes with the model; the others hand out their shards."""
    passes = passes_of(model, ranks)
    if passes is None:
        return ranks.on_first(make)

    if not ranks.is_first:
        passes.finish()
    return ranks.on_first(ending(passes, make))
