"""Settings for every test and doctest."""

from __future__ import annotations

import importlib.util

import hypothesis


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# CUDA machines have triton, newer ones with Gluon; elsewhere these kernels cannot be imported.
_NEEDED_BY = {"triton_*.py": "triton", "hopper_*.py": "triton.experimental.gluon"}
collect_ignore_glob = [
    f"src/userdp/clipping/{files}" for files, module in _NEEDED_BY.items() if not _is_here(module)
]

# No deadline: machines are shared, and compiled functions compile on their first call.
# Derandomised: a failure in one place is a failure everywhere.
hypothesis.settings.register_profile("userdp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("userdp")
