"""Which parameters are clipped together if each layer is clipped on its own.

Both paths read the partition here. It is a part of the rule and depends on no data.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from userdp.clipping.rules import ClipRule


class Layers:
    """The number of each parameter's layer by a clip rule; all are one if the rule is flat."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        groups = clip_groups(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._by_module = [groups[id(parameter)] for parameter in parameters]
        self._names = [names[id(parameter)] for parameter in parameters]

    def by(self, rule: ClipRule) -> list[int]:
        """In the order of the parameters; raises if the rule does not fit the model."""
        if not rule.by_layer:
            return [0] * len(self._names)
        found = rule.vectors(self._names)
        numbers = self._by_module if found is None else found
        # Raises where a rule has norms for another number of layers.
        rule.shares(max(numbers) + 1)
        return numbers


def clip_groups(model: nn.Module) -> dict[int, int]:
    """The number of each trainable parameter's layer, by the parameter's id.

    A layer is a module that owns trainable parameters. The parameters of modules below it count as
    its own. There is one exception: a module is not a layer if everything it owns is also listed by
    a module without children (BERT's head lists the bias of its decoder). A parameter that several
    layers share belongs to the first.
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
