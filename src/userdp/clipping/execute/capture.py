"""A step captured as a CUDA graph: replayed without waiting for the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from userdp.clipping.kernels.running import collecting_later


class Graph:
    """A function of fixed-shape CUDA tensors, captured once and replayed."""

    def __init__(
        self, function: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], *, pool: Any
    ) -> None:
        # Kept alive: replays read what the function allocated, such as tables of addresses.
        self._function = function
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), collecting_later():
            # Compiles and loads everything: nothing of this may happen during the capture.
            function(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="relaxed"):
            self._output = function(self._inputs)

    def __call__(self, inputs: list[Tensor]) -> Tensor:
        """The function's value for other inputs of these shapes; overwritten by the next call."""
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output


@contextlib.contextmanager
def put_back(*tensors: Tensor) -> Iterator[None]:
    """Put the tensors' values back at the end of the `with` block, whatever happened inside."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
