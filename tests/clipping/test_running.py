"""How the kernels are run: in full float32, whatever the caller chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from userdp.clipping.kernels import running


def newer_setting() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        newer_setting,
    ],
    ids=["high", "medium", "newer setting"],
)
def test_norms_are_not_taken_in_tf32(choose: Callable[[], None]) -> None:
    setting: Any = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    try:
        choose()
        assert setting.fp32_precision == "tf32"
        with running.without_tf32():
            assert setting.fp32_precision != "tf32"
            assert torch.get_float32_matmul_precision() == "highest"
        assert setting.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_sums_are_asked_for_inside_only(wanted: bool) -> None:
    with running.same_every_time(wanted):
        assert torch.are_deterministic_algorithms_enabled() is wanted
    assert not torch.are_deterministic_algorithms_enabled()
