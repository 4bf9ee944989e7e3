"""A process that has left the others has none of gloo's threads, which could abort its end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks_runner import answers
from userdp.ranks import Ranks, group

TASKS = Path("/proc/self/task")


def threads() -> int:
    return len(list(TASKS.iterdir()))


def threads_left(expected: int) -> int:
    """The number of threads; one that has just ended may be listed for a moment."""
    end = time.monotonic() + 5
    while threads() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return threads()


def left(rank: int) -> tuple[int, int]:
    """How many threads there are before and after, while somebody still holds the ranks."""
    ranks = Ranks.found()
    ranks.numbers([rank])
    before = threads()
    Ranks.leave()
    return before, threads_left(1)


def exited(rank: int) -> tuple[int, int, int, bool]:
    """What the handler leaves of a group that the caller made: the caller's threads alone."""
    own = threads()
    ranks = Ranks.found()
    ranks.numbers([rank])
    before = threads()
    group._leave_at_exit()
    return own, before, threads_left(own), dist.is_initialized()


@pytest.mark.skipif(not TASKS.is_dir(), reason="nothing lists the threads here")
def test_no_thread_of_a_group_outlives_it() -> None:
    for before, after in answers(2, left):
        assert before > 1
        assert after == 1
    for own, before, after, is_there in answers(2, exited):
        assert before > own == after
        assert is_there
