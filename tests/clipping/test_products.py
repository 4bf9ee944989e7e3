"""Users' products and the norms that come with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparing import squares_wherever_possible
from torch import nn

import models_zoo
from userdp.clipping.batches.users import Users
from userdp.clipping.execute.execution import Execution
from userdp.clipping.gradients import probes
from userdp.clipping.gradients.forms import Stored
from userdp.clipping.gradients.many_users import ManyUsers
from userdp.clipping.kernels import products
from userdp.clipping.kernels.products import (
    can_square,
    num_tiles,
    products_with_squares,
    users_products,
)
from userdp.clipping.rules import FlatClip
from userdp.losses import causal_lm_loss

ENDS = [3, 3, 9, 12]


def factors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 5, dtype=dtype), torch.randn(12, 7, dtype=dtype)


def test_users_products_are_those_of_their_own_tokens() -> None:
    a, b = factors()
    equal = torch.einsum("uti,utj->uij", a.view(4, 3, 5), b.view(4, 3, 7))
    torch.testing.assert_close(users_products(a, b, 4), equal)
    found = users_products(a, b, 4, torch.tensor(ENDS, dtype=torch.int32))
    for user, (first, last) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
        torch.testing.assert_close(found[user], a[first:last].T @ b[first:last])


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, ENDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_squares_are_those_of_the_values_returned(
    dtype: torch.dtype, ends: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = factors(dtype)
    monkeypatch.setattr(products, "TILE", 4)
    given = (a, b, 4, None if ends is None else torch.tensor(ends, dtype=torch.int32), 3)
    found, squares = products_with_squares(*given)
    assert torch.equal(found, users_products(*given[:4]))
    assert squares.shape == (num_tiles(5, 7), 4) == (4, 4)
    tiles = [found[:, i : i + 4, j : j + 4] for i in (0, 4) for j in (0, 4)]
    expected = torch.stack([tile.double().square().sum((1, 2)) for tile in tiles])
    torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)
    # What a compiler is told of shapes and dtypes is what comes.
    torch.library.opcheck(products_with_squares, given)


def by_torch(
    a: torch.Tensor, b: torch.Tensor, users: int, ends: torch.Tensor | None, **how: int
) -> Any:
    """What the kernel should return; of a user without tokens anything."""
    with torch.autocast("cpu", enabled=False):
        found, squares = products_with_squares(a, b, users, ends, how["depth"])
    if ends is not None:
        found[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
    return found, squares


def too_small_a_norm(*given: Any, **how: int) -> Any:
    found, squares = by_torch(*given, **how)
    return found, squares * 0.999


def wrong_user(*given: Any, **how: int) -> Any:
    found, squares = by_torch(*given, **how)
    return found.roll(1, 0), squares.roll(1, 1)


def broken(*given: Any, **how: int) -> Any:
    raise RuntimeError("no such instruction")


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'triton'")


@pytest.mark.parametrize("depth", products.DEPTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [too_small_a_norm, wrong_user, broken, missing])
def test_a_kernel_that_fails_its_trial_is_not_used(
    kernel: Any, dtype: torch.dtype, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = products._hopper_works.__wrapped__
    with monkeypatch.context() as patch:
        kind = SimpleNamespace(products_with_squares=by_torch)
        patch.setattr(products, "_hopper", lambda: kind)
        # Whatever the caller computes in.
        with torch.autocast("cpu", torch.bfloat16):
            assert trial(torch.device("cpu"), dtype, depth)
    kind = SimpleNamespace(products_with_squares=kernel)
    monkeypatch.setattr(products, "_hopper", missing if kernel is missing else lambda: kind)
    with pytest.warns(UserWarning, match="taken apart"):
        assert not trial(torch.device("cpu"), dtype, depth)


def test_a_full_device_is_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(products, "_hopper", full)
    with pytest.raises(torch.OutOfMemoryError):
        products._hopper_works.__wrapped__(torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("shape", "change", "wanted"),
    [
        ((768, 3072), {}, True),
        ((768, 3072), {"tokens": 96}, True),
        ((768, 3072), {"tokens": 80}, False),
        ((768, 3072), {"dtype": torch.float32}, False),
        ((768, 3072), {"device": torch.device("cpu")}, False),
        ((768, 3075), {}, False),
        ((773, 3072), {}, False),
        # LoRA's thin weights fill a quarter of their tiles.
        ((32, 768), {}, False),
    ],
)
def test_squares_are_taken_where_the_kernel_is_made_for_it(
    shape: tuple[int, int],
    change: dict[str, Any],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "_hopper_works", lambda device, dtype, depth: True)
    how = {"tokens": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")} | change
    assert can_square(*shape, **how) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not can_square(*shape, **how)


class InFloat32(nn.Module):
    """A product in autocast's dtype and one that insists on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        with torch.autocast("cpu", enabled=False):
            return self.two(hidden.float())


def test_squares_are_those_of_what_is_handed_out_whatever_its_dtype() -> None:
    torch.manual_seed(0)
    model = InFloat32()
    x = torch.randn(4, 3, 6)
    users = Users(batch={"x": x}, weights=torch.ones(4), count=4)
    execution = Execution(
        record_loss=lambda own, batch: own(batch["x"]).square().mean((1, 2)),
        compute_dtype=torch.bfloat16,
    )
    with squares_wherever_possible():
        many = ManyUsers(
            model, list(model.parameters()), FlatClip(clip_norm=1.0), users, execution=execution
        )
        forms = many._gradients(users)
    stored = [form for _, form in forms if isinstance(form, Stored)]
    squared = [form for form in stored if form.squares_PU is not None]
    assert len(stored) == 4
    assert len(squared) == 1
    for form in squared:
        assert form.squares_PU is not None
        expected = form.gradients_U.double().square().sum((1, 2))
        torch.testing.assert_close(form.squares_PU.double().sum(0), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("group_size", [1, 3])
def test_the_kernel_is_asked_for_gradients_as_they_are_stored(
    group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models_zoo.build("gpt2 untied", torch.float32)
    ids = torch.arange(6 * 5).view(6, 5) % 7
    users = Users(
        batch={"input_ids": ids, "labels": ids}, weights=torch.ones(6), count=6 // group_size
    )
    execution = Execution(
        record_loss=causal_lm_loss, compute_dtype=torch.bfloat16, head_padding=3, skip_mask=False
    )
    asked: list[tuple[int, int]] = []

    def can_square(rows: int, columns: int, **how: Any) -> bool:
        assert how["tokens"] == 5 * group_size
        assert how["dtype"] == torch.bfloat16
        asked.append((rows, columns))
        return True

    monkeypatch.setattr(probes, "can_square", can_square)
    found = ManyUsers(
        model, list(model.parameters()), FlatClip(clip_norm=1.0), users, execution=execution
    )
    shapes = [
        (tuple(tape.probes["weight"].shape[1:]), tuple(tape.probes["squares"].shape))
        for tape in found._probes.tapes.values()
        if "squares" in tape.probes
    ]
    assert sorted(shape for shape, _ in shapes) == sorted(asked)
    assert all(squares == (num_tiles(*shape), users.count) for shape, squares in shapes)
    head = model.get_output_embeddings().weight
    assert (len(head) + 3, head.shape[1]) in asked
