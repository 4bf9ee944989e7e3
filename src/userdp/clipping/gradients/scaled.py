"""Users' gradients in their forms, each coordinate multiplied by its scale (`updates`).

A pair is scaled side by side: y^T x becomes (y r)^T (x c), for a number r of each row of the weight
and c of each column. Rounding of a scaled side belongs to the gradient, since norms and sums are
taken of the values that are scaled here.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from userdp.clipping.gradients.forms import EmbeddingRows, Form, Stored
from userdp.updates.scaled_gradient import Scale


def scaled(form: Form, scale: Scale) -> Form:
    """The form of the scaled gradients."""
    if isinstance(form, Stored):
        assert form.squares_PU is None
        return replace(form, gradients_U=_stored(form.gradients_U, scale))
    if isinstance(form, EmbeddingRows):
        return replace(form, gradients_ULD=_rows(form, scale))
    rows, columns = (factor.flatten() for factor in scale.factors)
    x, y = form.inputs_ULI, form.output_gradients_ULO
    of_x, of_y = (rows, columns) if form.transposed else (columns, rows)
    return replace(
        form,
        inputs_ULI=(x * _as_wide(of_x, x)).to(x.dtype),
        output_gradients_ULO=(y * _as_wide(of_y, y)).to(y.dtype),
    )


def _stored(gradients: Tensor, scale: Scale) -> Tensor:
    values = gradients
    for factor in scale.factors:
        if factor.dim() == 2 and len(factor) > 1:
            # A padded head has more rows, which belong to no parameter.
            factor = F.pad(factor, (0, 0, 0, gradients.shape[1] - len(factor)), value=1.0)
        values = values * factor
    return values.to(gradients.dtype)


def _rows(form: EmbeddingRows, scale: Scale) -> Tensor:
    values = form.gradients_ULD
    for factor in scale.factors:
        # A factor of the columns is the same for all tokens.
        values = values * (factor[0] if len(factor) == 1 else factor[form.ids_UL])
    return values.to(form.gradients_ULD.dtype)


def _as_wide(factor: Tensor, side: Tensor) -> Tensor:
    """The factor, with ones for the places of padding."""
    return F.pad(factor, (0, side.shape[-1] - len(factor)), value=1.0)
