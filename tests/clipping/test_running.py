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


def test_only_noted_sizes_may_be_any_whatever_was_seen_before() -> None:
    # Another process, which sees other shapes first, must find the same code on disk.
    graphs: list[list[str]] = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([str(t.shape) for t in inputs if isinstance(t, torch.Tensor)])
        return graph

    compiled = torch.compile
    torch._dynamo.reset()
    try:
        torch.compile = lambda f, **options: compiled(f, backend=noted, **options)  # type: ignore[assignment]
        double = running.compiled(lambda x: 2 * x, any_rows=True)
    finally:
        torch.compile = compiled
    for rows, length in ((5, 8), (6, 8), (9, 16), (7, 16), (7, 8)):
        assert double(torch.ones(rows, length)).shape == (rows, length)
    lengths = [shape.rsplit(", ", 1)[1] for (shape,) in graphs]
    assert lengths == ["8])", "16])"]


def test_attention_may_make_plans_again_afterwards() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with running.without_plans():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_nothing_is_fused_where_batches_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    monkeypatch.setattr(running, "_fused", lambda function, any_rows: lambda tensor: "compiled")
    with running.uncompiled():
        assert running.fused(lambda tensor: "as it is", OnCuda()) == "as it is"  # type: ignore
    assert running.fused(lambda tensor: "as it is", OnCuda()) == "compiled"  # type: ignore
