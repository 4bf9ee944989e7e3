"""Squared norms and weighted sums of a model's users' gradients, whatever form each is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from userdp.clipping import kernels
from userdp.clipping.flat import FlatBuffer
from userdp.clipping.forms import Form, Pair, Rows, Stored
from userdp.updates import at_least_float32

if TYPE_CHECKING:
    from userdp.clipping.triton_kernels import GramTable, StoredTable

# A form and the clip group (layer) that its parameter belongs to.
Grouped = tuple[int, Form]


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A cohort's clipped updates added up; how many they were, and how many were not clipped.

    Secret until noised.
    """

    total: FlatBuffer
    num_within: Tensor
    num_updates: int


class Sums:
    """Norms and sums of the same kinds of forms, batch after batch.

    On CUDA, all stored gradients go through one kernel launch for the norms and one for the sums,
    instead of one for each of hundreds of small tensors.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._tables: dict[torch.dtype, StoredTable] = {}
        self._grams: dict[int, GramTable] = {}
        self._groups: Tensor | None = None

    def squared_norms(self, forms: Sequence[Grouped], ties: Sequence[tuple[int, int]]) -> Tensor:
        """(groups, users): the squared norm of each user's gradient over each group's parameters.

        `ties` are places (embedding, head) in `forms` of one shared weight: ||e + h||^2 is
        ||e||^2 + ||h||^2 + 2 <e, h>.
        """
        groups: list[int] = []
        norms: list[Tensor] = []
        for dtype, members in _by_dtype(forms).items():
            table = self._table(dtype, members)
            if table is not None:
                groups += table.block_groups
                norms.append(table.squared_norms([form.gradients_U for _, form in members]))
            else:
                groups += [group for group, _ in members]
                norms += [kernels.squared_norms(form.gradients_U)[None] for _, form in members]
        for inputs in self._by_input(forms):
            pair_groups, pair_norms = self._gram_norms(inputs)
            groups += pair_groups
            norms.append(pair_norms)
        for group, form in forms:
            if isinstance(form, Rows):
                groups.append(group)
                squares = kernels.run(kernels.rows_squared_norms, form.ids_UL, form.gradients_ULD)
                norms.append(squares[None])
        for embedding, head in ties:
            group, rows = forms[embedding]
            assert isinstance(rows, Rows)
            groups.append(group)
            norms.append(2 * _inner_products(rows, forms[head][1])[None])
        stacked = torch.cat(norms)
        if self._num_groups == 1:
            return stacked.sum(0, keepdim=True)
        if self._groups is None or len(self._groups) != len(groups):
            # Kept: nothing may be sent from the host while a graph is captured.
            self._groups = torch.tensor(groups, device=stacked.device)
        zeros = stacked.new_zeros(self._num_groups, stacked.shape[1])
        return zeros.index_add_(0, self._groups, stacked)

    def _by_input(self, forms: Sequence[Grouped]) -> Iterator[list[tuple[int, list[Pair]]]]:
        """Pairs that one input gave rise to and that are clipped together, by token count."""
        found: dict[tuple[int, int], list[Pair]] = {}
        for group, form in forms:
            if isinstance(form, Pair):
                clipped_with = group if self._num_groups > 1 else 0
                found.setdefault((clipped_with, id(form.inputs_ULI)), []).append(form)
        by_length: dict[int, list[tuple[int, list[Pair]]]] = {}
        for (group, _), pairs in found.items():
            by_length.setdefault(pairs[0].inputs_ULI.shape[1], []).append((group, pairs))
        yield from by_length.values()

    def _gram_norms(self, inputs: list[tuple[int, list[Pair]]]) -> tuple[list[int], Tensor]:
        """Each input's clip group, and the squared norms of all pairs it is in: (inputs, users)."""
        first = inputs[0][1][0].inputs_ULI
        if not kernels.half_on_cuda(first):
            norms = [
                sum(kernels.gram_norms(p.inputs_ULI, p.output_gradients_ULO) for p in pairs)
                for _, pairs in inputs
            ]
            return [group for group, _ in inputs], torch.stack(norms)  # type: ignore[arg-type]
        from userdp.clipping.triton_kernels import GramTable

        # The widest first: the last programs of a launch should be short ones.
        inputs = sorted(inputs, key=lambda entry: -_width(entry[1]))
        tensors = [
            (pairs[0].inputs_ULI, [pair.output_gradients_ULO for pair in pairs])
            for _, pairs in inputs
        ]
        length = first.shape[1]
        if length not in self._grams:
            self._grams[length] = GramTable(tensors)
        return [group for group, _ in inputs], self._grams[length].squared_norms(tensors)

    def _table(
        self, dtype: torch.dtype, members: Sequence[tuple[int, Stored]]
    ) -> StoredTable | None:
        """The CUDA kernels' table of these gradients, made when they are first seen."""
        if not members[0][1].gradients_U.is_cuda or dtype == torch.float64:
            return None
        if dtype not in self._tables:
            from userdp.clipping.triton_kernels import StoredTable

            groups = [group if self._num_groups > 1 else 0 for group, _ in members]
            self._tables[dtype] = StoredTable([form.gradients_U for _, form in members], groups)
        return self._tables[dtype]

    def add(self, forms: Sequence[Grouped], totals: Sequence[Tensor], factors: Tensor) -> None:
        """totals[i] += sum_u factors[group_i, u] * (user u's gradient in form i)."""
        factor = lambda group: factors[group if len(factors) > 1 else 0]  # noqa: E731
        place = {id(form): total for (_, form), total in zip(forms, totals, strict=True)}
        for dtype, members in _by_dtype(forms).items():
            gradients = [form.gradients_U for _, form in members]
            where = [place[id(form)] for _, form in members]
            table = self._table(dtype, members)
            if table is not None and all(total.dtype == torch.float32 for total in where):
                table.add_weighted_sums(gradients, where, factors)
                continue
            for (group, _), gradient, total in zip(members, gradients, where, strict=True):
                kernels.add_weighted_sum(total, gradient, factor(group))
        # What was scaled is kept while it is used again: layers share inputs.
        scaled: dict[tuple[int, int], Tensor] = {}
        for group, form in forms:
            if isinstance(form, Pair):
                row = group if len(factors) > 1 else 0
                _add_pair(place[id(form)], form, factors[row], scaled, row)
            elif isinstance(form, Rows):
                wide = at_least_float32(form.gradients_ULD)
                rows = kernels.run(kernels.scaled, wide, factor(group)).flatten(0, 1)
                total = place[id(form)]
                total.index_add_(0, form.ids_UL.flatten(), rows.to(total.dtype))


def _by_dtype(forms: Sequence[Grouped]) -> dict[torch.dtype, list[tuple[int, Stored]]]:
    found: dict[torch.dtype, list[tuple[int, Stored]]] = {}
    for group, form in forms:
        if isinstance(form, Stored):
            found.setdefault(form.gradients_U.dtype, []).append((group, form))
    return found


def _add_pair(
    total: Tensor,
    pair: Pair,
    factors_U: Tensor,
    scaled: dict[tuple[int, int], Tensor],
    row: int,
) -> None:
    """Scale the narrower side, or the input if it is scaled already; then one product."""
    x, y = pair.inputs_ULI, pair.output_gradients_ULO
    if x.shape[2] <= y.shape[2] or (id(x), row) in scaled:
        kernels.silence_(y, factors_U)
        if (id(x), row) not in scaled:
            scaled[id(x), row] = kernels.run(kernels.scaled, x, factors_U)
        x = scaled[id(x), row]
    else:
        kernels.silence_(x, factors_U)
        y = kernels.run(kernels.scaled, y, factors_U)
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    if pair.transposed:
        kernels.add_product(total, x.T, y)
    else:
        kernels.add_product(total, y.T, x)


def _width(pairs: list[Pair]) -> int:
    return sum(pair.output_gradients_ULO.shape[2] for pair in pairs)


def _inner_products(rows: Rows, other: Form) -> Tensor:
    """<e_u, h_u> of an embedding and a head that share their weight."""
    ids, gradients = rows.ids_UL, rows.gradients_ULD
    if isinstance(other, Stored):
        return kernels.run(kernels.inner_with_stored, ids, gradients, other.gradients_U)
    assert isinstance(other, Pair)
    return kernels.run(
        kernels.inner_with_pair, ids, gradients, other.inputs_ULI, other.output_gradients_ULO
    )
