"""Muon for the matrices of hidden layers, and AdamW for everything else, as one optimizer.

Muon makes the update of a matrix orthogonal (Jordan et al. 2024). That has no meaning for biases,
and its authors advise against it for embeddings and the output layer. Muon's steps are scaled to
the size of AdamW's (Liu et al. 2025, Sec. 2.2), so one learning rate does for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import InputError


def is_hidden_matrix(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, and belongs neither to an embedding nor to the output."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    own = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set[int]()
    home = model.get_submodule(name.rpartition(".")[0])
    is_table = isinstance(home, nn.Embedding) or "lora_embedding" in name
    return parameter.ndim == 2 and not is_table and id(parameter) not in own


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers of torch that share one state and one list of parameter groups.

    The state and the groups are this object's own. So its `state_dict` is an ordinary one, and a
    schedule sets the rate of both.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.1,
        **options: Any,
    ) -> None:
        if not matrices:
            raise InputError(
                "optimizer = 'muon' trains matrices of hidden layers, and this model trains none. "
                "Use 'adamw'."
            )
        options.setdefault("adjust_lr_fn", "match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **options)
        ]
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both work on this object's state and groups."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that are there."""
        for part in self._parts:
            part.step()
