"""When are two ids the same person, and what stands for an id in a store.

Rule: ids are compared after Unicode NFKC, case folding and stripping white space. Spellings that differ
and become equal are an error until the caller says what they mean: `merge` (one person) or `exact`
(different people). One person under two ids would be clipped twice and protected half.

Ids never enter a store: a keyed hash stands for each, and the key lies outside the store. Whoever
holds both can look a known id up; the store alone names nobody.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import unicodedata
from enum import StrEnum
from pathlib import Path

from userdp.errors import InputError

PSEUDONYM_BYTES = 16


class IdRule(StrEnum):
    """What to do with spellings that become equal when normalised."""

    REFUSE = "refuse"
    MERGE = "merge"
    EXACT = "exact"


def normalise(raw_id: str) -> str:
    """The id as it is compared.

    >>> normalise(" Ann@Example.org ") == normalise("ann@example.ORG")
    True
    """
    return unicodedata.normalize("NFKC", raw_id).strip().casefold()


class Identities:
    """Numbers users by first appearance and remembers their pseudonyms."""

    def __init__(self, rule: IdRule, key: bytes) -> None:
        self._rule = rule
        self._key = key
        self._numbers: dict[str, int] = {}
        self._spelling: dict[str, str] = {}
        self.pseudonyms: list[bytes] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, raw_id: str, where: str) -> int:
        """The user's number; `where` names the place in the source if the id is refused."""
        if self._rule is IdRule.EXACT:
            compared = raw_id
        else:
            compared = normalise(raw_id)
            first = self._spelling.setdefault(compared, raw_id)
            if self._rule is IdRule.REFUSE and first != raw_id:
                raise InputError(
                    f"{where}: this user id equals an earlier one after NFKC, case folding and "
                    "stripping, but is spelled differently. Say --ids merge if they are one person, "
                    "--ids exact if not."
                )
        number = self._numbers.get(compared)
        if number is None:
            number = self._numbers[compared] = len(self._numbers)
            self.pseudonyms.append(pseudonym(compared, self._key))
        return number


def pseudonym(compared_id: str, key: bytes) -> bytes:
    """What stands for an id in a store."""
    return hashlib.blake2b(compared_id.encode(), key=key, digest_size=PSEUDONYM_BYTES).digest()


def key_name(key: bytes) -> str:
    """A public name of a key: stores whose names agree can be compared user by user."""
    return hashlib.blake2b(b"userdp key name", key=key, digest_size=8).hexdigest()


def load_or_create_key(path: Path) -> bytes:
    """The 256-bit key in `path`, made there, readable by its owner only, if there is none."""
    if path.exists():
        key = path.read_bytes()
        if len(key) != 32:
            raise InputError(f"{path} is not a pseudonym key: expected 32 bytes, found {len(key)}.")
        return key
    key = secrets.token_bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key
