"""Make the next items in a thread while the last one is in use, to save waiting.

A thread is enough, because NumPy, Arrow and DuckDB release the interpreter while they work. The
items keep the order of the source.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")

_END = object()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetched(Generic[Item]):
    """The items of `source`, with at most `depth` of them made in advance. Iterate once.

    >>> list(Prefetched(range(3)))
    [0, 1, 2]

    After the loop, `share_waited` is the share of its time that was spent waiting for items.
    """

    def __init__(self, source: Iterable[Item], depth: int = 2) -> None:
        assert depth >= 1
        self._source = source
        self._depth = depth
        self.waited_seconds = 0.0
        self.seconds = 0.0

    @property
    def share_waited(self) -> float:
        """Share of the loop's time spent waiting; the wait for the first item does not count."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    def __iter__(self) -> Iterator[Item]:
        made: queue.Queue[object] = queue.Queue(self._depth)
        stop = threading.Event()

        def put(item: object) -> bool:
            while not stop.is_set():
                try:
                    made.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def make() -> None:
            try:
                for item in self._source:
                    if not put(item):
                        return
                put(_END)
            except BaseException as error:
                put(_Failure(error))

        thread = threading.Thread(target=make, name="userdp-prefetch", daemon=True)
        thread.start()
        try:
            item = made.get()
            start = time.perf_counter()
            while item is not _END:
                if isinstance(item, _Failure):
                    raise item.error
                yield cast(Item, item)
                asked = time.perf_counter()
                item = made.get()
                now = time.perf_counter()
                self.waited_seconds += now - asked
                self.seconds = now - start
        finally:
            stop.set()
            thread.join()
