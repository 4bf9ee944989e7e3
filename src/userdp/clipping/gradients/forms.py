"""The gradient of every user for one parameter, in the form that is cheapest to hold.

A clipped sum needs two things from the users' gradients g_u of a parameter: their squared norms
and, once each user's factor is known, the sum of factor_u * g_u. Three forms give both (`sums`).

    Stored         g_u itself, for all users               few large users, thin weights (LoRA)
    Pair           inputs x_u and output gradients y_u     many short users: g_u = y_u^T x_u
    EmbeddingRows  token ids and their rows' gradients     embeddings: one row a token

Shapes: U users, L tokens of a user (in all its rows), I inputs and O outputs of a product, V
vocabulary, D width of an embedding. In a ragged batch (`RowRanges`) U counts rows and L the tokens
of one row, and a user's gradient is the sum over its rows; only a `Stored` may still count users.
Everything here is secret: it has seen data and no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """g_u itself: the norm is taken of exactly the values that are summed.

    `squares_PU` are the squared norms of its parts, where they are known. `by_row` says that there
    is one gradient for each row of a ragged batch, not for each user.
    """

    gradients_U: Tensor
    squares_PU: Tensor | None = None
    by_row: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """The two sides of g_u = y_u^T x_u, whose squared norm is sum_st <x_s, x_t> <y_s, y_t>.

    For `transposed` weights (I, O), g_u = x_u^T y_u.
    Reference: Goodfellow 2015 for one token, Li et al. 2022 (ghost clipping) for sequences, Bu et
    al. 2023 for summing from the kept pair instead of a second pass.
    """

    inputs_ULI: Tensor
    output_gradients_ULO: Tensor
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingRows:
    """The rows of g_u for the user's tokens; equal tokens add up, all other rows are zero."""

    ids_UL: Tensor
    gradients_ULD: Tensor


Form = Stored | Pair | EmbeddingRows
