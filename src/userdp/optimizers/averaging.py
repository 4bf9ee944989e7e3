"""An average of the weights over the steps, to be released instead of the last weights.

Under privacy the last steps are noisy, and an average of the weights has less noise. Every weight
that is averaged comes after the noise, so the average is post-processing and costs nothing
(De et al. 2022, Sec. 3; Shejwalkar et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from userdp.errors import InputError
from userdp.models.checks import trainable_parameters
from userdp.sharded_tensors import put_whole


class WeightAverage:
    """The exponential moving average of a model's trained weights, corrected for its beginning.

    After t steps it is the sum of (1 - d) d^(t - i) w_i over i = 1 to t, divided by 1 - d^t, where
    d = `decay` and w_i are the weights after step i. So the weights before the first step have no
    part in it. It is kept in float32 or, if the weights are wider, in their dtype.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(model, decay=0.5)
    >>> for weight in (3.0, 6.0):
    ...     _ = nn.init.constant_(model.weight, weight)
    ...     average.update()
    >>> average.put_into_model()
    >>> model.weight.item()
    5.0
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"ema={decay:g}: a number between 0 and 1, such as 0.99.")
        self.decay = decay
        self._weights = trainable_parameters(model)
        self._updates = 0
        self._values: dict[str, Tensor] = {
            name: torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            for name, weight in self._weights.items()
        }

    def follow(
        self,
        model: nn.Module,
        divide: Callable[[Mapping[str, Any], Tensor], dict[str, Any]],
    ) -> None:
        """Go on with the model's weights after they were divided over ranks, as `divide` says."""
        self._weights = trainable_parameters(model)
        for name, weight in self._weights.items():
            self._values |= divide({name: self._values[name]}, weight)

    @torch.no_grad()
    def update(self) -> None:
        """Count the model's weights as those after one more step."""
        self._updates += 1
        # The division by 1 - d^t is in this share. At the first step it is 1.
        share = (1 - self.decay) / (1 - self.decay**self._updates)
        for name, value in self._values.items():
            value.lerp_(self._weights[name].to(value.dtype), share)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the average inside the `with` block, and its own weights after it."""
        before = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.put_into_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(before[name])

    @torch.no_grad()
    def put_into_model(self) -> None:
        """Replace the model's trained weights by their average, if a step was counted."""
        if self._updates:
            for name, value in self._values.items():
                self._weights[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """What the next update needs."""
        return {"decay": self.decay, "updates": self._updates, "values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of an average over the same weights."""
        saved: dict[str, Tensor] = state["values"]
        if saved.keys() != self._values.keys():
            raise InputError("the checkpoint holds an average of other weights than are trained.")
        self._updates = state["updates"]
        for name, value in self._values.items():
            put_whole(value, saved[name])


def restore_average(average: WeightAverage | None, saved: dict[str, Any] | None) -> None:
    """Go on with the average of a checkpoint. One with another decay begins anew."""
    if average is not None and saved is not None and saved["decay"] == average.decay:
        average.load_state_dict(saved)
