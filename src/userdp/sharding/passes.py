"""All ranks run the passes of a sharded model at the same time, however many each of them needs.

A sharded model gathers the weights of a block from all ranks just before the block runs, and frees
them afterwards. So a rank cannot run the model alone. But ranks have different users: one needs
five passes for its part of a cohort, another three, a third none; one compares a new batch shape
with the plain loop; a user's row fails in the middle of a pass. The weights that a pass gathers,
and their order, are the same for all of them. Only this is agreed on:

    before a pass the ranks say which kind they want: forward alone, with a backward pass, or none;
    the kind that is smallest of those wanted is run; whoever wants it computes, and every other
    rank hands out its shards in the order of that kind and computes nothing;
    a pass that ends early (an error, a loss without a gradient) hands out the rest.

So a rank never waits for another one for ever, and no user's data decides how often weights are
gathered on which rank: only how many passes there are, which is secret like the cohort itself.

The order of each kind is learned once, from a pass over made-up tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from userdp.errors import InputError
from userdp.ranks import Ranks
from userdp.sharded_tensors import is_shard, leaf_of, on_rest, set_leaf
from userdp.sharding.copies import WholeCopies

# The kinds of a pass. The smallest that any rank wants is run first.
FORWARD, WITH_BACKWARD, NONE = 0, 1, 2
# Tokens of the made-up row by which the order is learned.
_LEARN_TOKENS = 2


class Passes:
    """The passes of one sharded model. `finish` ends them, on all ranks together.

    `model` was divided by `fully_shard`, with its blocks and as a whole.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        if not isinstance(model, FSDPModule):
            raise InputError(
                f"{type(model).__name__} itself is not sharded, only modules inside it: apply "
                "fully_shard to the whole model last."
            )
        self._root = model
        self._model = model
        self._modules: list[FSDPModule] = []
        self._modules += [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._ranks = ranks
        self._orders: dict[int, list[int]] = {}
        # What the pass that runs has gathered so far, and its kind.
        self._gathered: list[int] = []
        self._kind: int | None = None
        # Whole weights for local training, where these are needed (`copies`).
        self.copies: WholeCopies | None = None
        # After a pass only shards are left in place, whatever the owner of the model chose.
        model.set_reshard_after_forward(True)
        self._note_leaves()
        for number, module in enumerate(self._modules):
            module.set_custom_all_gather(cast("Any", _Gather(number, self._note_gather)))
        on_rest(model, self._root.reset_iter_state)
        model.register_forward_pre_hook(self._before, prepend=True)
        self._learn()

    def _note_leaves(self) -> None:
        """Find the tensor that stands in for each shard while a layer runs."""
        shards = dict(self._model.named_parameters())
        for module in self._modules:
            module.unshard()
        for name, leaf in self._model.named_parameters():
            if leaf.dtype != shards[name].dtype:
                raise InputError(
                    f"{name!r} is gathered in {leaf.dtype} and held in {shards[name].dtype}: leave "
                    "out MixedPrecisionPolicy, and give compute_dtype instead."
                )
            if is_shard(shards[name]):
                set_leaf(shards[name], leaf)
        for module in self._modules:
            module.reshard()

    def _learn(self) -> None:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        device = parameters[0].device
        ids = torch.zeros((1, _LEARN_TOKENS), dtype=torch.int64, device=device)
        with torch.no_grad():
            self._learn_one(FORWARD, lambda: self._model(input_ids=ids))

        def with_backward() -> None:
            with torch.enable_grad():
                total = self._model(input_ids=ids).logits.float().sum()
                leaves = [leaf_of(parameter) for parameter in parameters]
                torch.autograd.grad(total, leaves, allow_unused=True)

        self._learn_one(WITH_BACKWARD, with_backward)

    def _learn_one(self, kind: int, run: Callable[[], Any]) -> None:
        # A model with weights of several dtypes may run under autocast alone.
        device = next(self._model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16):
            run()
        self._root.reset_iter_state()
        self._orders[kind], self._gathered, self._kind = self._gathered, [], None

    def _note_gather(self, number: int) -> None:
        order = None if self._kind is None else self._orders.get(self._kind)
        # Refused before anything is sent: the pass fails, and hands out the rest in order.
        if order is not None and order[len(self._gathered) :][:1] != [number]:
            raise RuntimeError(
                "a pass gathers weights in another order than the passes before it: the ranks "
                "cannot run it together. Train this model without shards."
            )
        self._gathered.append(number)

    def _before(self, module: nn.Module, args: Any) -> None:
        del module, args
        kind = WITH_BACKWARD if torch.is_grad_enabled() else FORWARD
        if kind not in self._orders:
            self._kind = kind
            return
        self._close()
        self._take_turns(kind)
        self._kind = kind

    def finish(self) -> None:
        """Return when no rank wants another pass. Every rank must call this."""
        self._close()
        self._take_turns(NONE)

    def _take_turns(self, wanted: int) -> None:
        while (chosen := self._agreed(wanted)) != wanted:
            self._hand_out(self._orders[chosen])

    def _agreed(self, wanted: int) -> int:
        return int(self._ranks.numbers([wanted]).min())

    def _close(self) -> None:
        """Hand out what the last pass of this rank did not come to; leave nothing gathered."""
        kind, done = self._kind, len(self._gathered)
        self._kind, self._gathered = None, []
        # Forgets what torch plans to gather ahead, too, which would be another order.
        self._root.reset_iter_state()
        if kind is not None:
            self._hand_out(self._orders[kind][done:])

    def _hand_out(self, order: list[int]) -> None:
        for number in order:
            self._modules[number].unshard()
            self._modules[number].reshard()
        self._gathered = []


class _Gather:
    """Gathers the weights of one module from all ranks, and says so."""

    def __init__(self, number: int, note: Callable[[int], None]) -> None:
        self._number = number
        self._note = note

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole weights."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """The whole weights, as torch itself gathers them."""
        self._note(self._number)
        return dist.all_gather_single(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )
