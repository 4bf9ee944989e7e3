"""What compiling needs, loaded in the background while the model is probed.

torch imports its compiler when something is first compiled, and hashes its own and Triton's sources
to find what is on disk. With everything on disk this is a seventh of the time until a run has its
full speed, and most of it is waiting for files.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from functools import cache


def begin() -> None:
    """Begin to load, once in a process."""
    _loading()


def wait() -> None:
    """Return when everything is loaded; at once if nothing was begun.

    Two threads must not import parts of one package that import each other.
    """
    if _loading.cache_info().currsize:
        _loading().join()


@cache
def _loading() -> threading.Thread:
    # Imported here and not by the thread: passes that are not compiled need it, too.
    importlib.import_module("torch._dynamo")
    thread = threading.Thread(target=_load, name="userdp-preload", daemon=True)
    thread.start()
    return thread


def _load() -> None:
    # Triton first: the probe's own kernels need it.
    for part in (_triton, _compiler):
        # What fails here fails again where it is needed, and says so there.
        with contextlib.suppress(Exception):
            part()


def _compiler() -> None:
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._dynamo.repro.after_dynamo")
    _called("torch._inductor.codecache", "torch_key")


def _triton() -> None:
    _called("triton.runtime.cache", "triton_key")


def _called(module: str, function: str) -> None:
    """Call a function that remembers what it returns."""
    found: Callable[[], object] | None = getattr(importlib.import_module(module), function, None)
    if found is not None:
        found()
