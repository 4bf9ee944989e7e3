"""A hub that does not answer is not asked again and again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from userdp.models import hub
from userdp.models.hub import asked_once


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class Session:
    """What the hub's client asks through."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self._seconds, self._error = seconds, error

    def head(self, *_: Any, **__: Any) -> str:
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return "an answer"


@pytest.mark.parametrize(
    ("session", "is_offline"),
    [
        (Session(0), False),
        (Session(0, OSError("no such name")), True),
        (Session(30), True),
    ],
    ids=["answers", "fails", "keeps silent"],
)
def test_only_kept_models_are_looked_for_where_nothing_answers(
    session: Session, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_session", lambda: session)
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    began = time.monotonic()
    with asked_once("org/name"):
        assert is_offline == constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert time.monotonic() - began < 5


def test_the_hub_is_not_asked_for_a_directory_nor_where_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(hub, "_answers", lambda: bool(asked.append(1)))
    with asked_once(str(tmp_path)):
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with asked_once("org/name"):
        assert constants.HF_HUB_OFFLINE
    assert asked == []
    assert constants.HF_HUB_OFFLINE
