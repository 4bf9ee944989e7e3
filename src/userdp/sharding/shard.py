"""Divides a model over the ranks by rows of its weights, or takes one that was divided already."""

from __future__ import annotations

from collections.abc import Callable
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
from userdp.sharded_tensors import is_shard

if TYPE_CHECKING:
    from userdp.sharding.passes import Passes

Value = TypeVar("Value")
# Optimizers of torch that fail on shards.
_NOT_BY_ROWS = frozenset({"Adafactor"})
_passes: WeakKeyDictionary[nn.Module, Passes] = WeakKeyDictionary()


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight of the model is divided over the ranks."""
    return any(is_shard(parameter) for parameter in model.parameters())


def shard(model: nn.Module, *, ranks: Ranks | None = None) -> nn.Module:
    """The model, divided over all ranks. Make the optimizer afterwards.

    Every rank calls this with the same weights, which may still be on the CPU. On GPUs each rank's
    rows move to its own GPU. A block's weights are whole only while the block runs. With one
    process nothing happens.
    """
    ranks = ranks or Ranks.found()
    if ranks.count == 1 or is_sharded(model):
        return model
    check_shardable(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Adapters are drawn at random: every rank begins with those of the first.
    ranks.copy_from_first_(p for p in model.parameters() if p.requires_grad)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks.count,))
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


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


def check_step(
    plan: Plan,
    record_loss: RecordLoss,
    settings: StepSettings,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse steps whose passes are not those that all ranks can run together."""
    if not plan.update.is_mean_gradient or plan.halting_test is not None:
        raise InputError(
            "a sharded model is trained by the mean gradient of each user: in local training each "
            "user has weights of its own for a while, which no rank holds whole, and a filter "
            "compares all users. Train without shards: every rank then holds the whole model."
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
        # torch's part of it takes half a second to load.
        from userdp.sharding.passes import Passes
        from userdp.sharding.pieces import Piece

        for parameter in model.parameters():
            # Frozen ones, too: ranks that share a row of work would have to have the same users.
            Piece.of(parameter, ranks.rank, ranks.count)
        _passes[model] = Passes(model, ranks)
    return _passes[model]


def ending(passes: Passes | None, compute: Callable[[], Value]) -> Callable[[], Value]:
    """`compute`, which then waits until no rank needs another pass of a sharded model."""
    if passes is None:
        return compute
    ended = passes

    def run() -> Value:
        try:
            return compute()
        finally:
            ended.finish()

    return run


def first_runs(model: nn.Module, ranks: Ranks, make: Callable[[], object]) -> object:
    """What the first rank alone computes with the model; the others hand out their shards."""
    passes = passes_of(model, ranks)
    if passes is None:
        return ranks.on_first(make)

    if not ranks.is_first:
        passes.finish()
    return ranks.on_first(ending(passes, make))
