"""Runs the CUDA kernels in Triton's interpreter and prints how far they are from plain torch.

A program of its own: the interpreter is chosen by an environment variable before Triton is
imported, by each check and not by this file. It has no bfloat16 products: float16 rounds instead.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from userdp.clipping.flat import FlatBuffer
from userdp.clipping.kernels import reference

Entry = tuple[Tensor, Sequence[Tensor]]


def exact(x: Tensor, ys: Sequence[Tensor]) -> Tensor:
    """The squared norms of all y^T x together, in float64."""
    products = [torch.bmm(y.double().mT, x.double()) for y in ys]
    return torch.stack([p.square().sum((1, 2)) for p in products]).sum(0)


def distances(errors: Tensor, others: Sequence[Tensor]) -> Tensor:
    """How far rounding errors (users, tokens, width) move gradients, tile by tile, in float64."""
    tiles = zip(errors.split(128, 1), *(other.split(128, 1) for other in others), strict=True)
    return torch.stack([exact(tile[0], tile[1:]).sqrt() for tile in tiles]).sum(0)


def exposures(x: Tensor, ys: Sequence[Tensor]) -> Tensor:
    """`reference.exposure` of every tile, added up."""
    tiles = zip(x.split(128, 1), *(y.split(128, 1) for y in ys), strict=True)
    return torch.stack([reference.exposure(tile[0], tile[1:]) for tile in tiles]).sum(0)


def far(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """How far below the expected values some are, and how far above, relative to them."""
    relative = (found.double() - expected.double()) / (expected.double() + 1e-12)
    return -float(relative.min()), float(relative.max())


def gram_errors(length: int, dtype: torch.dtype, unit: int = 8) -> dict[str, float]:
    """One tile of tokens or several; an input with two outputs, and one scaled on its output."""
    from userdp.clipping.kernels import gram

    x, wide, narrow, other = (
        torch.randn(3, length, unit * width).to(dtype) for width in (3, 5, 1, 2)
    )
    entries: list[Entry] = [(x, [wide, narrow]), (wide, [other])]
    table = gram.GramTable(entries, [True, False])
    norms, exposure = table.squared_norms(entries)
    factors = torch.tensor([[0.53, 1.0, 0.26], [0.3, 0.0, 1.9]])
    sides, moved = table.scaled(entries, [0, 1], factors)
    errors = [
        reference.rounding_errors(side, f) for side, f in zip((x, other), factors, strict=True)
    ]
    rounded = [reference.scaled(x, factors[0]), reference.scaled(other, factors[1])]
    below, above = far(norms, torch.stack([exact(*entry) for entry in entries]))
    apart = far(exposure, torch.stack([exposures(*entry) for entry in entries]))
    expected = torch.stack([distances(errors[0], [wide, narrow]), distances(errors[1], [wide])])
    nearer, farther = far(moved, expected)
    return {
        "norms below": below,
        "norms above": above,
        "exposure": max(apart),
        "scaled values": max(
            float((a - b).abs().max()) for a, b in zip(sides, rounded, strict=True)
        ),
        "moved below": nearer,
        "moved above": farther,
        "silenced": float(sides[1][1].abs().max() + moved[1, 1].abs()),
    }


def run_errors(length: int, dtype: torch.dtype, unit: int = 8) -> dict[str, float]:
    """Users of 3, 1, 0 and 2 rows in six rows: as if each were alone."""
    from userdp.clipping.kernels import gram, stored

    starts = torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32)
    owner = torch.tensor([0, 0, 0, 1, 3, 3])
    x, wide, narrow, other = (
        torch.randn(6, length, unit * width).to(dtype) for width in (3, 5, 1, 2)
    )
    entries: list[Entry] = [(x, [wide, narrow]), (wide, [other])]
    table = gram.GramTable(entries, [True, False], users=4, most_rows=3)
    norms, exposure = table.squared_norms(entries, starts)
    factors = torch.tensor([[0.53, 0.9, 0.7, 0.26], [0.3, 0.0, 1.0, 1.9]])
    sides, moved = table.scaled(entries, [0, 1], factors)
    scaled_side = list(zip((x, other), factors[:, owner], strict=True))
    rounded = [reference.scaled(*side) for side in scaled_side]
    errors = [reference.rounding_errors(*side) for side in scaled_side]
    wholes, apart, moves = torch.zeros(3, 2, 4).double()
    for user in range(4):
        own = slice(*starts[user : user + 2].tolist())
        alone = [t[own].flatten(0, 1)[None] for t in (x, wide, narrow, other, *errors)]
        if not len(alone[0][0]):
            continue
        pairs = [(alone[0], alone[1:3]), (alone[1], [alone[3]])]
        wholes[:, user] = torch.cat([exact(*pair) for pair in pairs])
        apart[:, user] = torch.cat([exposures(*pair) for pair in pairs])
        moves[:, user] = torch.cat(
            [distances(alone[4], alone[1:3]), distances(alone[5], [alone[1]])]
        )
    gradients = [torch.randn(6, 60, 40), torch.randn(6, 128)]
    # The last user's rows cancel: what is left is what rounding may add.
    for gradient in gradients:
        gradient[5] = -gradient[4]
    by_row = stored.StoredTable(gradients, [0, 0])
    parts = by_row.squared_norms(gradients, starts).sum(0)
    whole = [reference.ragged_squared_norms(g, owner, starts) for g in gradients]
    expected = torch.stack(whole).sum(0)
    # The third place has no user: what lies there is anything.
    users_own = torch.randn(4, 60, 40)
    users_own[2] = float("nan")
    table_of_users = stored.StoredTable([users_own], [0])
    own_parts = table_of_users.squared_norms([users_own], starts, by_row=False).sum(0)
    own = reference.squared_norms(users_own)
    return {
        "norms": max(far(norms, wholes)),
        "exposure": max(far(exposure, apart)),
        "moved below": far(moved, moves)[0],
        "moved": max(far(moved, moves)),
        "scaled values": max(
            float((a - b).abs().max()) for a, b in zip(sides, rounded, strict=True)
        ),
        "stored": float(((parts - expected).abs() / (expected + 1e-30)).max()),
        "not read": float(own_parts[2].abs()),
        "others read": float(((own_parts - own)[[0, 1, 3]].abs() / own[[0, 1, 3]]).max()),
    }


def inner_errors(length: int, dtype: torch.dtype, *, runs: bool, halves: bool) -> dict[str, float]:
    """Six rows of tokens that come again, equal users' or those of 3, 1, 0 and 2 rows."""
    from userdp.clipping.kernels import inner

    starts = torch.tensor([0, 3, 4, 4, 6] if runs else range(7), dtype=torch.int32)
    ids = torch.randint(0, 40, (6, length))
    e, x, y = torch.randn(6, length, 72), torch.randn(6, length, 72), torch.randn(6, length, 40)
    x, y = x.to(dtype), y.to(dtype)
    most_rows, where = (3, starts) if runs else (1, None)
    found = inner.inner_with_pair(ids, e, x, y, where, most_rows=most_rows, halves=halves)
    exact_U, sizes_U = torch.zeros(2, len(starts) - 1).double()
    for user in range(len(exact_U)):
        own = slice(*starts[user : user + 2].tolist())
        tokens, e_T, x_T, y_T = (t[own].flatten(0, 1) for t in (ids, e, x, y))
        picked = y_T.double()[:, tokens]
        exact_U[user] = (picked * (x_T.double() @ e_T.double().T)).sum()
        sizes = x_T.double().norm(dim=1)[:, None] * e_T.double().norm(dim=1)
        sizes_U[user] = (picked.abs() * sizes).sum()
    above = (found.double() - exact_U) / (sizes_U + 1e-30)
    return {"below": -float(above.min()), "above": float(above.max())}


def stored_errors(groups: Sequence[int], used: int = 5) -> dict[str, float]:
    """Tensors of many sizes, one of them with a user that is not finite, one with padded rows."""
    from userdp.clipping.kernels import stored

    users, shapes = 5, [(64, 32), (128,), (100, 8), (300, 40)]
    gradients = [torch.randn(users, *shape) for shape in shapes]
    gradients[1][2] = float("inf")
    num_groups = max(groups) + 1
    table = stored.StoredTable(gradients, list(groups))
    parts = table.squared_norms(gradients)
    found = torch.zeros(num_groups, users).index_add_(0, torch.tensor(table.block_groups), parts)
    own = torch.stack([reference.squared_norms(gradient) for gradient in gradients])
    expected = torch.zeros(num_groups, users).index_add_(0, torch.tensor(list(groups)), own)
    finite = torch.isfinite(expected)
    factors = torch.rand(num_groups, users)
    factors[:, 2] = 0
    # The first sum has less rows than its gradients, the last one more.
    short = [torch.zeros(60, 32), *(torch.zeros(shape) for shape in shapes[1:3])]
    short.append(torch.zeros(304, 40))
    total, by_torch = FlatBuffer(short), FlatBuffer(short)
    total.values.fill_(1.0)
    by_torch.values.fill_(1.0)
    num_used = None if used == users else torch.tensor(used)
    table.add_weighted_sums(gradients, total.views, factors, num_used)
    factors[:, used:] = 0
    for view, gradient, group in zip(by_torch.views, gradients, groups, strict=True):
        reference.add_weighted_sum(view, gradient.clone(), factors[group])
    return {
        "finite alike": float((torch.isfinite(found) != finite).sum()),
        "norms": float(((found - expected) / expected)[finite].abs().max()),
        "sums": max(
            float((a[: len(g[0])] - b[: len(g[0])]).abs().max())
            for a, b, g in zip(total.views, by_torch.views, gradients, strict=True)
        ),
    }


def settle_errors() -> dict[str, float]:
    """Users to be scaled again, one that is not finite to be silenced; a side never scaled."""
    from userdp.clipping.kernels import settle

    given, other = torch.randn(4, 70, 130), torch.randn(4, 3, 8)
    other[2, 1, 4] = float("nan")
    before = reference.scaled(given, torch.tensor([0.3, 0.7, 0.9, 0.2]))
    scaled, kept = before.clone(), other.clone()
    factors = torch.tensor([[0.25, 0.5, 0.5, 0.125], [1.0, 1.0, 0.0, 1.0]])
    again = torch.tensor([True, False, False, True])
    settler = settle.Settler(2, given.device)
    settler([(scaled, given), (other, other)], [0, 1], factors, again)
    expected = torch.where(again[:, None, None], given * factors[0][:, None, None], before)
    return {
        "scaled": float((scaled - expected).abs().max()),
        "silenced": float(other[2].abs().max()),
        "others": float((other - kept)[[0, 1, 3]].abs().max()),
    }


def attention_errors(heads: int, shared: int, width: int, dtype: torch.dtype) -> dict[str, float]:
    """How far the kernels of attention within records are from plain torch, relative."""
    from userdp.clipping.execute.record_attention import gradients_one_by_one, one_by_one
    from userdp.clipping.kernels import record_attention

    lengths = [5, 70, 3, 64, 1, 1, 130, 20]
    position = torch.cat([torch.arange(length) for length in lengths]).int()
    left = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths]).int()
    padding = 6 * 64 - len(position)
    position = torch.nn.functional.pad(position, (0, padding)).view(6, 64)
    left = torch.nn.functional.pad(left, (0, padding), value=-1).view(6, 64)
    # Heads of one projection, as most models cut them: neighbours in memory belong to other heads.
    whole = torch.randn(6, 64, heads + 2 * shared, width).to(dtype).transpose(1, 2)
    q, k, v = whole.split([heads, shared, shared], 1)
    d_out = torch.randn(6, 64, heads, width).to(dtype) * (left >= 0)[..., None, None]
    out, sums = record_attention.forward(q, k, v, position, 0.3)
    found = record_attention.backward(d_out, q, k, v, position, left, out, sums, 0.3)
    wide = [tensor.double() for tensor in (q, k, v)]
    expected = one_by_one(*wide, position, left, 0.3)
    gradients = gradients_one_by_one(d_out.double(), *wide, position, left, 0.3)
    real = (left >= 0)[..., None, None]

    def error(a: Tensor, b: Tensor) -> float:
        return float(((a.double() - b) * real).abs().max() / b.abs().max())

    names = ("queries", "keys", "values")
    pairs = zip(names, found, gradients, strict=True)
    return {name: error(a, b) for name, a, b in pairs} | {"out": error(out, expected)}


def attention_reach(value: float) -> dict[str, float]:
    """How far a user's values that are not finite move others, who begin in the middle of tiles."""
    from userdp.clipping.batches.joined_records import ROW
    from userdp.clipping.kernels import record_attention

    row = ROW["cuda"]
    assert row % record_attention.STEP == 0
    # Users of three rows, two, one and one. The second one's values change: its rows share tiles
    # with the first one's and the third one's.
    records = [[40, 50], [3, 61], [20], [32]]
    tokens = [(rows * row, lengths) for rows, lengths in zip((3, 2, 1, 1), records, strict=True)]
    parts = [torch.cat([torch.arange(length) for length in own]) for _, own in tokens]
    lefts = [torch.cat([torch.arange(length - 1, -1, -1) for length in own]) for _, own in tokens]
    sizes = [size for size, _ in tokens]

    def laid(own: list[Tensor], padding: int) -> Tensor:
        pad = torch.nn.functional.pad
        each = [pad(t, (0, n - len(t)), value=padding) for t, n in zip(own, sizes, strict=True)]
        return torch.cat(each).int().view(-1, row)

    position, left = laid(parts, 0), laid(lefts, -1)
    q, k, v = (torch.randn(len(position), 2, row, 16) for _ in range(3))
    d_out = torch.randn(len(position), row, 2, 16)
    bad = slice(3, 5)

    def run() -> list[Tensor]:
        out, sums = record_attention.forward(q, k, v, position, 0.3)
        given = (d_out, q, k, v, position, left, out, sums, 0.3)
        return [out, *record_attention.backward(*given)]

    before = run()
    for tensor in (q, k, v, d_out):
        tensor[bad] = value
    after = run()
    others = torch.ones(len(position), dtype=torch.bool)
    others[bad] = False
    moved = torch.stack([(a - b)[others].abs().max() for a, b in zip(before, after, strict=True)])
    return {
        "others": float(moved.nan_to_num(nan=1e30).max()),
        "own": float(min(float((~t[bad].isfinite()).float().mean()) for t in after)),
    }


def user_sum_errors(dtype: torch.dtype) -> dict[str, float]:
    """Users of unlike many tokens, one without any; the third user's values are not finite."""
    from userdp.clipping.kernels import user_sums_kernel

    counts = [1, 0, 16, 37, 5]
    # The last token is nobody's.
    values, others = (torch.randn(sum(counts) + 1, 2 * 136).to(dtype)[:, :136] for _ in range(2))
    values[5, 3], values[-1] = math.nan, math.inf
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    wide = torch.float32 if dtype != torch.float64 else dtype
    found = user_sums_kernel.user_sums(values, others, ends, wide)
    only, none = user_sums_kernel.user_sums(values, None, ends, wide)
    assert none.shape == (0, 136)
    assert torch.equal(only.nan_to_num(), found[0].nan_to_num())
    wholes = [values.double(), values.double() * others.double()]
    exact = [torch.stack([part.sum(0) for part in whole[:-1].split(counts)]) for whole in wholes]
    pairs = list(zip(found, exact, strict=True))
    return {
        "finite alike": max(float((f.isfinite() != e.isfinite()).sum()) for f, e in pairs),
        "sums": max(float((f.double() - e).nan_to_num().abs().max()) for f, e in pairs),
        "without tokens": float(found[0][1].abs().max() + found[1][1].abs().max()),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        for length in (5, 16, 130):
            results[f"gram {length} {name}"] = gram_errors(length, dtype)
        for length in (5, 32, 130):
            results[f"runs {length} {name}"] = run_errors(length, dtype)
        # Whole tiles, in both directions.
        for length in (16, 256):
            results[f"gram {length} even {name}"] = gram_errors(length, dtype, unit=64)
        for length in (32, 128):
            results[f"runs {length} even {name}"] = run_errors(length, dtype, unit=64)
    for name, dtype, halves in (
        ("float32", torch.float32, False),
        ("float16", torch.float16, False),
        ("halves", torch.float16, True),
    ):
        for length, runs in itertools.product((5, 32, 130), (False, True)):
            kind = "runs" if runs else "equal"
            found = inner_errors(length, dtype, runs=runs, halves=halves)
            results[f"inner {length} {kind} {name}"] = found
    results["stored together"] = stored_errors([0, 0, 0, 0])
    results["stored by layer"] = stored_errors([0, 1, 1, 2])
    results["stored with gaps"] = stored_errors([0, 1, 1, 2], used=4)
    results["stored nobody"] = stored_errors([0, 0, 0, 0], used=0)
    results["settle"] = settle_errors()
    for name in ("float16", "float32", "float64"):
        results[f"user sums {name}"] = user_sum_errors(getattr(torch, name))
    for case in ((2, 1, 16), (2, 2, 24), (4, 2, 64)):
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
            results[f"attention {case} {name}"] = attention_errors(*case, dtype)
    for value in (math.nan, math.inf):
        results[f"attention beside {value}"] = attention_reach(value)
    print(json.dumps(results))
