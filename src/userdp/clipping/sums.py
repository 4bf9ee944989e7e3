"""Squared norms and weighted sums of a model's users' gradients, whatever form each is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from userdp.clipping import kernels
from userdp.clipping.factors import power_of_two_below, rounding_factors
from userdp.clipping.formed import Entry, FormedBatch, Grouped, alike, entries_of
from userdp.clipping.forms import Pair, Rows, Stored
from userdp.clipping.pack import Runs
from userdp.updates import at_least_float32

if TYPE_CHECKING:
    from userdp.clipping.triton_gram import GramTable
    from userdp.clipping.triton_stored import Settler, StoredTable


# Roundings of the check itself; less than clipping aims below the bound by.
CHECK_MARGIN = 4


class Sums:
    """The clipped sum of one batch's forms: `squared_norms`, then `scale`, then `add`.

    Forms count users, or rows where `runs` say whose they are; norms and factors always users.

    One object serves batches of one shape, one after the other. On CUDA, all stored gradients go
    through one kernel launch for the norms and one for the sums, and so do all pairs, instead of
    one launch for each of hundreds of small tensors.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._stored: dict[tuple[_Kind, tuple[torch.Size, ...]], StoredTable] = {}
        self._grams: dict[tuple[torch.dtype, int], GramTable] = {}
        self._settlers: dict[tuple[torch.dtype, int], Settler] = {}
        self._group_rows: dict[tuple[int, ...], Tensor] = {}
        self._batch: FormedBatch | None = None

    def squared_norms(
        self,
        forms: Sequence[Grouped],
        ties: Sequence[tuple[int, int]],
        runs: Runs | None = None,
    ) -> Tensor:
        """(groups, users): the squared norm of each user's gradient over each group's parameters.

        `ties` are places (embedding, head) in `forms` of one shared weight: ||e + h||^2 is
        ||e||^2 + ||h||^2 + 2 <e, h>.
        """
        forms = [(group if self._num_groups > 1 else 0, form) for group, form in forms]
        entries = entries_of(forms)
        batch = FormedBatch(forms=forms, entries=entries, runs=runs)
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

    def _other_norms(self, batch: FormedBatch) -> Tensor:
        """Squared norms of what is stored and of embedding rows, by group."""
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
                norms.append(table.squared_norms(gradients, batch.starts, by_row=kind.by_row))
            else:
                groups += [group for group, _ in members]
                norms += [batch.stored_squared_norms(g, kind.by_row)[None] for g in gradients]
        for group, form in batch.forms:
            if isinstance(form, Rows):
                groups.append(group)
                norms.append(batch.rows_squared_norms(form)[None])
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
            # Kept: nothing may be sent from the host while a graph is captured.
            self._group_rows[key] = torch.tensor(groups, device=values.device)
        zeros = values.new_zeros(self._num_groups, values.shape[1])
        return zeros.index_add_(0, self._group_rows[key], values)

    def _pair_norms(self, batch: FormedBatch) -> tuple[Tensor, Tensor | None]:
        """Squared norms (entries, users), and `kernels.exposure` in eps where sides are rounded."""
        starts = batch.starts
        norms: list[Tensor] = []
        exposed: list[Tensor] = []
        for part in alike(batch.entries):
            tensors = [entry.tensors for entry in part]
            if kernels.half_on_cuda(part[0].scaled_side):
                squared, exposure = self._gram_table(part, batch).squared_norms(tensors, starts)
                exposed.append(part[0].eps * exposure)
            else:
                each = [[kernels.gram_norms(x, y, starts) for y in ys] for x, ys in tensors]
                squared = torch.stack([torch.stack(own).sum(0) for own in each])
                exposed += [
                    entry.eps * kernels.exposure(*entry.tensors, starts)[None]
                    if entry.eps
                    else torch.zeros_like(squared[:1])
                    for entry in part
                ]
            norms.append(squared)
        rounds = any(entry.eps for entry in batch.entries)
        return torch.cat(norms), torch.cat(exposed) if rounds else None

    def scale(self, factors: Tensor, bound: Tensor | float) -> Tensor:
        """Scale the pairs; the factors, smaller for users whose sum could not be vouched for.

        A scaled side is rounded in its own dtype, which moves the user's sum. How far is measured:
        ||factor g + errors|| is at most factor ||g|| + ||errors||. Where that is too much, the
        factor becomes a power of two, by which nothing is rounded. Guarantee: the norm of what a
        user adds, all groups together, is at most the bound, for every user. Room is left for what
        rounding usually does, so that few are scaled so.
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
        self, entries: Sequence[Entry], factors: Tensor, batch: FormedBatch
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The scaled sides, and how far (entries, users) rounding moved what they give."""
        if kernels.half_on_cuda(entries[0].scaled_side):
            rows = [entry.group for entry in entries]
            tensors = [entry.tensors for entry in entries]
            return self._gram_table(entries, batch).scaled(tensors, rows, factors)
        spread, starts = batch.spread(factors), batch.starts
        given = [(entry.scaled_side, spread[entry.group]) for entry in entries]
        sides = [kernels.run(kernels.scaled, side, own) for side, own in given]
        if not entries[0].eps:
            return sides, None
        squared: list[Tensor] = []
        for entry, (side, own) in zip(entries, given, strict=True):
            errors = kernels.rounding_errors(side, own)
            each = [kernels.gram_norms(errors, other, starts) for other in entry.other_sides]
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
                kernels.add_weighted_sum(total, gradient, weights[group])
        self._settle_pairs(batch, spread)
        for entry in batch.entries:
            for pair in entry.pairs:
                _add_pair(place[id(pair)], batch.rounded(pair))
        for group, form in batch.forms:
            if isinstance(form, Rows):
                wide = at_least_float32(form.gradients_ULD)
                rows = kernels.run(kernels.scaled, wide, spread[group]).flatten(0, 1)
                total = place[id(form)]
                total.index_add_(0, form.ids_UL.flatten(), rows.to(total.dtype))

    def _settle_pairs(self, batch: FormedBatch, factors: Tensor) -> None:
        """Scale again whom rounding moved too far; silence both sides of whose factor is zero.

        `factors` are the final ones: 0 * inf is not 0.
        """
        again = torch.zeros_like(factors[0], dtype=torch.bool)
        if batch.again is not None:
            again = batch.spread(batch.again[None])[0]
        for part in alike(batch.entries):
            sides = [(entry, batch.scaled[id(entry)], entry.scaled_side) for entry in part]
            sides += [(entry, other, other) for entry in part for other in entry.other_sides]
            if kernels.half_on_cuda(part[0].scaled_side):
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
                    kernels.scale_again_(side, given, own, again)
                kernels.silence_(side, own)

    def _stored_table(
        self, kind: _Kind, members: Sequence[tuple[int, Stored]]
    ) -> StoredTable | None:
        """The CUDA kernels' table of these gradients, made when they are first seen."""
        gradients = [form.gradients_U for _, form in members]
        if not gradients[0].is_cuda or kind.dtype == torch.float64:
            return None
        # All of a kind, or those whose norms are not known.
        key = (kind, tuple(gradient.shape for gradient in gradients))
        if key not in self._stored:
            from userdp.clipping.triton_stored import StoredTable

            self._stored[key] = StoredTable(gradients, [group for group, _ in members])
        return self._stored[key]

    def _gram_table(self, entries: Sequence[Entry], batch: FormedBatch) -> GramTable:
        x, _ = entries[0].tensors
        key = (x.dtype, x.shape[1])
        if key not in self._grams:
            from userdp.clipping.triton_gram import GramTable

            self._grams[key] = GramTable(
                [entry.tensors for entry in entries],
                [entry.scale_input for entry in entries],
                users=batch.users,
                most_rows=1 if batch.runs is None else batch.runs.most_rows,
            )
        return self._grams[key]

    def _settler(self, entries: Sequence[Entry], num_sides: int) -> Settler:
        x, _ = entries[0].tensors
        key = (x.dtype, x.shape[1])
        if key not in self._settlers:
            from userdp.clipping.triton_stored import Settler

            self._settlers[key] = Settler(num_sides, x.device)
        return self._settlers[key]


@dataclass(frozen=True)
class _Kind:
    """What stored gradients in one table have in common."""

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
        kernels.add_product(total, x.T, y)
    else:
        kernels.add_product(total, y.T, x)
