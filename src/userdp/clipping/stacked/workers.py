"""Threads that train users side by side on a processor, each with torch's work in one thread.

torch splits every single product over its threads. The products of one user's local step are small,
and between them come passes over memory, so a second thread gains little that way. Two workers with
users of their own do nearly twice as much as one.

What a worker computes does not depend on the others, and results come in the order of the items. So
their sum is the same to the last bit, however the threads take turns and however many there are.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Program = TypeVar("Program")
Result = TypeVar("Result")

# Every worker has memory of its own. With more threads than this, each worker has several.
MOST_WORKERS = 16


def num_workers() -> int:
    """As many as torch has threads here. Under `torchrun` that is one, unless it is told more."""
    return min(MOST_WORKERS, torch.get_num_threads())


def in_order(
    job: Callable[[Item, Program], Result], items: Iterable[Item], programs: list[Program]
) -> Iterator[Result]:
    """The results of `job(item, program)` in the order of the items.

    Each worker has a program for itself. The first item that fails raises its error here, after the
    jobs that have begun have ended. With one program all happens in the caller's thread.
    """
    if len(programs) == 1:
        for item in items:
            yield job(item, programs[0])
        return
    free: queue.SimpleQueue[Program] = queue.SimpleQueue()
    for program in programs:
        free.put(program)

    def run(item: Item) -> Result:
        program = free.get()
        try:
            return job(item, program)
        finally:
            free.put(program)

    with _threads(len(programs)) as threads:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(threads.submit(run, item))
            # Results that nobody has asked for yet take memory.
            if len(waiting) > 2 * len(programs):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `workers` threads, which share torch's own threads among them."""
    before = torch.get_num_threads()
    threads = ThreadPoolExecutor(
        workers,
        initializer=torch.set_num_threads,
        initargs=(max(1, before // workers),),
    )
    try:
        yield threads
    finally:
        # After an error no further job begins.
        threads.shutdown(cancel_futures=True)
        # torch keeps a number for each thread, and one for threads that begin later.
        torch.set_num_threads(before)
