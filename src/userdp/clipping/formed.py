"""What is known of one batch's forms between their norms and their sum: whose they are, and pairs.

Forms count users, or rows where `runs` say whose rows are whose; norms and factors always count
users. Everything here is secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from userdp.clipping import kernels
from userdp.clipping.forms import Form, Pair, Rows, Stored
from userdp.clipping.pack import Runs

# A form and the clip group (layer) that its parameter belongs to.
Grouped = tuple[int, Form]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """The pairs that one input gave rise to and that are clipped together."""

    group: int
    pairs: list[Pair]

    @property
    def tensors(self) -> tuple[Tensor, list[Tensor]]:
        """The input, and the output gradients."""
        return self.pairs[0].inputs_ULI, [pair.output_gradients_ULO for pair in self.pairs]

    @property
    def scaled_side(self) -> Tensor:
        """The side that is scaled."""
        x, ys = self.tensors
        return x if self.scale_input else ys[0]

    @property
    def other_sides(self) -> list[Tensor]:
        """What is not scaled."""
        x, ys = self.tensors
        return ys if self.scale_input else [x]

    @property
    def eps(self) -> float:
        """How coarsely a scaled side is rounded; 0 where that stays within the margin: float32."""
        dtype = self.scaled_side.dtype
        return torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0

    @property
    def scale_input(self) -> bool:
        """Whether the input is the side to scale: one for several outputs, or the narrower."""
        x, ys = self.tensors
        return len(ys) > 1 or x.shape[2] <= ys[0].shape[2]


def entries_of(forms: Sequence[Grouped]) -> list[Entry]:
    """The pairs by input and group, sorted by dtype, token count and, the widest first, width."""
    found: dict[tuple[int, int], Entry] = {}
    for group, form in forms:
        if isinstance(form, Pair):
            key = (group, id(form.inputs_ULI))
            found.setdefault(key, Entry(group=group, pairs=[])).pairs.append(form)

    def order(entry: Entry) -> tuple[str, int, int]:
        x, ys = entry.tensors
        # The last programs of a launch should be short ones.
        return str(x.dtype), x.shape[1], -sum(y.shape[2] for y in ys)

    return sorted(found.values(), key=order)


def alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries, in their order, by dtype and token count: one launch each."""
    found: dict[tuple[torch.dtype, int], list[Entry]] = {}
    for entry in entries:
        x, _ = entry.tensors
        found.setdefault((x.dtype, x.shape[1]), []).append(entry)
    return list(found.values())


class FormedBatch:
    """What is known of one batch between its norms and its sum."""

    def __init__(
        self,
        *,
        forms: list[Grouped],
        entries: list[Entry],
        runs: Runs | None,
    ) -> None:
        self.forms = forms
        self.entries = entries
        self.runs = runs
        # Both (groups, users); the second is how far rounding may move scaled pairs, squared.
        self.squared: Tensor
        self.exposed: Tensor | None = None
        self.scaled: dict[int, Tensor] = {}
        # Users whose pairs are to be scaled again, without rounding.
        self.again: Tensor | None = None

    @property
    def users(self) -> int:
        """Users, or places for them."""
        if self.runs is not None:
            return len(self.runs.starts) - 1
        _, form = self.forms[0]
        if isinstance(form, Stored):
            return len(form.gradients_U)
        return len(form.inputs_ULI if isinstance(form, Pair) else form.ids_UL)

    @property
    def starts(self) -> Tensor | None:
        """Where users' rows begin, if users have unlike many."""
        return None if self.runs is None else self.runs.starts

    @property
    def num_used(self) -> Tensor | None:
        """How many places have rows, where that is not all: they come first."""
        return None if self.starts is None else (self.starts.diff() > 0).sum()

    def spread(self, factors: Tensor) -> Tensor:
        """Users' factors as those of their rows."""
        return factors if self.runs is None else factors[:, self.runs.user_of_row]

    def by_user(self, values_R: Tensor) -> Tensor:
        """Rows' values added up to users'."""
        if self.runs is None:
            return values_R
        return kernels.by_user(values_R, self.runs.user_of_row, self.users)

    def stored_squared_norms(self, gradients: Tensor, by_row: bool) -> Tensor:
        """Squared norms of stored gradients, by user."""
        if self.runs is None or not by_row:
            return kernels.squared_norms(gradients)
        return kernels.run_squared_norms(gradients, self.runs.user_of_row, self.runs.starts)

    def rows_squared_norms(self, form: Rows) -> Tensor:
        """Squared norms of an embedding's gradients, by user."""
        if self.runs is None or self.runs.most_rows == 1:
            norms = kernels.run(kernels.rows_squared_norms, form.ids_UL, form.gradients_ULD)
            return self.by_user(norms)
        where = (self.runs.user_of_row, self.runs.starts)
        return kernels.run(kernels.run_rows_squared_norms, form.ids_UL, form.gradients_ULD, *where)

    def inner_products(self, rows: Form, other: Form) -> Tensor:
        """<e_u, h_u> from above, of an embedding and a head that share their weight.

        From above, as Gram norms are: ||e||^2 + ||h||^2 + 2 <e, h> may all but cancel.
        """
        assert isinstance(rows, Rows)
        ids, gradients = rows.ids_UL, rows.gradients_ULD
        if isinstance(other, Stored):
            assert not other.by_row
            owner = self.runs.user_of_row if self.runs is not None else _numbers(ids)
            parts = kernels.run(kernels.inner_with_stored, ids, gradients, other.gradients_U, owner)
            return self.by_user(parts.T).sum(1)
        assert isinstance(other, Pair)
        x, y = other.inputs_ULI, other.output_gradients_ULO
        if kernels.half_on_cuda(x):
            from userdp.clipping import triton_inner

            most_rows = 1 if self.runs is None else self.runs.most_rows
            ids, gradients = ids.contiguous(), gradients.contiguous()
            return triton_inner.inner_with_pair(
                ids, gradients, x, y, self.starts, most_rows=most_rows
            )
        if self.runs is None:
            return kernels.inner_with_pair(ids, gradients, x, y).sum(0)
        return self._inner_with_rows(ids, gradients, x, y, self.runs)

    def _inner_with_rows(
        self, ids: Tensor, gradients: Tensor, x: Tensor, y: Tensor, runs: Runs
    ) -> Tensor:
        """Each row of the head's meets each row of the same user's embedding."""
        row, owner = _numbers(ids), runs.user_of_row
        total: Tensor | None = None
        for shift in range(1 - runs.most_rows, runs.most_rows):
            other = row + shift
            same = (other >= 0) & (other < len(row))
            other = other.clamp(0, len(row) - 1)
            same &= owner[other] == owner
            parts = kernels.inner_with_pair(ids[other], gradients[other], x, y).sum(0)
            met = torch.where(same, parts, 0.0)
            total = met if total is None else total + met
        assert total is not None
        return self.by_user(total)

    def rounded(self, pair: Pair) -> Pair:
        """A pair with its scaled side, as it will be summed."""
        entry = next(entry for entry in self.entries if pair in entry.pairs)
        scaled = self.scaled[id(entry)]
        x, y = pair.inputs_ULI, pair.output_gradients_ULO
        return Pair(
            inputs_ULI=scaled if entry.scale_input else x,
            output_gradients_ULO=y if entry.scale_input else scaled,
            transposed=pair.transposed,
        )


def _numbers(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)
