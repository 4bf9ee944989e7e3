"""Workers: results in order, errors in the caller, and torch's threads as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from userdp.clipping.stacked.workers import MOST_WORKERS, in_order, num_workers


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items() -> None:
    def late_first(item: int, _: str) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0.0)
        return item

    assert list(in_order(late_first, range(12), ["a", "b"])) == list(range(12))


def test_a_program_is_never_used_by_two_workers_at_once() -> None:
    locks = [threading.Lock() for _ in range(3)]

    def job(item: int, lock: threading.Lock) -> bool:
        mine = lock.acquire(blocking=False)
        time.sleep(0.002)
        lock.release()
        return mine

    assert all(in_order(job, range(30), locks))


def test_workers_share_torchs_threads_and_the_caller_keeps_its_own() -> None:
    def threads(_: int, program: str) -> int:
        return torch.get_num_threads()

    assert set(in_order(threads, range(6), ["a", "b"])) == {1}
    assert torch.get_num_threads() == 2
    # Threads that begin later have as many as before, too.
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [2]


def test_one_program_works_in_the_callers_thread() -> None:
    names = in_order(lambda *_: threading.current_thread(), range(3), ["only"])
    assert set(names) == {threading.current_thread()}


def test_the_first_error_reaches_the_caller_and_no_further_job_begins() -> None:
    begun: list[int] = []

    def job(item: int, _: str) -> int:
        begun.append(item)
        time.sleep(0.002)
        if item == 2:
            raise ArithmeticError("item 2")
        return item

    results = in_order(job, range(1000), ["a", "b"])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ArithmeticError, match="item 2"):
        next(results)
    assert len(begun) < 20
    assert torch.get_num_threads() == 2


def test_as_many_workers_as_threads() -> None:
    assert num_workers() == 2
    torch.set_num_threads(1)
    assert num_workers() == 1
    torch.set_num_threads(10 * MOST_WORKERS)
    assert num_workers() == MOST_WORKERS
