"""Settings for every test and doctest."""

from __future__ import annotations

import importlib.util

import hypothesis

# CUDA machines have triton; elsewhere these kernels cannot be imported.
collect_ignore_glob = (
    []
    if importlib.util.find_spec("triton")
    else ["src/userdp/clipping/triton_*.py", "src/userdp/clipping/hopper_*.py"]
)

# No deadline: machines are shared, and compiled functions compile on their first call.
# Derandomised: a failure in one place is a failure everywhere.
hypothesis.settings.register_profile("userdp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("userdp")
