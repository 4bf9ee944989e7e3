"""Settings for every test and doctest.

Nothing random is left to chance: every test starts from seeds of its own name, for torch, numpy,
`random` and for what the operating system would give. USERDP_TEST_SEED=1 (2, 3, ...) gives all of
them other seeds: a test that fails under one of them depends on luck.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import random
import secrets
from collections.abc import Generator

import hypothesis
import numpy as np
import pytest


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# CUDA machines have triton, newer ones with Gluon; elsewhere these kernels cannot be imported.
_WITH_TRITON = "gram gram_kernels inner record_attention settle stored tables"
_WITH_TRITON += " local_steps user_sums_kernel word_rows word_table"
_NEEDED_BY = dict.fromkeys(_WITH_TRITON.split(), "triton")
_NEEDED_BY["hopper"] = "triton.experimental.gluon"
collect_ignore_glob = [
    f"src/userdp/clipping/kernels/{kernel}.py"
    for kernel, module in _NEEDED_BY.items()
    if not _is_here(module)
]
if not _is_here("triton"):
    collect_ignore_glob += ["src/userdp/noise/*kernels.py", "tests/noise/noise_*.py"]
    collect_ignore_glob += ["src/userdp/clipping/stacked/triton_words.py"]
    collect_ignore_glob += ["tests/clipping/local_kernels_*.py"]

# No deadline: machines are shared, and compiled functions compile on their first call.
# Derandomised: a failure in one place is a failure everywhere.
hypothesis.settings.register_profile("userdp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("userdp")


SEED = os.environ.get("USERDP_TEST_SEED", "0")


class _FixedSystem:
    """Bytes in place of the operating system's: never the same twice in a stream."""

    def __init__(self) -> None:
        self._stream = ""
        self._count = 0

    def begin(self, stream: str) -> None:
        """Give the bytes of this stream from now on, from its first."""
        self._stream, self._count = stream, 0

    def token_bytes(self, nbytes: int | None = None) -> bytes:
        """Stands for `secrets.token_bytes`."""
        self._count += 1
        name = f"{self._stream}:{self._count}"
        return hashlib.shake_256(name.encode()).digest(32 if nbytes is None else nbytes)

    def randbits(self, k: int) -> int:
        """Stands for `secrets.randbits`."""
        return int.from_bytes(self.token_bytes(-(-k // 8)), "little") >> (-k % 8)


_system = _FixedSystem()


def _fix_seeds(stream: str) -> None:
    # Not at the top: the process that hands out tests to others runs none, and all would wait for
    # its imports.
    import torch

    stream = f"{SEED}:{stream}"
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  Libraries draw from it.
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        # The same for the only generator that there is. `torch.manual_seed` would note its caller's
        # stack in case CUDA is found later, and that takes longer than most tests.
        torch.default_generator.manual_seed(seed)
    _system.begin(stream)


@pytest.fixture(autouse=True, scope="session")
def _system_is_fixed() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", _system.token_bytes)
        patch.setattr(secrets, "randbits", _system.randbits)
        yield


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector may pass it over."""
    gc.collect()
    gc.freeze()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Modules that draw while they are imported."""
    if isinstance(collector, pytest.Module):
        _fix_seeds(f"{collector.nodeid}:import")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, those of modules and of the session included."""
    _fix_seeds(f"{item.nodeid}:setup")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Again before the test itself: it does not matter which fixtures were made for it."""
    _fix_seeds(f"{item.nodeid}:call")
