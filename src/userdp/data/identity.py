"""When two ids are the same person, and what replaces an id in a store.

Ids are compared after Unicode NFKC and case folding, without characters that cannot be seen
(zero-width ones, variation selectors, controls) and without white space at both ends. This is
repeated until nothing changes any more. If two different spellings become equal, this is an error
until the caller says what they mean: `merge` (one person) or `exact` (different people). A person
with two ids would get half the protection, because each id is clipped separately.

A store never contains an id. A keyed hash replaces each one, and the key is kept outside the store.
With both, one can look up a known id. The store alone names nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from userdp.data.array_files import PSEUDONYM_BYTES
from userdp.data.files import pc
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE

# To be raised with every change of what `normalise` returns: pseudonyms then differ.
NORMALISER = 2

# Unicode's Default_Ignorable_Code_Point: text shows nothing in their place. They are listed here
# because Python's tables lack this property, and because some are not even assigned yet.
_IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
_BRAILLE_BLANK = "\u2800"


class IdRule(StrEnum):
    """What to do with spellings that become equal when normalised."""

    REFUSE = "refuse"
    MERGE = "merge"
    EXACT = "exact"


def normalise(raw_id: str) -> str:
    """The id as it is compared.

    >>> normalise(" Ann@Example.org ") == normalise("ann@example.ORG")
    True
    >>> normalise("Ann Lee\u200b") == normalise("ann lee")
    True
    """
    if raw_id.isascii() and raw_id.isprintable():
        # The same result, faster.
        return raw_id.strip().lower()
    compared = raw_id
    while True:
        # Dropping a character may bring two together that NFKC makes one, and so may case folding.
        folded = unicodedata.normalize("NFKC", compared).casefold()
        seen = "".join(sign for sign in folded if not _is_unseen(sign))
        after = seen.strip()
        if after == compared:
            return after
        compared = after


def trimmed(text: str) -> str:
    """The text without white space and unseen characters at both ends.

    Every reader trims the cells that an id is built from by this rule.

    >>> trimmed(" so\u200b\\t")
    'so'
    """
    begin, end = 0, len(text)
    while begin < end and (text[begin].isspace() or _is_unseen(text[begin])):
        begin += 1
    while begin < end and (text[end - 1].isspace() or _is_unseen(text[end - 1])):
        end -= 1
    return text[begin:end]


def _is_unseen(sign: str) -> bool:
    """Whether a character leaves no mark and is no white space."""
    if sign.isspace():
        return False
    return (
        unicodedata.category(sign) in ("Cc", "Cf")
        or sign == _BRAILLE_BLANK
        or any(first <= ord(sign) <= last for first, last in _IGNORABLE)
    )


@dataclass(frozen=True, kw_only=True)
class DropRule:
    """Ids of mailing lists and bots, to drop: given one by one, or by a regular expression.

    >>> drop = DropRule(ids=frozenset({"list@example.org"}), matching=r".*\\[bot\\]")
    >>> drop("LIST@example.org"), drop("mender[bot]"), drop("ann")
    (True, True, False)
    """

    ids: frozenset[str] = frozenset()
    matching: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozenset(normalise(raw_id) for raw_id in self.ids))
        try:
            re.compile(self.matching or "")
        except re.error as error:
            raise InputError(
                f"the rule for ids to drop is no regular expression: {error}."
            ) from None

    def __call__(self, raw_id: str) -> bool:
        """Whether to drop this id, after normalising it."""
        if not self.ids and self.matching is None:
            return False
        compared = normalise(raw_id)
        return compared in self.ids or (
            self.matching is not None and re.fullmatch(self.matching, compared) is not None
        )


@dataclass(frozen=True, kw_only=True)
class Pseudonyms:
    """How ids are replaced, and the public name of the key that does it.

    `key_name` gives the name from the rule by which the ids were made that `of` replaces.
    """

    key_name: Callable[[IdRule], str]
    of: Callable[[str], bytes]
    fingerprint_key: bytes

    @staticmethod
    def under(key: bytes) -> Pseudonyms:
        """Keyed hashes: 128 bits of BLAKE2b."""
        return Pseudonyms(
            key_name=lambda rule: key_name(key, rule),
            of=lambda compared: pseudonym(compared, key),
            fingerprint_key=fingerprint_key(key),
        )

    @staticmethod
    def kept(name: str, fingerprint_key: bytes | None = None) -> Pseudonyms:
        """Keep the pseudonyms of an existing store, given in hex as ids.

        `name` and `fingerprint_key` are those of that store. Without a fingerprint key the new
        store gets one of its own.
        """
        return Pseudonyms(
            # The ids are pseudonyms already; the rule that they were made by is in the name.
            key_name=lambda _: name,
            of=bytes.fromhex,
            fingerprint_key=fingerprint_key or secrets.token_bytes(32),
        )


def as_is(cell: str) -> str:
    """The id in a cell that holds the id itself."""
    return cell


class Spellings:
    """Numbers the spellings of ids in order of appearance, and knows which person each one means.

    A cell is what a source has in place of an owner, and `decode` turns it into an id. The numbers
    only serve the grouping that follows. There users get their own numbers, by first appearance.
    """

    def __init__(self, *, rule: IdRule, drop: DropRule) -> None:
        self._rule = rule
        self._drop = drop
        self._known: dict[Callable[[str], str], _KnownCells] = {}
        self._person_of: list[int] = []
        self._dropped: list[bool] = []
        self._persons: dict[str, int] = {}
        self._person_of_id: dict[str, int] = {}

    @property
    def any_merged(self) -> bool:
        """Whether two spellings mean one person."""
        return len(self._persons) < len(self._person_of)

    def numbers_of(
        self, cells: pa.Array, decode: Callable[[str], str], where: Callable[[int], str]
    ) -> NDArray[np.int32]:
        """The number of each cell's spelling; `where(i)` names the place of a refused cell."""
        known = self._known.setdefault(decode, _KnownCells())
        positions = known.find(cells)
        if positions.null_count:
            is_new = pc.is_null(positions)
            unknown = cells.filter(is_new)
            new_cells = unknown.unique()
            for cell in new_cells.to_pylist():
                try:
                    known.numbers.append(self._add(decode(cell)))
                except ValueError as error:
                    place = where(pc.index(cells, cell).as_py())
                    raise InputError(f"{place}: {_reason(error)}") from None
            first_new = known.extend(new_cells)
            found = pc.add(pc.index_in(unknown, value_set=new_cells), first_new)
            positions = pc.replace_with_mask(positions, is_new, found.cast(pa.int32()))
        return np.asarray(known.numbers, np.int32)[positions.to_numpy()]

    def _add(self, raw_id: str) -> int:
        dropped = self._drop(raw_id)
        person = self._person_of_id.get(raw_id)
        if person is None:
            compared = raw_id if self._rule is IdRule.EXACT else normalise(raw_id)
            known_persons = len(self._persons)
            person = self._persons.setdefault(compared, known_persons)
            if self._rule is IdRule.REFUSE and person < known_persons and not dropped:
                raise _CollisionError
            self._person_of_id[raw_id] = person
        self._person_of.append(person)
        self._dropped.append(dropped)
        return len(self._person_of) - 1

    def people(self) -> pa.Table:
        """Which person each spelling means, and whether the person is dropped."""
        return pa.table(
            {
                "spelling": pa.array(range(len(self._person_of)), pa.int32()),
                "person": pa.array(self._person_of, pa.int32()),
                "dropped": pa.array(self._dropped, pa.bool_()),
            }
        )

    def compared_ids(self, persons: NDArray[np.int32]) -> list[str]:
        """The ids of these persons, as they are compared."""
        compared = list(self._persons)
        return [compared[person] for person in persons]


class _CollisionError(ValueError):
    """Two spellings are equal when normalised."""


def _reason(error: ValueError) -> str:
    if isinstance(error, _CollisionError):
        return (
            "this user id equals an earlier one after NFKC, case folding and dropping what cannot "
            "be seen, but is spelled differently. Say --ids merge if they are one person, --ids "
            'exact if not (Python: UserStore.from_dataset(..., ids="merge"), and train on that '
            "store)."
        )
    return "a user id must be a string or a whole number, and not empty."


class _KnownCells:
    """Cells met before and their numbers. Arrow looks a whole batch up at once."""

    def __init__(self) -> None:
        self._cells = pa.array([], pa.large_string())
        self.numbers: list[int] = []

    def find(self, cells: pa.Array) -> pa.Int32Array:
        """The position of each cell among the known ones, or null."""
        return pc.index_in(cells, value_set=self._cells)

    def extend(self, new_cells: pa.Array) -> int:
        """Add cells; returns the position of the first."""
        first = len(self._cells)
        self._cells = pa.concat_arrays([self._cells, new_cells])
        return first


def pseudonym(compared_id: str, key: bytes) -> bytes:
    """The keyed hash that replaces an id in a store."""
    return hashlib.blake2b(compared_id.encode(), key=key, digest_size=PSEUDONYM_BYTES).digest()


def key_name(key: bytes, rule: IdRule) -> str:
    """A public name of a key and of how ids are compared.

    Stores with the same key name can be compared user by user. An id that is kept exact and the
    same id normalised have different pseudonyms, so their stores get different names.
    """
    compared = "exact" if rule is IdRule.EXACT else f"normalised {NORMALISER}"
    name = f"userdp key name, ids {compared}"
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest()


def fingerprint_key(key: bytes) -> bytes:
    """The key of fingerprints, derived from the key of pseudonyms. It cannot find any user's id."""
    return hashlib.blake2b(b"userdp fingerprint", key=key, digest_size=32).digest()


def load_or_create_key(path: Path) -> bytes:
    """The 256-bit key in `path`. If there is none, it is made, readable by its owner only."""
    if path.exists():
        key = path.read_bytes()
        if len(key) != 32:
            raise InputError(f"{path} is not a pseudonym key: expected 32 bytes, found {len(key)}.")
        return key
    key = secrets.token_bytes(32)
    path.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY_FILE), "wb"
    ) as file:
        file.write(key)
    return key


def key_beside(store: Path) -> Path:
    """Where the key of a store lies unless the caller says otherwise."""
    return store.with_name("secret") / f"{store.name}.key"


def forget_key(path: Path, *, is_own_folder: bool) -> None:
    """Delete a key that was made for an import which failed, and its folder if that is empty."""
    path.unlink(missing_ok=True)
    if is_own_folder:
        with contextlib.suppress(OSError):
            # The directory goes too, unless there is something else in it.
            path.parent.rmdir()
