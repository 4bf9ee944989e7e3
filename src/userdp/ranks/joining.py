"""How a process joins the others that a launcher started with it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from userdp.errors import InputError
from userdp.ranks_launched import TOLD_BY, restarts

# How long a rank waits for the others, in seconds. The first rank may measure the model meanwhile.
TIMEOUT_VARIABLE = "USERDP_RANK_TIMEOUT"
USUAL_TIMEOUT = 1800.0


def timeout_seconds() -> float:
    """How long a rank waits for the others."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given or USUAL_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError(f"{TIMEOUT_VARIABLE}={given!r}: give seconds, a number above 0.")
    return seconds


def begin_group() -> None:
    """Join the group that the environment describes; on GPUs, each rank takes its own."""
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # Every rank of the machine sees it, so none of them waits for one that gave up.
        if here > torch.cuda.device_count():
            raise _said_once(
                InputError(
                    f"{here} ranks on a machine with {torch.cuda.device_count()} GPUs: each rank "
                    "needs a GPU of its own. Launch as many processes as there are GPUs."
                ),
                is_first=local == 0,
            )
        torch.cuda.set_device(local)
    timeout = timedelta(seconds=timeout_seconds())
    try:
        store, rank, count = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps one store over its restarts, and addresses of processes that have ended
        # would be found in it.
        start = f"userdp {restarts()} {count}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.distributed_c10d.PrefixStore(start, store),
            rank=rank,
            world_size=count,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"this process was launched as rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']}, and the others cannot be reached ({type(error).__name__})"
            ": start all of them with torchrun, or set MASTER_ADDR and MASTER_PORT."
        ) from error


def _said_once(error: InputError, *, is_first: bool) -> InputError:
    """An error that all ranks of a machine meet, and the first of them prints."""
    if not is_first:
        setattr(error, TOLD_BY, 0)
    return error
