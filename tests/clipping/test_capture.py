"""What trial runs of a step changed is put back; graphs themselves need CUDA (`test_cuda`)."""

from __future__ import annotations

import pytest
import torch

from userdp.clipping.execute.capture import Graph, put_back


@pytest.mark.parametrize("fails", [False, True])
def test_tensors_have_their_values_again_whatever_happens_inside(fails: bool) -> None:
    total, count = torch.arange(4.0), torch.tensor(3)
    view = total[1:3]
    try:
        with put_back(total, count):
            total.zero_()
            count += 1
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert total.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert int(count) == 3
    # In place: whoever holds a view of the buffer sees it too.
    assert view.tolist() == [1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_function_is_replayed_with_other_inputs() -> None:
    pool = torch.cuda.graph_pool_handle()
    graph = Graph(lambda given: given[0] * 2, [torch.zeros(3, device="cuda")], pool=pool)
    for value in (1.0, -4.0):
        found = graph([torch.full((3,), value, device="cuda")])
        assert found.tolist() == [2 * value] * 3
