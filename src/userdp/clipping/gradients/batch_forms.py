"""The forms of one batch, from their norms to their sum.

Forms count users, or rows in a ragged batch; norms and factors always count users. Everything here
is secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from userdp.clipping.batches.users import RowRanges
from userdp.clipping.gradients.forms import EmbeddingRows, Form, Pair, Stored
from userdp.clipping.kernels import reference, running

# A form and the clip group (layer) that its parameter belongs to.
Grouped = tuple[int, Form]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """All pairs with the same input that are clipped together."""

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
        """The sides that are not scaled."""
        x, ys = self.tensors
        return ys if self.scale_input else [x]

    @property
    def eps(self) -> float:
        """The eps of the scaled side's dtype; 0 for float32, whose rounding the margin covers."""
        dtype = self.scaled_side.dtype
        return torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0

    @property
    def scale_input(self) -> bool:
        """Whether the input is scaled: it has several outputs, or is no wider than its only one."""
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
        # The last programs of a kernel launch should be short ones.
        return str(x.dtype), x.shape[1], -sum(y.shape[2] for y in ys)

    return sorted(found.values(), key=order)


def alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries by dtype and token count, in their order: each list is one kernel launch."""
    found: dict[tuple[torch.dtype, int], list[Entry]] = {}
    for entry in entries:
        x, _ = entry.tensors
        found.setdefault((x.dtype, x.shape[1]), []).append(entry)
    return list(found.values())


class BatchForms:
    """The forms of one batch, and what is found out about them between norms and sum."""

    def __init__(
        self,
        *,
        forms: list[Grouped],
        entries: list[Entry],
        ranges: RowRanges | None,
    ) -> None:
        self.forms = forms
        self.entries = entries
        self.ranges = ranges
        # (groups, users): squared norms, and the square of how far rounding may move scaled pairs.
        self.squared: Tensor
        self.exposed: Tensor | None = None
        # The scaled side of each entry, by the entry's id.
        self.scaled: dict[int, Tensor] = {}
        # Users whose pairs must be scaled once more, by a factor that rounds nothing.
        self.again: Tensor | None = None

    @property
    def users(self) -> int:
        """The number of users, or of places for them."""
        if self.ranges is not None:
            return len(self.ranges.starts) - 1
        _, form = self.forms[0]
        if isinstance(form, Stored):
            return len(form.gradients_U)
        return len(form.inputs_ULI if isinstance(form, Pair) else form.ids_UL)

    @property
    def starts(self) -> Tensor | None:
        """Where users' rows begin in a ragged batch."""
        return None if self.ranges is None else self.ranges.starts

    @property
    def user_starts(self) -> Tensor | None:
        """The same, but places of padding have no rows: nothing is stored for them."""
        return None if self.ranges is None else self.ranges.user_starts

    @property
    def num_used(self) -> Tensor | None:
        """How many places of a ragged batch have something stored by user; they come first."""
        return None if self.user_starts is None else (self.user_starts.diff() > 0).sum()

    def spread(self, factors: Tensor) -> Tensor:
        """The users' factors, repeated for each of their rows."""
        return factors if self.ranges is None else factors[:, self.ranges.user_of_row]

    def by_user(self, values_R: Tensor) -> Tensor:
        """The rows' values added up by user."""
        if self.ranges is None:
            return values_R
        return reference.by_user(values_R, self.ranges.user_of_row, self.users)

    def stored_squared_norms(self, gradients: Tensor, by_row: bool) -> Tensor:
        """Squared norms of stored gradients, by user."""
        if self.ranges is None or not by_row:
            return reference.squared_norms(gradients)
        return reference.ragged_squared_norms(
            gradients, self.ranges.user_of_row, self.ranges.starts
        )

    def embedding_squared_norms(self, form: EmbeddingRows) -> Tensor:
        """Squared norms of an embedding's gradients, by user."""
        if self.ranges is None or self.ranges.most_rows == 1:
            norms = running.fused(
                reference.embedding_squared_norms,
                form.ids_UL,
                form.gradients_ULD,
                any_rows=self.ranges is not None,
            )
            return self.by_user(norms)
        where = (self.ranges.user_of_row, self.ranges.starts)
        return running.fused(
            reference.ragged_embedding_squared_norms,
            form.ids_UL,
            form.gradients_ULD,
            *where,
            any_rows=True,
        )

    def inner_products(self, rows: Form, other: Form) -> Tensor:
        """<e_u, h_u> from above, for an embedding and a head that share their weight."""
        assert isinstance(rows, EmbeddingRows)
        ids, gradients = rows.ids_UL, rows.gradients_ULD
        if isinstance(other, Stored):
            assert not other.by_row
            owner = self.ranges.user_of_row if self.ranges is not None else _numbers(ids)
            parts = running.fused(
                reference.inner_with_stored,
                ids,
                gradients,
                other.gradients_U,
                owner,
                any_rows=self.ranges is not None,
            )
            if self.user_starts is not None:
                # Nothing is stored for places of padding: what was read there is anything.
                of_user = torch.arange(len(ids), device=ids.device) < self.user_starts[-1]
                parts = torch.where(of_user, parts, 0.0)
            return self.by_user(parts.T).sum(1)
        assert isinstance(other, Pair)
        x, y = other.inputs_ULI, other.output_gradients_ULO
        if running.half_on_cuda(x):
            from userdp.clipping.kernels import inner

            most_rows = 1 if self.ranges is None else self.ranges.most_rows
            ids, gradients = ids.contiguous(), gradients.contiguous()
            return inner.inner_with_pair(ids, gradients, x, y, self.starts, most_rows=most_rows)
        if self.ranges is None:
            return reference.inner_with_pair(ids, gradients, x, y).sum(0)
        return self._inner_with_rows(ids, gradients, x, y, self.ranges)

    def _inner_with_rows(
        self, ids: Tensor, gradients: Tensor, x: Tensor, y: Tensor, ranges: RowRanges
    ) -> Tensor:
        """<e_u, h_u> of a ragged batch: each row of the head with each of the user's embedding."""
        row, owner = _numbers(ids), ranges.user_of_row
        total: Tensor | None = None
        for shift in range(1 - ranges.most_rows, ranges.most_rows):
            other = row + shift
            same = (other >= 0) & (other < len(row))
            other = other.clamp(0, len(row) - 1)
            same &= owner[other] == owner
            parts = reference.inner_with_pair(ids[other], gradients[other], x, y).sum(0)
            met = torch.where(same, parts, 0.0)
            total = met if total is None else total + met
        assert total is not None
        return self.by_user(total)

    def rounded(self, pair: Pair) -> Pair:
        """The pair with one side scaled, as it will be summed."""
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
