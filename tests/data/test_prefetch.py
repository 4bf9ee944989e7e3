from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from userdp.data.prefetch import Prefetched


def test_items_come_in_order_and_errors_come_through() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("late")

    items = iter(Prefetched(failing()))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="late"):
        next(items)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    for item in Prefetched(iter(range(10**9))):
        if item == 3:
            break
    assert threading.active_count() == before


def test_work_beside_the_loop_is_not_waited_for() -> None:
    def slow() -> Iterator[int]:
        for i in range(6):
            time.sleep(0.02)
            yield i

    prefetched = Prefetched(slow())
    for _ in prefetched:
        time.sleep(0.06)
    assert prefetched.share_waited < 0.2
