"""The probe of a large model holds few updates at a time: it must need no more than a step does."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models_zoo
from userdp.clipping import fast
from userdp.clipping.batches.limits import stored_users
from userdp.clipping.batches.ragged import Sizes
from userdp.clipping.gradients import probes
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.losses import Batch, causal_lm_loss
from userdp.probe import neighbours
from userdp.probe.verify import UnsafeModelError, check_model
from userdp.updates import MeanGradient


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that were made and are still held."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def held_updates(monkeypatch: pytest.MonkeyPatch, *, large: int) -> float:
    """The most that the probe held with the weights, in updates, which are as large.

    The model is wide and its rows are short, so its activations count for little.
    """
    config = transformers.GPT2Config(
        n_layer=12,
        n_embd=128,
        n_head=2,
        n_positions=16,
        vocab_size=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    monkeypatch.setattr(neighbours, "_LARGE", large)
    # As on a GPU with room for the stored gradients of three users, and as with large weights,
    # whose gradients are stored by user and not by row.
    monkeypatch.setattr(fast, "stored_users", lambda *args, most=None: min(3, most or 3))
    monkeypatch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
    update = sum(p.numel() * p.element_size() for p in model.parameters())
    with Held() as held:
        assert check_model(
            model,
            None,
            sequence_length=8,
            group_size=2,
            record_loss=causal_lm_loss,
            update=MeanGradient(),
            rule=FlatClip(clip_norm=0.1),
            settings=StepSettings(),
        )
    return held.peak / update


def test_the_probe_of_a_large_model_holds_few_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    # The weights, the sum, the sum without the extra user, two users' stored gradients, and those
    # of a place of padding.
    assert held_updates(monkeypatch, large=0) < 6.5
    # Where updates are small, those of the cohort are kept, and more users share a batch.
    assert held_updates(monkeypatch, large=2**30) > 8


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    """Every record weighs more the larger the losses of the whole batch are."""
    losses = causal_lm_loss(model, batch)
    return losses * losses.detach().mean()


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("large", [0, 2**30])
def test_a_loss_that_weighs_records_by_the_batch_is_refused(
    group_size: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_LARGE", large)
    # As on a GPU: only long users are limited by the memory for their stored gradients.
    packing = fast.Packing

    def as_on_a_gpu(*args: Any, sizes: Sizes, **given: Any) -> fast.Packing:
        sizes.max_short_users = None
        return packing(*args, sizes=sizes, **given | {"max_equal_users": None})

    monkeypatch.setattr(fast, "Packing", as_on_a_gpu)
    with pytest.raises(UnsafeModelError, match="weighs a record by what else is in the batch"):
        check_model(
            models_zoo.build("gpt2 tied"),
            None,
            sequence_length=8,
            group_size=group_size,
            record_loss=weighted,
            update=MeanGradient(),
            rule=FlatClip(clip_norm=0.1),
            settings=StepSettings(),
        )


def test_a_limit_of_stored_users_is_kept() -> None:
    parameters = [torch.zeros(2**20)]
    assert stored_users(parameters, torch.float32) > 2
    assert stored_users(parameters, torch.float32, most=2) == 2
    assert stored_users(parameters, torch.float32, most=10**9) < 10**9
