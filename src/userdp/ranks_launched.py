"""What a launcher says in the environment of its processes. Needs no torch.

torchrun and accelerate set these variables. Under SLURM and Kubernetes, torchrun sets them, or the
job's own script (docs/distributed.md).
"""

from __future__ import annotations

import os

# Set on an error that another rank met: that one prints it.
TOLD_BY = "told_by"


def launched_ranks() -> int:
    """As one of how many processes this one was launched."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE") or "1")


def is_launched() -> bool:
    """Whether a launcher started this process, be it the only one."""
    return "RANK" in os.environ


def launched_rank() -> int:
    """Which of them this one is; 0 if it is the only one."""
    return int(os.environ.get("RANK") or "0") if launched_ranks() > 1 else 0


def restarts() -> int:
    """How often the launcher started its processes again, because one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def is_restarted() -> bool:
    """Whether this is not the first start."""
    return restarts() > 0


def is_told(error: BaseException) -> bool:
    """Whether another rank met the error, and prints it."""
    return hasattr(error, TOLD_BY)
