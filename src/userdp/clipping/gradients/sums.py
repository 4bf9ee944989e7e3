"""Squared norms and weighted sums of the users' gradients, whatever form each is in.

Why rounding cannot carry a clipped update over its bound: docs/clipping.md, "Rounding".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from userdp.clipping.batches.users import RowRanges
from userdp.clipping.factors import power_of_two_below, rounding_factors
from userdp.clipping.gradients.batch_forms import BatchForms, Entry, Grouped, alike, entries_of
from userdp.clipping.gradients.forms import EmbeddingRows, Pair, Stored
from userdp.clipping.kernels import reference, running
from userdp.losses import at_least_float32

if TYPE_CHECKING:
    from userdp.clipping.kernels.gram import GramTable
    from userdp.clipping.kernels.settle import Settler
    from userdp.clipping.kernels.stored import StoredTable


# Roundings of the check in `Sums.scale` itself; fewer than ROUNDING_MARGIN leaves room for.
CHECK_MARGIN = 4


class Sums:
    """The clipped sum of one batch's forms: call `squared_norms`, then `scale`, then `add`.

    One object serves batches of one shape, one after the other. On CUDA one kernel launch takes the
    norms of all stored gradients and one adds them up, and the same holds for all pairs; otherwise
    there would be a launch for each of hundreds of small tensors.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._stored: dict[tuple[_Kind, tuple[torch.Size, ...]], StoredTable] = {}
        self._grams: dict[tuple[torch.dtype, int], GramTable] = {}
        self._settlers: dict[tuple[torch.dtype, int], Settler] = {}
        self._group_rows: dict[tuple[int, ...], Tensor] = {}
        self._batch: BatchForms | None = None

    def squared_norms(
        self,
        forms: Sequence[Grouped],
        ties: Sequence[tuple[int, int]],
        ranges: RowRanges | None = None,
    ) -> Tensor:
        """(groups, users): the squared norm of each user's gradient over each group's parameters.

        `ties` says where in `forms` an embedding and a head are that share their weight:
        ||e + h||^2 is ||e||^2 + ||h||^2 + 2 <e, h>.
        """
        forms = [(group if self._num_groups > 1 else 0, form) for group, form in forms]
        entries = entries_of(forms)
        batch = BatchForms(forms=forms, entries=entries, ranges=ranges)
        parts = [self._other_norms(batch)]
        if entries:
            groups = [entry.group for entry in entries]
            norms, exposure = self._pair_norms(batch)
            parts.append(self._by_group(groups, norms))
            if exposure is not None:
                batch.exposed = self._by_group(groups, exposure.square())
        if ties:
            groups = [forms[embedding][0] for embedding, _ in ties]
            inner = [batch.inner_products(forms[e][1], forms[h][1]) for e, h in ties]
            parts.append(self._by_group(groups, 2 * torch.stack(inner)))
        self._batch = batch
        batch.squared = torch.stack(parts).sum(0)
        return batch.squared

    def _other_norms(self, batch: BatchForms) -> Tensor:
        """Squared norms of stored gradients and of embedding rows, by group."""
        groups: list[int] = []
        norms: list[Tensor] = []
        for kind, all_members in _stored_by_kind(batch.forms).items():
            members = [(group, form) for group, form in all_members if form.squares_PU is None]
            if not members:
                continue
            gradients = [form.gradients_U for _, form in members]
            table = self._stored_table(kind, members)
            if table is not None:
                groups += table.block_groups
                starts = batch.starts if kind.by_row else batch.user_starts
                norms.append(table.squared_norms(gradients, starts, by_row=kind.by_row))
            else:
                groups += [group for group, _ in members]
                norms += [batch.stored_squared_norms(g, kind.by_row)[None] for g in gradients]
        for group, form in batch.forms:
            if isinstance(form, EmbeddingRows):
                groups.append(group)
                norms.append(batch.embedding_squared_norms(form)[None])
            elif isinstance(form, Stored) and form.squares_PU is not None:
                groups += [group] * len(form.squares_PU)
                norms.append(form.squares_PU)
        if not norms:
            first = next(form for _, form in batch.forms if isinstance(form, Pair)).inputs_ULI
            return at_least_float32(first.new_zeros(self._num_groups, batch.users))
        return self._by_group(groups, torch.cat(norms))

    def _by_group(self, groups: Sequence[int], values: Tensor) -> Tensor:
        """Values (n, users) added up by group: (groups, users)."""
        if self._num_groups == 1:
            return values.sum(0, keepdim=True)
        key = tuple(groups)
        if key not in self._group_rows:
            # Kept, since nothing may be sent from the host while a graph is captured.
            self._group_rows[key] = torch.tensor(groups, device=values.device)
        zeros = values.new_zeros(self._num_groups, values.shape[1])
        return zeros.index_add_(0, self._group_rows[key], values)

    def _pair_norms(self, batch: BatchForms) -> tuple[Tensor, Tensor | None]:
        """Squared norms (entries, users), and eps * `exposure` where sides are rounded."""
        starts = batch.starts
        norms: list[Tensor] = []
        exposed: list[Tensor] = []
        for part in alike(batch.entries):
            tensors = [entry.tensors for entry in part]
            if running.half_on_cuda(part[0].scaled_side):
                squared, exposure = self._gram_table(part, batch).squared_norms(tensors, starts)
                exposed.append(part[0].eps * exposure)
            else:
                each = [[reference.gram_norms(x, y, starts) for y in ys] for x, ys in tensors]
                squared = torch.stack([torch.stack(own).sum(0) for own in each])
                exposed += [
                    entry.eps * reference.exposure(*entry.tensors, starts)[None]
                    if entry.eps
                    else torch.zeros_like(squared[:1])
                    for entry in part
                ]
            norms.append(squared)
        rounds = any(entry.eps for entry in batch.entries)
        return torch.cat(norms), torch.cat(exposed) if rounds else None

    def scale(self, factors: Tensor, bound: Tensor | float) -> Tensor:
        """Scale the pairs; returns the final factors.

        Rounding a scaled side moves the user's sum by a measured distance. If factor ||g|| plus
        that distance exceeds the bound, the user's factor becomes the power of two below it, by
        which nothing is rounded. `rounding_factors` makes that rare.

        Guarantee: the norm of what a user adds, all groups together, is at most the bound.
        """
        batch = self._batch
        assert batch is not None
        halves = {entry.scaled_side.dtype for entry in batch.entries if entry.eps}
        if halves:
            assert batch.exposed is not None
            share = (batch.exposed / batch.squared.clamp(min=0)).sqrt()
            share = torch.where(batch.exposed > 0, share, 0.0)
            coarsest = max(halves, key=lambda dtype: torch.finfo(dtype).eps)
            factors = rounding_factors(factors, share, coarsest)
        moved: list[Tensor] = []
        for part in alike(batch.entries):
            sides, distances = self._scaled_pairs(part, factors, batch)
            batch.scaled |= {id(entry): side for entry, side in zip(part, sides, strict=True)}
            if distances is not None:
                moved.append(distances)
        if not moved:
            return factors
        norms = (factors * batch.squared.clamp(min=0).sqrt()).square().sum(0).sqrt()
        reached = norms + torch.cat(moved).square().sum(0).sqrt()
        within = reached <= bound * (1 - CHECK_MARGIN * torch.finfo(reached.dtype).eps)
        batch.again = ~within
        return torch.where(within, factors, power_of_two_below(factors))

    def _scaled_pairs(
        self, entries: Sequence[Entry], factors: Tensor, batch: BatchForms
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The scaled sides, and how far rounding moved each gradient (entries, users)."""
        if running.half_on_cuda(entries[0].scaled_side):
            rows = [entry.group for entry in entries]
            tensors = [entry.tensors for entry in entries]
            return self._gram_table(entries, batch).scaled(tensors, rows, factors)
        spread, starts = batch.spread(factors), batch.starts
        given = [(entry.scaled_side, spread[entry.group]) for entry in entries]
        ragged = starts is not None
        sides = [running.fused(reference.scaled, *one, any_rows=ragged) for one in given]
        if not entries[0].eps:
            return sides, None
        squared: list[Tensor] = []
        for entry, (side, own) in zip(entries, given, strict=True):
            errors = reference.rounding_errors(side, own)
            each = [reference.gram_norms(errors, other, starts) for other in entry.other_sides]
            squared.append(torch.stack(each).sum(0))
        return sides, torch.stack(squared).sqrt()

    def add(self, totals: Sequence[Tensor], factors: Tensor) -> None:
        """totals[i] += sum_u factors[group_i, u] * (user u's gradient in form i)."""
        batch, self._batch = self._batch, None
        assert batch is not None
        place = {id(form): total for (_, form), total in zip(batch.forms, totals, strict=True)}
        spread = batch.spread(factors)
        for kind, members in _stored_by_kind(batch.forms).items():
            gradients = [form.gradients_U for _, form in members]
            where = [place[id(form)] for _, form in members]
            weights = spread if kind.by_row else factors
            table = self._stored_table(kind, members)
            if table is not None:
                num_used = None if kind.by_row else batch.num_used
                table.add_weighted_sums(gradients, where, weights, num_used)
                continue
            for (group, _), gradient, total in zip(members, gradients, where, strict=True):
                reference.add_weighted_sum(total, gradient, weights[group])
        self._settle_pairs(batch, spread)
        for entry in batch.entries:
            for pair in entry.pairs:
                _add_pair(place[id(pair)], batch.rounded(pair))
        for group, form in batch.forms:
            if isinstance(form, EmbeddingRows):
                wide = at_least_float32(form.gradients_ULD)
                ragged = batch.ranges is not None
                rows = running.fused(reference.scaled, wide, spread[group], any_rows=ragged)
                total = place[id(form)]
                rows = rows.flatten(0, 1).to(total.dtype)
                total.index_add_(0, form.ids_UL.flatten(), rows)

    def _settle_pairs(self, batch: BatchForms, factors: Tensor) -> None:
        """Apply the final factors where they differ from those that the pairs were scaled by.

        Users whom rounding moved too far are scaled again. Users with factor zero get zeros on both
        sides, because 0 * inf is not 0.
        """
        again = torch.zeros_like(factors[0], dtype=torch.bool)
        if batch.again is not None:
            again = batch.spread(batch.again[None])[0]
        for part in alike(batch.entries):
            sides = [(entry, batch.scaled[id(entry)], entry.scaled_side) for entry in part]
            sides += [(entry, other, other) for entry in part for other in entry.other_sides]
            if running.half_on_cuda(part[0].scaled_side):
                self._settler(part, len(sides))(
                    [(side, given) for _, side, given in sides],
                    [entry.group for entry, _, _ in sides],
                    factors,
                    again,
                )
                continue
            for entry, side, given in sides:
                own = factors[entry.group]
                if side is not given and batch.again is not None:
                    reference.scale_again_(side, given, own, again)
                reference.silence_(side, own)

    def _stored_table(
        self, kind: _Kind, members: Sequence[tuple[int, Stored]]
    ) -> StoredTable | None:
        """The CUDA kernels' table for gradients of these shapes; None where torch does the work."""
        gradients = [form.gradients_U for _, form in members]
        if not gradients[0].is_cuda or kind.dtype == torch.float64:
            return None
        # Two tables may be needed: of all gradients, and of those without known norms.
        key = (kind, tuple(gradient.shape for gradient in gradients))
        if key not in self._stored:
            from userdp.clipping.kernels.stored import StoredTable

            self._stored[key] = StoredTable(gradients, [group for group, _ in members])
        return self._stored[key]

    def _gram_table(self, entries: Sequence[Entry], batch: BatchForms) -> GramTable:
        x, _ = entries[0].tensors
        key = (x.dtype, x.shape[1])
        if key not in self._grams:
            from userdp.clipping.kernels.gram import GramTable

            self._grams[key] = GramTable(
                [entry.tensors for entry in entries],
                [entry.scale_input for entry in entries],
                users=batch.users,
                most_rows=1 if batch.ranges is None else batch.ranges.most_rows,
            )
        return self._grams[key]

    def _settler(self, entries: Sequence[Entry], num_sides: int) -> Settler:
        x, _ = entries[0].tensors
        key = (x.dtype, x.shape[1])
        if key not in self._settlers:
            from userdp.clipping.kernels.settle import Settler

            self._settlers[key] = Settler(num_sides, x.device)
        return self._settlers[key]


@dataclass(frozen=True)
class _Kind:
    """What the stored gradients of one table have in common."""

    dtype: torch.dtype
    by_row: bool


def _stored_by_kind(forms: Sequence[Grouped]) -> dict[_Kind, list[tuple[int, Stored]]]:
    found: dict[_Kind, list[tuple[int, Stored]]] = {}
    for group, form in forms:
        if isinstance(form, Stored):
            kind = _Kind(form.gradients_U.dtype, form.by_row)
            found.setdefault(kind, []).append((group, form))
    return found


def _add_pair(total: Tensor, pair: Pair) -> None:
    """total += y^T x over all users' tokens."""
    x, y = pair.inputs_ULI.flatten(0, 1), pair.output_gradients_ULO.flatten(0, 1)
    if pair.transposed:
        reference.add_product(total, x.T, y)
    else:
        reference.add_product(total, y.T, x)
