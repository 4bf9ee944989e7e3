"""A cohort into batches: which users share one, which run alone, and whose records are joined.

What one user's data decides here concerns that user alone: whether its own records are joined into
fewer rows, and whether it is larger than a batch.

Secret: everything here but the limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.joined_records import ROW, can_join, joined, worth_joining
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.batches.users import Users, has_tokens, power_of_two, size_of
from userdp.errors import InputError
from userdp.losses import Batch, RecordLoss, records_in

# The longest records that may share a row where nobody declared how long records are.
USUAL_LENGTH = 1_024


class Packing:
    """Splits cohorts into batches of at most `sizes.max_tokens` padded tokens.

    `ladder` rounds sizes up, so that few batch shapes occur. `ragged` puts users of different size
    into one batch if their rows hold tokens, `ragged_always` also if they do not. `join_records`
    joins every user's records; None joins those of users for whom it saves much. `sequence_length`
    and `group_size` say how long records are and how many rows a group has at most, if declared.
    """

    def __init__(
        self,
        model: nn.Module,
        record_loss: RecordLoss,
        *,
        device: str,
        sizes: Sizes,
        max_equal_users: int | None,
        ladder: bool,
        ragged: bool,
        ragged_always: bool,
        sequence_length: int | None,
        join_records: bool | None,
        group_size: int | None = None,
    ) -> None:
        self._model, self._record_loss, self._device = model, record_loss, device
        self._sizes = sizes
        self._max_equal_users = max_equal_users
        self._ladder = ladder
        self.ragged = ragged
        self._ragged_always = ragged_always
        self._sequence_length = sequence_length
        self._group_size = group_size
        self._join_all = join_records is True
        # None: not tried yet.
        self._can_join = False if join_records is False else None
        if self._join_all:
            self._refuse_if_it_cannot_join()

    def halve(self) -> bool:
        """Make batches half as large from here on; False if they hold one row already."""
        if self._sizes.max_tokens <= max(1, self._sizes.longest):
            return False
        self._sizes.max_tokens //= 2
        return True

    def state_dict(self) -> dict[str, int]:
        """The sizes that later batches depend on. Secret: they come from what was seen."""
        sizes = self._sizes
        return {
            "max_tokens": sizes.max_tokens,
            "longest": sizes.longest,
            "most_seen": sizes.most_seen,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what `state_dict` gave."""
        for name, value in state.items():
            setattr(self._sizes, name, value)

    def split(self, groups: Iterable[Batch]) -> tuple[list[Batch], Iterator[Users]]:
        """The users that are larger than a batch, and batches of all others."""
        large: list[Batch] = []
        packed: list[Iterable[Users]] = []
        kinds = _by_names(self._joined_where_worth_it(group) for group in groups)
        for kind in kinds:
            self._sizes.see(kind)
        for kind in kinds:
            ragged = self.ragged and (self._ragged_always or has_tokens(kind))
            large += [group for group in kind if not self._fits(group, ragged)]
            fitting = [group for group in kind if self._fits(group, ragged)]
            packed.append(self._packed(fitting, ragged))
        return large, itertools.chain.from_iterable(packed)

    def pieces(self, group: Batch) -> list[Users]:
        """One large user's rows in batches; each row weighs 1 / (number of the user's rows)."""
        size, limits = size_of(group), self._sizes
        step = max(1, limits.max_tokens // size.length)
        pieces: list[Users] = []
        for start in range(0, size.rows, step):
            part = {name: tensor[start : start + step] for name, tensor in group.items()}
            (piece,) = pack_equal(
                [part], max_tokens=1, ladder=self._ladder, max_length=limits.max_length
            )
            share = records_in(part) / size.rows
            pieces.append(Users(batch=piece.batch, weights=piece.weights * share, count=1))
        return pieces

    def _fits(self, group: Batch, ragged: bool) -> bool:
        """Whether the group is no larger than a batch."""
        if ragged:
            return self._sizes.holds(group)
        return size_of(group).tokens <= self._sizes.max_tokens

    def _packed(self, groups: Sequence[Batch], ragged: bool) -> Iterable[Users]:
        if ragged:
            return pack_ragged(groups, self._sizes)
        return pack_equal(
            groups,
            max_tokens=self._sizes.max_tokens,
            ladder=self._ladder,
            max_users=self._max_equal_users,
            max_length=self._sizes.max_length,
        )

    def _joined_where_worth_it(self, group: Batch) -> Batch:
        """The group with several records to a row, if that is asked for or saves it much.

        The group's own records and public numbers decide. Joining changes how sums are rounded, and
        one user must not change how others' are.
        """
        if self._can_join is False:
            return group
        public = self._sequence_length, self._group_size
        if not (self._join_all or worth_joining(group, self._device, *public)):
            return group
        if self._can_join is None:
            self._can_join = can_join(self._model, self._record_loss, self._join_length)
        if not self._can_join or size_of(group).length > self._join_length:
            return group
        found = joined(group, ROW.get(self._device, ROW["cpu"]))
        # A user larger than a batch runs in pieces, and a record must not be cut in two.
        return found if size_of(found).tokens <= self._sizes.max_tokens else group

    @property
    def _join_length(self) -> int:
        """How long records that share a row may be; the model's attention window may be shorter."""
        max_length = self._sizes.max_length
        limit = self._sequence_length or min(max_length or USUAL_LENGTH, USUAL_LENGTH)
        return max(limit, min(power_of_two(limit), max_length or power_of_two(limit)))

    def _refuse_if_it_cannot_join(self) -> None:
        self._can_join = can_join(self._model, self._record_loss, self._join_length)
        if not self._can_join:
            raise InputError(
                "join_records: this model does not keep records apart in one row (records of "
                f"length {self._join_length} were tried). It takes a decoder of the transformers "
                "library with SDPA attention, position_ids, and no window shorter than a record."
            )


def _by_names(groups: Iterable[Batch]) -> list[list[Batch]]:
    """The groups by the names of their tensors: only those with the same ones share a batch."""
    found: dict[frozenset[str], list[Batch]] = {}
    for group in groups:
        found.setdefault(frozenset(group), []).append(group)
    return list(found.values())
