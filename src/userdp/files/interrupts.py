"""Ctrl-C and SIGTERM while a run trains: the step ends, the run is saved, and then it stops.

A second signal stops at once. What it loses is one step that was not saved, and resuming takes that
step again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptedRunError(KeyboardInterrupt):
    """The run was told to stop, and is saved. The message says how to go on."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stop:
    """Whether a signal has come: its number, or 0."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0


@contextmanager
def signals_wait_for_the_step() -> Iterator[Stop]:
    """Note the first signal instead of stopping. Signals reach the main thread only."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: FrameType | None) -> None:
        if stop:
            raise InterruptedRunError("stopped at once, in the middle of a step.", number)
        stop.number = number

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
