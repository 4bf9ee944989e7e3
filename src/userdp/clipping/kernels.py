"""The arithmetic of per-user gradients on tensors: norms, weighted sums, inner products.

Written once in torch, which is what the CPU runs. On CUDA the element-wise ones are compiled, and
those that torch cannot fuse come from `triton_gram`, `triton_stored` and `triton_inner` (and
`products` from `hopper_products`). Sums and norms are taken in float32 at least (float64 stays
float64), whatever the dtype of what is summed.

Shapes as in `forms`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from userdp.updates import at_least_float32, wide_dtype

# A Gram norm is a sum of terms that may cancel: its rounding error is relative to the sum of their
# sizes, at most ||x||^2 ||y||^2. This many roundings of it are added, so that cancellation cannot
# make a norm look smaller than it is. Tensor cores cut digits off where torch rounds. One of them
# is that of the product with the factor, before it is rounded to the dtype of what is summed.
GRAM_ROUNDINGS = 9
TORCH_GRAM_ROUNDINGS = 3
# Deviations to expect of the sum over tokens in `exposure`.
FEW_TOKENS = 1.0
# Tokens of a user up to which all pairs of them cost less than sorting them.
MOST_TOKENS_PAIRED = 256
# One compilation for each shape; torch's default would give up at 8.
RECOMPILATIONS = 256


def run(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The function's value, by its compiled version on CUDA."""
    return (_compiled(function) if tensors[0].is_cuda else function)(*tensors)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    allow_recompilations()
    return torch.compile(function, dynamic=False)


def allow_recompilations() -> None:
    """Let torch compile one function for many shapes."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)
    config.accumulated_recompile_limit = max(
        config.accumulated_recompile_limit, 16 * RECOMPILATIONS
    )


@contextlib.contextmanager
def wide_arithmetic(device: torch.device) -> Iterator[None]:
    """No gradients, and products in their own dtype and precision, whatever the caller chose."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), without_tf32():
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products on CUDA in float32: in TF32 a norm could be read too small."""
    setting: Any = torch.backends.cuda.matmul
    if setting.fp32_precision != "tf32":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # Chosen through the newer setting alone; the older one then cannot be read.
        before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is None:
            setting.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(before)


def half_on_cuda(tensor: Tensor) -> bool:
    """Whether the tensor is one for the CUDA kernels of products."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def squared_norms(values_U: Tensor) -> Tensor:
    """The squared L2 norm of every user's values."""
    flat = values_U.flatten(1)
    return torch.linalg.vector_norm(flat, dim=1, dtype=wide_dtype(flat.dtype)).square()


def add_weighted_sum(total: Tensor, values_U: Tensor, factors_U: Tensor) -> None:
    """total += sum_u factor_u values_u; a factor of zero silences even an infinite value."""
    silence_(values_U, factors_U)
    flat = at_least_float32(values_U.flatten(1))
    summed = (factors_U @ flat).view(values_U.shape[1:])
    # Either may have rows of padding that the other has not.
    total[: len(summed)] += summed[: len(total)]


def scaled(values_U: Tensor, factors_U: Tensor) -> Tensor:
    """factor_u values_u in the values' dtype; zero where the factor is zero."""
    return _wide_products(values_U, factors_U).to(values_U.dtype)


def rounding_errors(values_U: Tensor, factors_U: Tensor) -> Tensor:
    """How far `scaled` is from the products, in the factors' dtype."""
    wide = _wide_products(values_U, factors_U)
    return wide.to(values_U.dtype).to(wide.dtype) - wide


def _wide_products(values_U: Tensor, factors_U: Tensor) -> Tensor:
    factors = factors_U.view(-1, *[1] * (values_U.dim() - 1))
    return torch.where(factors == 0, 0, values_U.to(factors_U.dtype) * factors)


def scale_again_(scaled_U: Tensor, values_U: Tensor, factors_U: Tensor, again_U: Tensor) -> None:
    """Scale the values of some users again, in place, by other factors."""
    chosen = again_U.view(-1, *[1] * (values_U.dim() - 1))
    scaled_U.copy_(torch.where(chosen, scaled(values_U, factors_U), scaled_U))


def silence_(values_U: Tensor, factors_U: Tensor) -> None:
    """Set to zero, in place, the values of users whose factor is zero: 0 * inf is not 0."""
    if values_U.is_cuda:
        # Asks the device nothing.
        values_U.masked_fill_((factors_U == 0).view(-1, *[1] * (values_U.dim() - 1)), 0)
    elif not bool(factors_U.all()):
        values_U[factors_U == 0] = 0


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += the first rows of a @ b, accumulated in the total's own (wide) dtype."""
    # Room for a head's padding is not needed where it has none.
    total = total[: len(a)]
    if not (half_on_cuda(a) and total.dtype == torch.float32):
        total.addmm_(a[: len(total)].to(total.dtype), b.to(total.dtype))
    elif len(a) == len(total):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        # The product of all rows is the fast one: their number is aligned.
        total += torch.mm(a, b, out_dtype=torch.float32)[: len(total)]


def gram_norms(x_ULI: Tensor, y_ULO: Tensor, starts: Tensor | None = None) -> Tensor:
    """||y_u^T x_u||^2 from above: sum_st <x_s, x_t> <y_s, y_t> and its rounding error.

    With `starts`, user u has the rows from `starts[u]` to `starts[u + 1]` of both.
    """
    if starts is not None:
        runs = list(itertools.pairwise(starts.tolist()))
        users = [(x_ULI[i:j].flatten(0, 1), y_ULO[i:j].flatten(0, 1)) for i, j in runs]
        return torch.cat([gram_norms(x[None], y[None]) for x, y in users])
    x, y = at_least_float32(x_ULI), at_least_float32(y_ULO)
    terms = torch.bmm(x, x.mT) * torch.bmm(y, y.mT)
    least = least_square(x.dtype)
    largest = (squared_norms(x) + least) * (squared_norms(y) + least)
    # Of long sums of like terms a little is cut off again and again.
    cut_off = torch.finfo(x.dtype).eps * (x.shape[2] + y.shape[2]) / 16
    squared = terms.sum((1, 2))
    return raised(squared + cut_off * squared.abs(), largest, roundings=TORCH_GRAM_ROUNDINGS)


def least_square(dtype: torch.dtype) -> float:
    """More than what is lost of a squared norm where the squares of its values are too small."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2


def exposure(x_ULI: Tensor, ys_ULO: Sequence[Tensor], starts: Tensor | None = None) -> Tensor:
    """How far the users' gradients y^T x usually move when the values of one side are rounded.

    In roundings of a value. A token moves the gradient by |x_t| |y_t| of them. Different tokens'
    errors add up as squares, equal tokens' as their gradients do, and where few tokens decide, the
    sum of their squares varies.
    """
    squares_x = at_least_float32(x_ULI).square().sum(2)
    by_token = torch.stack([squares_x * at_least_float32(y).square().sum(2) for y in ys_ULO]).sum(0)
    by_row = torch.stack([by_token.sum(1), by_token.square().sum(1)], 1)
    if starts is not None:
        users = len(starts) - 1
        owners = torch.repeat_interleave(torch.arange(users, device=starts.device), starts.diff())
        by_row = by_user(by_row, owners, users)
    apart, squares = by_row.unbind(1)
    together = torch.stack([gram_norms(x_ULI, y, starts) for y in ys_ULO]).sum(0)
    return (torch.maximum(apart, together) + FEW_TOKENS * squares.sqrt()).sqrt()


def raised(
    squared_norms_U: Tensor, largest_U: Tensor, *, roundings: int = GRAM_ROUNDINGS
) -> Tensor:
    """A squared norm raised by the rounding error of terms that add up to `largest_U` at most."""
    return squared_norms_U + roundings * torch.finfo(largest_U.dtype).eps * largest_U


def run_squared_norms(values_R: Tensor, user_of_row: Tensor, starts: Tensor) -> Tensor:
    """||sum of a user's rows||^2 from above: rows are scaled one by one, and may all but cancel."""
    users = len(starts) - 1
    squares_R = squared_norms(values_R)
    # (sum of n norms)^2 is at most n times the sum of their squares.
    largest_U = starts.diff() * by_user(squares_R, user_of_row, users)
    whole_U = squared_norms(by_user(values_R, user_of_row, users))
    return raised(whole_U, largest_U, roundings=TORCH_GRAM_ROUNDINGS)


def rows_squared_norms(ids_UL: Tensor, gradients_ULD: Tensor) -> Tensor:
    """The squared norm of a user's embedding gradient: rows of equal tokens count as their sum.

    From above, as all norms of sums that may all but cancel.
    """
    users, length, width = gradients_ULD.shape
    if length <= MOST_TOKENS_PAIRED:
        # ||sum of rows||^2 is the sum of all inner products of rows with equal tokens.
        wide = at_least_float32(gradients_ULD)
        equal = ids_UL[:, :, None] == ids_UL[:, None, :]
        products = torch.bmm(wide, wide.mT)
        norms = products.diagonal(dim1=1, dim2=2).sqrt()
        sizes = torch.where(equal, norms[:, :, None] * norms[:, None, :], 0.0)
        squared = torch.where(equal, products, 0.0).sum((1, 2))
        return raised(squared, sizes.sum((1, 2)), roundings=TORCH_GRAM_ROUNDINGS)
    order = ids_UL.argsort(1)
    tokens = ids_UL.gather(1, order)
    # Number the runs of equal tokens within each user, apart from the runs of all other users.
    run_UL = F.pad((tokens[:, 1:] != tokens[:, :-1]).cumsum(1), (1, 0))
    run_UL = run_UL + length * torch.arange(users, device=ids_UL.device)[:, None]
    rows = gradients_ULD.gather(1, order[..., None].expand(-1, -1, width))
    rows = at_least_float32(rows).reshape(users * length, width)
    return _token_squared_norms(rows, run_UL.flatten()).view(users, -1).sum(1)


def run_rows_squared_norms(
    ids_RL: Tensor, gradients_RLD: Tensor, user_of_row: Tensor, starts: Tensor
) -> Tensor:
    """`rows_squared_norms` where users have unlike many rows."""
    users = len(starts) - 1
    user_N = user_of_row.repeat_interleave(ids_RL.shape[1])
    # Sorted by user, then by token: equal tokens of a user are neighbours.
    keys_N = user_N * (ids_RL.max() + 1) + ids_RL.flatten()
    keys_N, order = keys_N.sort()
    run_N = F.pad((keys_N[1:] != keys_N[:-1]).cumsum(0), (1, 0))
    rows = at_least_float32(gradients_RLD).flatten(0, 1)[order]
    norms = _token_squared_norms(rows, run_N)
    # Behind the last run are zeros.
    user_of_run = torch.zeros_like(run_N).scatter(0, run_N, user_N[order])
    return norms.new_zeros(users).index_add(0, user_of_run, norms)


def _token_squared_norms(rows_ND: Tensor, run_N: Tensor) -> Tensor:
    """The squared norm of the sum of each run of rows, from above."""
    summed = torch.zeros_like(rows_ND).index_add(0, run_N, rows_ND)
    squares_N = rows_ND.square().sum(1)
    zeros = torch.zeros_like(squares_N)
    counts = zeros.index_add(0, run_N, torch.ones_like(squares_N))
    largest = counts * zeros.index_add(0, run_N, squares_N)
    return raised(summed.square().sum(1), largest, roundings=TORCH_GRAM_ROUNDINGS)


def by_user(values_R: Tensor, user_of_row: Tensor, users: int) -> Tensor:
    """Rows' values added up to users', in float32 at least."""
    wide = at_least_float32(values_R)
    return wide.new_zeros(users, *values_R.shape[1:]).index_add(0, user_of_row, wide)


def inner_with_stored(
    ids_RL: Tensor, gradients_RLD: Tensor, stored_UVD: Tensor, user_of_row: Tensor
) -> Tensor:
    """What each row's tokens add to <e_u, h_u>, h_u stored, and its rounding error: (2, rows)."""
    met = at_least_float32(stored_UVD[user_of_row[:, None], ids_RL])
    met = met * at_least_float32(gradients_RLD)
    error = TORCH_GRAM_ROUNDINGS * torch.finfo(met.dtype).eps * met.abs()
    return torch.stack([met.sum((1, 2)), error.sum((1, 2))])


def inner_with_pair(
    ids_RL: Tensor, gradients_RLD: Tensor, inputs_RLD: Tensor, output_gradients_RLV: Tensor
) -> Tensor:
    """The part of <e_u, h_u>, h_u = y_u^T x_u, that comes of row r of both, and its error: (2, R).

    sum_st y[s, token_t] <x_s, e_t>, s and t the tokens of row r.
    """
    picked = run(_picked, ids_RL, output_gradients_RLV)
    products = torch.bmm(at_least_float32(inputs_RLD), at_least_float32(gradients_RLD).mT)
    return run(_met, picked, products, inputs_RLD, gradients_RLD)


def _picked(ids_RL: Tensor, output_gradients_RLV: Tensor) -> Tensor:
    """y[r, s, token_t] for all tokens s and t of row r: read apart, it reads all over memory."""
    return output_gradients_RLV.gather(2, ids_RL[:, None, :].expand(-1, ids_RL.shape[1], -1))


def _met(picked_RLL: Tensor, products_RLL: Tensor, x: Tensor, e: Tensor) -> Tensor:
    picked = at_least_float32(picked_RLL)
    x_norms, e_norms = (
        at_least_float32(values).square().sum(2).sqrt().to(picked.dtype) for values in (x, e)
    )
    sizes = picked.abs() * x_norms[:, :, None] * e_norms[:, None, :]
    error = TORCH_GRAM_ROUNDINGS * torch.finfo(picked.dtype).eps
    return torch.stack([(picked * products_RLL).sum((1, 2)), error * sizes.sum((1, 2))])
