"""Squared norms and weighted sums of a model's users' gradients, whatever form each is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from userdp.clipping import kernels
from userdp.clipping.factors import evenly_rounding
from userdp.clipping.flat import FlatBuffer
from userdp.clipping.formed import Entry, FormedBatch, Grouped, entries_of
from userdp.clipping.forms import Pair, Rows, Stored
from userdp.clipping.pack import Runs
from userdp.updates import at_least_float32

if TYPE_CHECKING:
    from userdp.clipping.triton_gram import GramTable
    from userdp.clipping.triton_stored import Silencer, StoredTable


# Of a norm that is nearly all rounding, no more than this is held back.
MOST_HELD_BACK = 0.5


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A cohort's clipped updates added up; how many they were, and how many were not clipped.

    A group without a record is not counted: its user moves no number by being there.
    Secret until noised.
    """

    total: FlatBuffer
    num_within: Tensor
    num_updates: int


class Sums:
    """The clipped sum of one batch's forms: `squared_norms`, then `scale`, then `add`.

    Forms count users, or rows where `runs` say whose they are; norms and factors always users.

    One object serves batches of one shape, one after the other. On CUDA, all stored gradients go
    through one kernel launch for the norms and one for the sums, and so do all pairs, instead of
    one launch for each of hundreds of small tensors.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._stored: dict[_Kind, StoredTable] = {}
        self._grams: dict[int, GramTable] = {}
        self._silencer: Silencer | None = None
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
            batch.exposed = self._by_group(groups, exposure.square())
        if ties:
            groups = [forms[embedding][0] for embedding, _ in ties]
            inner = [batch.inner_products(forms[e][1], forms[h][1]) for e, h in ties]
            parts.append(self._by_group(groups, 2 * torch.stack(inner)))
        self._batch = batch
        batch.squared = torch.stack(parts).sum(0)
        return batch.squared

    def held_back(self, rounding: float) -> Tensor | float:
        """The share (groups, users) of each norm to leave for the rounding of scaled pairs.

        `rounding` is the error to expect of a value, in eps of its dtype.
        """
        batch = self._batch
        assert batch is not None
        if not batch.rounds:
            return 0.0
        eps = torch.finfo(batch.entries[0].tensors[0].dtype).eps
        share = rounding * eps * (batch.exposed / batch.squared.clamp(min=0)).sqrt()
        return torch.where(batch.exposed > 0, share, 0.0).clamp(max=MOST_HELD_BACK)

    def _other_norms(self, batch: FormedBatch) -> Tensor:
        """Squared norms of what is stored and of embedding rows, by group."""
        groups: list[int] = []
        norms: list[Tensor] = []
        for kind, members in _stored_by_kind(batch.forms).items():
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

    def _pair_norms(self, batch: FormedBatch) -> tuple[Tensor, Tensor]:
        """Squared norms and `kernels.exposure`, (entries, users)."""
        entries, starts = batch.entries, batch.starts
        if kernels.half_on_cuda(entries[0].tensors[0]):
            parts = [
                self._gram_table(part, batch).squared_norms([e.tensors for e in part], starts)
                for part in _by_length(entries)
            ]
            norms, exposure = zip(*parts, strict=True)
            return torch.cat(norms), torch.cat(exposure)
        norms = [
            torch.stack([kernels.gram_norms(x, y, starts) for y in ys]).sum(0)
            for x, ys in (entry.tensors for entry in entries)
        ]
        exposure = [kernels.exposure(*entry.tensors, starts) for entry in entries]
        return torch.stack(norms), torch.stack(exposure)

    def scale(self, factors: Tensor, bound: Tensor | float) -> Tensor:
        """Scale the pairs; the factors, zero for users whose sum could not be vouched for.

        A scaled side is rounded in its own dtype, which moves the user's sum. How far is measured:
        ||factor g + errors|| is at most factor ||g|| + ||errors||. Guarantee: the norm of what the
        user adds, all groups together, is at most the bound, for every user; what is `held_back`
        makes sure that hardly anybody is lost.
        """
        batch = self._batch
        assert batch is not None
        if not batch.rounds:
            # Rounding in float32 or better stays within the margin.
            spread = batch.spread(factors)
            batch.scaled = {
                id(entry): kernels.run(kernels.scaled, _scaled_side(entry), spread[entry.group])
                for entry in batch.entries
            }
            return factors
        factors = evenly_rounding(factors, batch.entries[0].tensors[0].dtype)
        moved: list[Tensor] = []
        for part in _by_length(batch.entries):
            sides, distances = self._scaled_pairs(part, factors, batch)
            batch.scaled |= {id(entry): side for entry, side in zip(part, sides, strict=True)}
            moved.append(distances)
        norms = (factors.square() * batch.squared.clamp(min=0)).sum(0).sqrt()
        within = norms + torch.cat(moved).square().sum(0).sqrt() <= bound
        return torch.where(within, factors, 0.0)

    def _scaled_pairs(
        self, entries: Sequence[Entry], factors: Tensor, batch: FormedBatch
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The scaled sides, and how far (entries, users) rounding moved what they give."""
        if kernels.half_on_cuda(entries[0].tensors[0]):
            rows = [entry.group for entry in entries]
            tensors = [entry.tensors for entry in entries]
            return self._gram_table(entries, batch).scaled(tensors, rows, factors)
        spread, starts = batch.spread(factors), batch.starts
        sides: list[Tensor] = []
        squared: list[Tensor] = []
        for entry in entries:
            x, ys = entry.tensors
            side, own = _scaled_side(entry), spread[entry.group]
            errors = kernels.rounding_errors(side, own)
            sides.append(kernels.scaled(side, own))
            others = ys if entry.scale_input else [x]
            squared.append(
                torch.stack([kernels.gram_norms(errors, y, starts) for y in others]).sum(0)
            )
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
        self._silence_pairs(batch, spread)
        for entry in batch.entries:
            for pair in entry.pairs:
                _add_pair(place[id(pair)], batch.rounded(pair))
        for group, form in batch.forms:
            if isinstance(form, Rows):
                wide = at_least_float32(form.gradients_ULD)
                rows = kernels.run(kernels.scaled, wide, spread[group]).flatten(0, 1)
                total = place[id(form)]
                total.index_add_(0, form.ids_UL.flatten(), rows.to(total.dtype))

    def _silence_pairs(self, batch: FormedBatch, factors: Tensor) -> None:
        """Set both sides of pairs to zero where the factor is zero: 0 * inf is not 0."""
        if not batch.entries:
            return
        sides: list[Tensor] = []
        rows: list[int] = []
        for entry in batch.entries:
            x, ys = entry.tensors
            own = [batch.scaled[id(entry)], *(ys if entry.scale_input else [x])]
            sides += own
            rows += [entry.group] * len(own)
        if not kernels.half_on_cuda(sides[0]):
            for side, row in zip(sides, rows, strict=True):
                kernels.silence_(side, factors[row])
            return
        if self._silencer is None:
            from userdp.clipping.triton_stored import Silencer

            self._silencer = Silencer(len(sides), sides[0].device)
        self._silencer(sides, rows, factors)

    def _stored_table(
        self, kind: _Kind, members: Sequence[tuple[int, Stored]]
    ) -> StoredTable | None:
        """The CUDA kernels' table of these gradients, made when they are first seen."""
        first = members[0][1].gradients_U
        if not first.is_cuda or kind.dtype == torch.float64:
            return None
        if kind not in self._stored:
            from userdp.clipping.triton_stored import StoredTable

            gradients = [form.gradients_U for _, form in members]
            self._stored[kind] = StoredTable(gradients, [group for group, _ in members])
        return self._stored[kind]

    def _gram_table(self, entries: Sequence[Entry], batch: FormedBatch) -> GramTable:
        length = entries[0].tensors[0].shape[1]
        if length not in self._grams:
            from userdp.clipping.triton_gram import GramTable

            self._grams[length] = GramTable(
                [entry.tensors for entry in entries],
                [entry.scale_input for entry in entries],
                users=batch.users,
                most_rows=1 if batch.runs is None else batch.runs.most_rows,
            )
        return self._grams[length]


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


def _by_length(entries: Sequence[Entry]) -> list[list[Entry]]:
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.tensors[0].shape[1], []).append(entry)
    return list(found.values())


def _scaled_side(entry: Entry) -> Tensor:
    x, ys = entry.tensors
    return x if entry.scale_input else ys[0]


def _add_pair(total: Tensor, pair: Pair) -> None:
    """total += y^T x over all users' tokens."""
    x, y = pair.inputs_ULI.flatten(0, 1), pair.output_gradients_ULO.flatten(0, 1)
    if pair.transposed:
        kernels.add_product(total, x.T, y)
    else:
        kernels.add_product(total, y.T, x)
