"""Runs a function on several ranks: forked processes that talk over gloo on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")

# A test that takes longer than this hangs.
LONGEST = 90.0


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An error that a rank met."""

    kind: str
    words: str


KILLED = Raised(kind="killed", words="the rank ended without an answer")


def on_ranks(count: int, function: Callable[[int], Any]) -> list[Any]:
    """What `function(rank)` gives on each rank, or what it `Raised` there.

    Forked processes have torch loaded already, so they start at once. One process runs here, and
    has no group.
    """
    if count == 1:
        return [_found(function, 0)]
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_run, args=(function, rank, count, place))
            for rank in range(count)
        ]
        with warnings.catch_warnings():
            # Later versions of Python warn of threads; those of torch rest here.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in processes:
                process.start()
        end = time.monotonic() + LONGEST
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        return [_answer(Path(place) / f"{rank}.pickle") for rank in range(count)]


def answers(count: int, function: Callable[[int], Value]) -> list[Value]:
    """As `on_ranks`, for functions that raise nothing."""
    found = on_ranks(count, function)
    raised = [item for item in found if isinstance(item, Raised)]
    assert raised == []
    return found


def _found(function: Callable[[int], Any], rank: int) -> Any:
    try:
        return function(rank)
    except BaseException as error:
        if os.environ.get("USERDP_SHOW_RANKS"):
            traceback.print_exc()
        return Raised(kind=type(error).__name__, words=str(error))


def _answer(place: Path) -> Any:
    if not place.is_file():
        return KILLED
    return pickle.loads(place.read_bytes())


def _run(function: Callable[[int], Any], rank: int, count: int, place: str) -> None:
    # A rank that waits for one that does not come ends in time for the test to tell.
    os.environ.setdefault("USERDP_RANK_TIMEOUT", "30")
    store = f"file://{place}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    answer, content = Path(place) / f"{rank}.pickle", pickle.dumps(_found(function, rank))
    partial = answer.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(answer)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # No test's own end is run twice.
    os._exit(0)
