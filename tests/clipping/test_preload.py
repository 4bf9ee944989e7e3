"""What compiling needs is loaded beside the main thread, and nothing is compiled before it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from userdp.clipping.kernels import preload, running


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    preload._loading.cache_clear()
    yield
    preload._loading.cache_clear()


def test_compiling_waits_until_everything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, order = threading.Event(), []

    def slow() -> None:
        assert threading.current_thread() is not threading.main_thread()
        may_end.wait(10)
        order.append("loaded")

    monkeypatch.setattr(preload, "_compiler", slow)
    monkeypatch.setattr(preload, "_triton", lambda: None)
    monkeypatch.setattr(running.torch, "compile", lambda *_, **__: order.append("compiled"))
    preload.begin()
    assert not order
    threading.Timer(0.05, may_end.set).start()
    running.compiled(len, any_rows=False)
    assert order == ["loaded", "compiled"]


def test_nothing_is_loaded_twice_or_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(preload, "_compiler", lambda: loaded.append("compiler"))
    monkeypatch.setattr(preload, "_triton", lambda: loaded.append("triton"))
    preload.wait()
    assert not loaded
    for _ in range(2):
        preload.begin()
    preload.wait()
    assert loaded == ["triton", "compiler"]


def test_what_cannot_be_loaded_is_left_to_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []

    def missing() -> None:
        raise ImportError("no compiler")

    monkeypatch.setattr(preload, "_compiler", missing)
    monkeypatch.setattr(preload, "_triton", lambda: loaded.append("triton"))
    preload.begin()
    preload.wait()
    assert loaded == ["triton"]
