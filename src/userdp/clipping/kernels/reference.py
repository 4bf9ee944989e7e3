"""The arithmetic of per-user gradients, in torch: norms, weighted sums, inner products.

The CPU runs what is written here. On CUDA element-wise functions are compiled (`running.fused`),
and what torch cannot fuse is computed by the kernels in `gram`, `inner`, `stored` and `settle`,
which the tests compare with this file. Sums and norms are taken in float32 at least (float64 stays
float64), whatever the dtype of what is summed.

A norm "from above" is never smaller than the exact one: docs/clipping.md, "Rounding".

Shapes as in `forms`; R counts rows of a ragged batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from userdp.clipping.kernels.running import fused, half_on_cuda
from userdp.losses import at_least_float32, wide_dtype

# Roundings that are added to a sum whose terms may cancel, relative to the sizes of the terms. More
# on tensor cores, which cut digits off where torch rounds.
GRAM_ROUNDINGS = 9
TORCH_GRAM_ROUNDINGS = 3
# Values whose squares are added up one after the other.
NORM_PIECE = 1_024
# How many standard deviations `exposure` adds for the spread of its sum over tokens.
FEW_TOKENS = 1.0
# Up to this many tokens of a user, comparing all of them with each other is cheaper than sorting.
MOST_TOKENS_COMPARED = 256


def squared_norms(values_U: Tensor) -> Tensor:
    """The squared L2 norm of every user's values."""
    flat = values_U.flatten(1)
    # On a CPU torch takes a norm by adding up one square after the other: over 67 million values
    # in float32 half a percent is lost. Norms of short pieces lose nothing, nor does `sum`.
    whole = flat.shape[1] // NORM_PIECE * NORM_PIECE
    pieces = flat[:, :whole].unflatten(1, (-1, NORM_PIECE))
    wide = wide_dtype(flat.dtype)
    squares = torch.linalg.vector_norm(pieces, dim=2, dtype=wide).square().sum(1)
    return squares + torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=wide).square()


def add_weighted_sum(total: Tensor, values_U: Tensor, factors_U: Tensor) -> None:
    """total += sum_u factor_u values_u; with factor zero even an infinite value adds zero."""
    silence_(values_U, factors_U)
    flat = at_least_float32(values_U.flatten(1))
    summed = (factors_U @ flat).view(values_U.shape[1:])
    # A padded head: either of the two may have more rows than the other.
    total[: len(summed)] += summed[: len(total)]


def scaled(values_U: Tensor, factors_U: Tensor) -> Tensor:
    """factor_u values_u in the values' dtype; zero where the factor is zero."""
    return _wide_products(values_U, factors_U).to(values_U.dtype)


def rounding_errors(values_U: Tensor, factors_U: Tensor) -> Tensor:
    """The rounding error of `scaled`, in the factors' dtype."""
    wide = _wide_products(values_U, factors_U)
    return wide.to(values_U.dtype).to(wide.dtype) - wide


def _wide_products(values_U: Tensor, factors_U: Tensor) -> Tensor:
    factors = factors_U.view(-1, *[1] * (values_U.dim() - 1))
    return torch.where(factors == 0, 0, values_U.to(factors_U.dtype) * factors)


def scale_again_(scaled_U: Tensor, values_U: Tensor, factors_U: Tensor, again_U: Tensor) -> None:
    """Scale the values of the users in `again_U` once more, in place, by these factors."""
    chosen = again_U.view(-1, *[1] * (values_U.dim() - 1))
    scaled_U.copy_(torch.where(chosen, scaled(values_U, factors_U), scaled_U))


def silence_(values_U: Tensor, factors_U: Tensor) -> None:
    """Set to zero, in place, the values of users whose factor is zero: 0 * inf is not 0."""
    if values_U.is_cuda:
        # Does not wait for the device.
        values_U.masked_fill_((factors_U == 0).view(-1, *[1] * (values_U.dim() - 1)), 0)
    elif not bool(factors_U.all()):
        values_U[factors_U == 0] = 0


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += the first rows of a @ b, accumulated in the total's own (wide) dtype."""
    # The total may have room for a head's padding that this product does not have.
    total = total[: len(a)]
    if not (half_on_cuda(a) and total.dtype == torch.float32):
        total.addmm_(a[: len(total)].to(total.dtype), b.to(total.dtype))
    elif len(a) == len(total):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        # Multiply the padding too: an aligned number of rows is faster.
        total += torch.mm(a, b, out_dtype=torch.float32)[: len(total)]


def gram_norms(x_ULI: Tensor, y_ULO: Tensor, starts: Tensor | None = None) -> Tensor:
    """||y_u^T x_u||^2 from above: sum_st <x_s, x_t> <y_s, y_t> and its rounding error.

    With `starts`, user u has rows `starts[u]` to `starts[u + 1]` of both.
    """
    if starts is not None:
        first, *ends = starts.tolist()
        counts = [stop - start for start, stop in itertools.pairwise([first, *ends])]
        found: list[Tensor] = []
        # Neighbours with equally many rows go together; a place without rows has norm zero.
        for count, alike in itertools.groupby(counts):
            users = len(list(alike))
            last = first + users * count
            if count:
                own = [t[first:last].reshape(users, -1, t.shape[2]) for t in (x_ULI, y_ULO)]
                found.append(gram_norms(*own))
            else:
                found.append(at_least_float32(x_ULI.new_zeros(users)))
            first = last
        return torch.cat(found)
    x, y = at_least_float32(x_ULI), at_least_float32(y_ULO)
    terms = torch.bmm(x, x.mT) * torch.bmm(y, y.mT)
    least = least_square(x.dtype)
    largest = (squared_norms(x) + least) * (squared_norms(y) + least)
    # A long sum of terms of one sign loses a little at every addition.
    cut_off = torch.finfo(x.dtype).eps * (x.shape[2] + y.shape[2]) / 16
    squared = terms.sum((1, 2))
    return raised(squared + cut_off * squared.abs(), largest, roundings=TORCH_GRAM_ROUNDINGS)


def least_square(dtype: torch.dtype) -> float:
    """An upper bound of what a squared norm loses if squares are too small for the dtype."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2


def exposure(x_ULI: Tensor, ys_ULO: Sequence[Tensor], starts: Tensor | None = None) -> Tensor:
    """How far each user's gradient y^T x usually moves when the values of one side are rounded.

    The unit is one rounding of a value. Rounding token t moves the gradient by |x_t| |y_t| of them.
    The errors of different tokens add up as squares, those of equal tokens as their gradients do.
    Where few tokens decide, the sum of squares itself varies: a deviation is added.
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
    """The squared norm plus its rounding error; its terms' sizes add up to at most `largest_U`."""
    return squared_norms_U + roundings * torch.finfo(largest_U.dtype).eps * largest_U


def ragged_squared_norms(values_R: Tensor, user_of_row: Tensor, starts: Tensor) -> Tensor:
    """||sum of a user's rows||^2 from above: the rows may almost cancel."""
    users = len(starts) - 1
    squares_R = squared_norms(values_R)
    # (sum of n norms)^2 is at most n times the sum of their squares.
    largest_U = starts.diff() * by_user(squares_R, user_of_row, users)
    whole_U = squared_norms(by_user(values_R, user_of_row, users))
    return raised(whole_U, largest_U, roundings=TORCH_GRAM_ROUNDINGS)


def embedding_squared_norms(ids_UL: Tensor, gradients_ULD: Tensor) -> Tensor:
    """The squared norm of a user's embedding gradient, from above: equal tokens add up first."""
    users, length, width = gradients_ULD.shape
    if length <= MOST_TOKENS_COMPARED:
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
    # Equal tokens of a user get the same number; no two users share one.
    number_UL = F.pad((tokens[:, 1:] != tokens[:, :-1]).cumsum(1), (1, 0))
    number_UL = number_UL + length * torch.arange(users, device=ids_UL.device)[:, None]
    rows = gradients_ULD.gather(1, order[..., None].expand(-1, -1, width))
    rows = at_least_float32(rows).reshape(users * length, width)
    return _token_squared_norms(rows, number_UL.flatten()).view(users, -1).sum(1)


def ragged_embedding_squared_norms(
    ids_RL: Tensor, gradients_RLD: Tensor, user_of_row: Tensor, starts: Tensor
) -> Tensor:
    """`embedding_squared_norms` of a ragged batch."""
    users = len(starts) - 1
    user_N = user_of_row.repeat_interleave(ids_RL.shape[1])
    # Sort by user, then by token: equal tokens of a user become neighbours.
    keys_N = user_N * (ids_RL.max() + 1) + ids_RL.flatten()
    keys_N, order = keys_N.sort()
    number_N = F.pad((keys_N[1:] != keys_N[:-1]).cumsum(0), (1, 0))
    rows = at_least_float32(gradients_RLD).flatten(0, 1)[order]
    norms = _token_squared_norms(rows, number_N)
    # Numbers that no token has belong to user 0, with a norm of zero.
    user_of_number = torch.zeros_like(number_N).scatter(0, number_N, user_N[order])
    return norms.new_zeros(users).index_add(0, user_of_number, norms)


def _token_squared_norms(rows_ND: Tensor, number_N: Tensor) -> Tensor:
    """For each number, the squared norm of the sum of the rows with that number, from above."""
    summed = torch.zeros_like(rows_ND).index_add(0, number_N, rows_ND)
    squares_N = rows_ND.square().sum(1)
    zeros = torch.zeros_like(squares_N)
    counts = zeros.index_add(0, number_N, torch.ones_like(squares_N))
    largest = counts * zeros.index_add(0, number_N, squares_N)
    return raised(summed.square().sum(1), largest, roundings=TORCH_GRAM_ROUNDINGS)


def by_user(values_R: Tensor, user_of_row: Tensor, users: int) -> Tensor:
    """The rows' values added up by user, in float32 at least."""
    wide = at_least_float32(values_R)
    return wide.new_zeros(users, *values_R.shape[1:]).index_add(0, user_of_row, wide)


def inner_with_stored(
    ids_RL: Tensor, gradients_RLD: Tensor, stored_UVD: Tensor, user_of_row: Tensor
) -> Tensor:
    """What each row adds to <e_u, h_u>, with h_u stored, and its rounding error: (2, rows)."""
    met = at_least_float32(stored_UVD[user_of_row[:, None], ids_RL])
    met = met * at_least_float32(gradients_RLD)
    error = TORCH_GRAM_ROUNDINGS * torch.finfo(met.dtype).eps * met.abs()
    return torch.stack([met.sum((1, 2)), error.sum((1, 2))])


def inner_with_pair(
    ids_RL: Tensor, gradients_RLD: Tensor, inputs_RLD: Tensor, output_gradients_RLV: Tensor
) -> Tensor:
    """What row r of both adds to <e_u, h_u>, with h_u = y_u^T x_u, and its error: (2, R).

    That is sum_st y[s, token_t] <x_s, e_t> over the tokens s and t of row r.
    """
    picked = fused(_picked, ids_RL, output_gradients_RLV)
    products = torch.bmm(at_least_float32(inputs_RLD), at_least_float32(gradients_RLD).mT)
    return fused(_met, picked, products, inputs_RLD, gradients_RLD)


def _picked(ids_RL: Tensor, output_gradients_RLV: Tensor) -> Tensor:
    """y[r, s, token_t] for all tokens s and t of row r. A kernel of its own: it reads at random."""
    return output_gradients_RLV.gather(2, ids_RL[:, None, :].expand(-1, ids_RL.shape[1], -1))


def _met(picked_RLL: Tensor, products_RLL: Tensor, x: Tensor, e: Tensor) -> Tensor:
    picked = at_least_float32(picked_RLL)
    x_norms, e_norms = (
        at_least_float32(values).square().sum(2).sqrt().to(picked.dtype) for values in (x, e)
    )
    sizes = picked.abs() * x_norms[:, :, None] * e_norms[:, None, :]
    error = TORCH_GRAM_ROUNDINGS * torch.finfo(picked.dtype).eps
    return torch.stack([(picked * products_RLL).sum((1, 2)), error * sizes.sum((1, 2))])
