"""The gradient of every user for one parameter, in the form that is cheapest to hold.

A clipped sum needs two things of the users' gradients g_u of a parameter: their squared norms, and
later, once each user's factor is known, the sum of factor_u * g_u. Three forms give both (`sums`).

    Stored  g_u itself, for all users                          few large users, thin weights (LoRA)
    Pair    inputs x_u and output gradients y_u of a product   many short users: g_u = y_u^T x_u
    Rows    token ids and the gradients of their embeddings    embeddings: one row a token

Shapes: U users, L tokens of a user (all its rows), I inputs and O outputs of a product, V
vocabulary, D width of an embedding. Where users have unlike many rows (`pack.Runs`), U counts rows
and L the tokens of one, but for a `Stored` that says otherwise: a user's gradient is the sum over
its rows. Everything here is secret: it has seen data and no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """g_u kept as it is: the norm is that of exactly the values that are summed.

    `squares_PU` are squared norms of its parts, where they are known; `by_row` where rows, not
    users, have each their gradient.
    """

    gradients_U: Tensor
    squares_PU: Tensor | None = None
    by_row: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """g_u = y_u^T x_u, not formed: its squared norm is sum_st <x_s, x_t> <y_s, y_t>.

    `transposed` weights (I, O) have g_u = x_u^T y_u.
    Reference: Goodfellow 2015 for one token, Li et al. 2022 (ghost clipping) for sequences, Bu et
    al. 2023 for summing from the kept pair instead of a second pass.
    """

    inputs_ULI: Tensor
    output_gradients_ULO: Tensor
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """g_u is zero but for the rows of the user's tokens; a token that comes twice adds up."""

    ids_UL: Tensor
    gradients_ULD: Tensor


Form = Stored | Pair | Rows
