"""The ledger of a run on the ranks that do not write it: the same rows, in memory.

Every rank charges its copy as the first rank charges the file, so all have the same rows and the
same hashes, and any of them can make the statement. Only the file counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from userdp.ledger.book import Ledger
from userdp.ledger.rows import Kept


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a copy is made from. Secret: the key is in it."""

    kept: Kept
    key: bytes | None
    from_disk: bool

    def __repr__(self) -> str:
        return "Rows(<secret>)"


class LedgerCopy(Ledger):
    """A ledger in memory that another process of the same run has on disk."""

    @staticmethod
    def rows_of(ledger: Ledger) -> Rows:
        """What the other processes need."""
        return Rows(kept=ledger._kept, key=ledger._key, from_disk=ledger._from_disk)

    @staticmethod
    def of(rows: Rows) -> LedgerCopy:
        """The copy. It is charged like the ledger itself, and never writes."""
        found = LedgerCopy(rows.kept, key=rows.key, writable=not rows.kept.is_closed)
        found._from_disk = rows.from_disk
        return found
