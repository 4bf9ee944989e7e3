"""Which of a user's rows take part: `[data] select` and `resample` (Chua et al. 2024).

A criterion gives every record a score. Each user keeps the k rows that come first: the first rows
of the best records, then their second rows, and so on. So k records give one row each, as in the
paper, and a user of few long records still gives k rows. k is the plan's `group_size`.

    random                rows uniformly without replacement: at each step (unit user), or once
    longest, shortest     by the number of a record's tokens (Sec. 4.1)
    highest-perplexity,   by a record's mean loss under the model before training, which must be
    lowest-perplexity     public (Sec. 4.1)
    random-chunk          spans of `sequence_length` tokens anywhere in the user's text, which is
                          one document; they are redrawn whenever they are used (Sec. 5.1)

By default a user gives as many rows as there are, up to k. With `resample`, a user who has fewer
than k gives k draws with replacement from them (Sec. 6). The paper does so.

Why this costs nothing: what a user gives depends on that user's own records, on public things and
on randomness of that user's own. A neighbouring dataset changes what one user gives and nothing
else, and nobody ever gives more than k rows. Where users are sampled, the mean of a user's rows is
clipped once, whatever the rows are. Where records are sampled, a user has at most k groups, each
with a coin of its own and clipped by itself. The accounting covers any content of these groups,
also one that is redrawn at each step. All this needs records of one owner each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from userdp.data.select import random_chunks
from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.index import Rows, UserIndex, indptr_of
from userdp.streams import Streams
from userdp.units import SamplingUnit


class Select(StrEnum):
    """The criterion by which a user's rows are chosen."""

    RANDOM = "random"
    LONGEST = "longest"
    SHORTEST = "shortest"
    HIGHEST_PERPLEXITY = "highest-perplexity"
    LOWEST_PERPLEXITY = "lowest-perplexity"
    RANDOM_CHUNK = "random-chunk"


BY_PERPLEXITY = frozenset({Select.HIGHEST_PERPLEXITY, Select.LOWEST_PERPLEXITY})
# A chunk may begin and end anywhere, and records are compared by the loss of their tokens. Not
# every task can say what that means.
_TASKS = {
    Select.RANDOM_CHUNK: ("causal",),
    Select.HIGHEST_PERPLEXITY: ("causal", "chat"),
    Select.LOWEST_PERPLEXITY: ("causal", "chat"),
}
_LOW_FIRST = frozenset({Select.SHORTEST, Select.LOWEST_PERPLEXITY})


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A criterion, and whether users of few rows are resampled to k.

    With `tokens_per_user`, users first become equally long (`same_size`).

    >>> Choice(select=Select("longest"), resample=True).name
    'longest, resampled'
    """

    select: Select = Select.RANDOM
    resample: bool = False
    tokens_per_user: int | None = None

    @staticmethod
    def of(select: str, *, resample: bool = False, tokens_per_user: int | None = None) -> Choice:
        """The choice of that name."""
        if select not in list(Select):
            raise InputError(f"select={select!r} is unknown: use one of {', '.join(Select)}.")
        if tokens_per_user is not None and tokens_per_user < 2:
            raise InputError(f"tokens_per_user={tokens_per_user}: predicting takes at least 2.")
        return Choice(select=Select(select), resample=resample, tokens_per_user=tokens_per_user)

    @property
    def name(self) -> str:
        """What distinguishes this choice from every other, for the ledger."""
        more = ", resampled" if self.resample else ""
        if self.tokens_per_user is not None:
            more += f", {self.tokens_per_user} tokens of each user"
        return f"{self.select.value}{more}"

    @property
    def needs_losses(self) -> bool:
        """Whether records are scored by a public model."""
        return self.select in BY_PERPLEXITY

    def check(self, *, has_selection: bool, fixed_graph: bool, task: str) -> None:
        """Refuse a choice that does not go with a selection made before, or with the task."""
        if fixed_graph and self != Choice():
            raise InputError(
                f"[data] select = {self.name!r} is for records of one owner each: one owner's text "
                "would change which records of the others take part. Leave out select, resample "
                "and tokens_per_user; `userdp bound` has chosen the records."
            )
        if has_selection and self.select is not Select.RANDOM:
            raise InputError(
                f"[data] selection and select = {self.select.value!r} both choose the records: "
                "leave one of them out."
            )
        # What a task's name adds (its settings, a loss of one's own) says nothing about its rows.
        kind = task.replace(",", " ").split()[0]
        if kind not in _TASKS.get(self.select, (kind,)):
            raise InputError(
                f"[data] select = {self.select.value!r} reads running text, and the task is "
                f"{kind!r}: choose rows by length or at random."
            )


class Contributions(Protocol):
    """What users may give: whose rows are whose, and what a drawn group of rows reads."""

    def index(self) -> UserIndex:
        """The rows that samplers draw from: at most k of each user where that is fixed."""
        ...

    def read(self, group: Rows, rng: np.random.Generator) -> tuple[TokenRows, Rows]:
        """The tokens of a drawn group, as rows of a table. `rng` belongs to this group and step."""
        ...


def contributions(
    rows: TokenRows,
    choice: Choice,
    *,
    unit: SamplingUnit,
    group_size: int,
    sequence_length: int,
    streams: Streams,
    losses: NDArray[np.float64] | None = None,
    is_selected: bool = False,
    batches: Rows | None = None,
) -> Contributions:
    """What the users of `rows` may give under `choice`.

    `losses[i]` is the mean loss of record i, for the perplexity criteria. `streams` decide what is
    resampled once, before training. `is_selected` says that the records were chosen before
    (`userdp bound`). Records are then kept as a criterion keeps them, all with the same score.
    `batches` says in which order, if it is fixed: then all rows are kept as they are.

    Guarantee: where records are sampled (unit record), no user has more than `group_size` rows in
    the index if a criterion or `is_selected` is given, or chunks are drawn; in the other cases the
    sampler's `limit_contributions` chooses them at random.
    """
    if batches is not None:
        return ChosenRows(rows=rows, chosen=replace(rows.index(), batches=batches))
    if choice.select is Select.RANDOM_CHUNK:
        return Chunks.of(
            rows,
            most=group_size,
            always_most=choice.resample,
            sequence_length=sequence_length,
        )
    if choice.select is not Select.RANDOM:
        index = ranked_rows(rows, choice, group_size=group_size, losses=losses)
    elif is_selected and unit is SamplingUnit.RECORD:
        index = best_rows(rows, np.zeros(_num_records(rows)), at_most=group_size)
    else:
        index = rows.index()
    if not choice.resample:
        return ChosenRows(rows=rows, chosen=index)
    if unit is SamplingUnit.USER:
        return ResampledRows(rows=rows, chosen=index, group_size=group_size)
    return ChosenRows(rows=rows, chosen=_resampled_once(index, group_size, streams))


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Some of the rows. A row may be there several times; then it is several groups."""

    rows: TokenRows
    chosen: UserIndex

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<secret>)"

    def index(self) -> UserIndex:
        """Whose rows are whose, of those that were chosen."""
        return self.chosen

    def read(self, group: Rows, rng: np.random.Generator) -> tuple[TokenRows, Rows]:
        """The rows of the group as they are."""
        return self.rows, group


@dataclass(frozen=True, kw_only=True, repr=False)
class ResampledRows(ChosenRows):
    """Where users are sampled: a user of fewer than k rows gives k draws of them at each step."""

    group_size: int

    def read(self, group: Rows, rng: np.random.Generator) -> tuple[TokenRows, Rows]:
        """The rows of the group, or `group_size` draws of them with replacement."""
        if 0 < len(group) < self.group_size:
            group = rng.choice(group, size=self.group_size, replace=True)
        return self.rows, group


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Each user has slots instead of rows. Whenever a slot is drawn, it reads a new chunk.

    A user has as many slots as full rows would hold the text, at most k. Slot i belongs to user
    `owner_of_slot[i]`. Where records are sampled, each slot is a group with its own coin.
    """

    rows: TokenRows
    documents: UserIndex
    slots: UserIndex
    owner_of_slot: Rows
    sequence_length: int

    def __repr__(self) -> str:
        return "Chunks(<secret>)"

    @staticmethod
    def of(rows: TokenRows, *, most: int, always_most: bool, sequence_length: int) -> Chunks:
        """The slots of every user; with `always_most`, k of each user who has any text."""
        documents = rows.index()
        tokens = np.bincount(
            rows.owners, weights=np.diff(rows.indptr), minlength=rows.num_users
        ).astype(np.int64)
        count = np.minimum(-(-tokens // sequence_length), most)
        if always_most:
            count = np.where(tokens > 0, most, 0)
        owner_of_slot = np.repeat(np.arange(rows.num_users), count)
        return Chunks(
            rows=rows,
            documents=documents,
            slots=UserIndex.from_owner_numbers(owner_of_slot, num_users=rows.num_users),
            owner_of_slot=owner_of_slot,
            sequence_length=sequence_length,
        )

    def index(self) -> UserIndex:
        """Whose slots are whose."""
        return self.slots

    def read(self, group: Rows, rng: np.random.Generator) -> tuple[TokenRows, Rows]:
        """As many new chunks of the user's document as the group has slots."""
        if not len(group):
            return self.rows, group
        own = self.documents.rows_of(int(self.owner_of_slot[group[0]]))
        chunks = random_chunks(
            self.rows, own, count=len(group), sequence_length=self.sequence_length, rng=rng
        )
        return chunks, np.arange(len(group))


def ranked_rows(
    rows: TokenRows,
    choice: Choice,
    *,
    group_size: int,
    losses: NDArray[np.float64] | None = None,
) -> UserIndex:
    """Of each user the `group_size` first rows by a criterion: length, or the `losses` given."""
    assert (losses is not None) == choice.needs_losses
    scores = record_lengths(rows) if losses is None else losses
    sign = -1.0 if choice.select in _LOW_FIRST else 1.0
    return best_rows(rows, sign * scores, at_most=group_size)


def best_rows(rows: TokenRows, scores: NDArray[np.float64], *, at_most: int) -> UserIndex:
    """Of each user the `at_most` first rows: first rows of the best records, then second ones.

    `scores[i]` is the score of record i; the highest is best. It may depend on that record and on
    public things only. Of equal scores the earlier row wins, and one that is not a number is last.
    A user's rows are in the order of the data.

    Reference: Chua et al. 2024, Sec. 4.1.
    """
    records = _records_of(rows)
    score = np.nan_to_num(scores[records], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    number = np.arange(len(rows))
    is_first = np.append(True, records[1:] != records[:-1]) if len(rows) else np.zeros(0, bool)
    place_in_record = number - np.maximum.accumulate(np.where(is_first, number, 0))
    order = np.lexsort((number, -score, place_in_record, rows.owners))
    everything = rows.index()
    rank = number - everything.indptr[np.asarray(rows.owners)[order]]
    kept = np.sort(order[rank < at_most])
    owners = np.asarray(rows.owners)[kept]
    found = UserIndex.from_owner_numbers(owners, num_users=rows.num_users)
    return UserIndex(indptr=found.indptr, rows=kept[found.rows])


def record_lengths(rows: TokenRows) -> NDArray[np.float64]:
    """How many tokens each record has in its rows."""
    lengths = np.zeros(_num_records(rows))
    np.add.at(lengths, _records_of(rows), np.diff(rows.indptr))
    return lengths


def _records_of(rows: TokenRows) -> NDArray[np.int64]:
    if rows.records is None:
        raise InputError("these rows do not say which records they are from: give `records`.")
    return np.asarray(rows.records)


def _num_records(rows: TokenRows) -> int:
    return int(_records_of(rows).max(initial=-1)) + 1


def _resampled_once(index: UserIndex, group_size: int, streams: Streams) -> UserIndex:
    """The index in which a user of fewer than k rows has k draws of them."""
    groups: list[Rows] = []
    for user in range(index.num_users):
        own = index.rows_of(user)
        if 0 < len(own) < group_size:
            own = streams.rng(0, user + 1).choice(own, size=group_size, replace=True)
        groups.append(own)
    sizes = np.fromiter((len(group) for group in groups), np.int64, count=len(groups))
    indptr = indptr_of(sizes)
    rows = np.concatenate(groups) if groups else np.zeros(0, np.int64)
    return UserIndex(indptr=indptr, rows=rows)
