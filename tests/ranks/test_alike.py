"""What ranks ask of each other before a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from userdp.ranks.alike import check_tried


def test_a_model_that_was_probed_is_not_gathered_for_another_probe() -> None:
    def gathers(_: Any) -> NoReturn:
        raise AssertionError("the whole model was gathered")

    ranks: Any = SimpleNamespace(count=2)
    probed: Any = SimpleNamespace(is_checked=True)
    check_tried(ranks, probed, gathers)
    with pytest.raises(AssertionError, match="gathered"):
        check_tried(ranks, SimpleNamespace(is_checked=False), gathers)  # type: ignore[arg-type]
