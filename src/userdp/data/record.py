"""One record of a source, and where it stands: what importers give and the store takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """A text and the ids of everyone it belongs to, as the source spells them."""

    text: str
    owners: tuple[str, ...]
    where: str

    def __repr__(self) -> str:
        return f"Record(<secret>, at {self.where})"
