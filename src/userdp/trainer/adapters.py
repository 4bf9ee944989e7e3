"""Adapters that another library loaded: what was spent on them must be known."""

from __future__ import annotations

from torch import nn

from userdp.errors import InputError
from userdp.history import history_of


def refuse_unknown_adapter(model: nn.Module) -> None:
    """Refuse trained adapters of which nobody knows what was spent on them.

    An adapter that another library loaded does not say where it came from. A new one has B = 0.
    """
    if history_of(model).all_entries():
        return
    for name, weight in model.named_parameters():
        if "lora_B" in name and bool(weight.detach().count_nonzero()):
            raise InputError(
                "the model has a trained adapter, and what was spent on it is not known: give the "
                "adapter's directory as model=, so that its record is read."
            )
