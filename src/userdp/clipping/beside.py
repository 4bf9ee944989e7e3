"""Two kernels at a time on one GPU: one that computes beside one that waits for memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Beside:
    """What is launched in `begun` may run at the same time as what is launched after it.

    Until `join`: what `begun` reads must live until then, and what it makes is used after it only.
    On the CPU everything runs in its order.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def begun(self, device: torch.device) -> Iterator[None]:
        """Launch what is to begin first: it has the device before what comes after it."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, device: torch.device) -> None:
        """What is launched from now on runs after both."""
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
