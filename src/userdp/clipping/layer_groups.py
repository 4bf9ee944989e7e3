"""Which parameters are clipped together when each layer is clipped on its own.

Both paths read the partition here: it defines the rule and touches no data.
"""

from __future__ import annotations

from torch import nn


def clip_groups(model: nn.Module) -> dict[int, int]:
    """Trainable parameter (by id) -> the number of its layer; a shared one belongs to the first.

    A layer is a module that owns trainable parameters. If it has modules below it, theirs count as
    its own, unless all it owns is listed again from one of them (BERT's head lists the bias of its
    decoder).
    """
    owned_by_leaves = {
        id(parameter)
        for module in model.modules()
        if not any(module.children())
        for parameter in module._parameters.values()
    }
    numbers: dict[int, int] = {}

    def visit(module: nn.Module) -> None:
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        listed_again = any(module.children()) and all(id(p) in owned_by_leaves for p in own)
        if not own or listed_again:
            for child in module.children():
                visit(child)
            return
        number = max(numbers.values(), default=-1) + 1
        for parameter in module.parameters():
            if parameter.requires_grad:
                numbers.setdefault(id(parameter), number)

    visit(model)
    return numbers
