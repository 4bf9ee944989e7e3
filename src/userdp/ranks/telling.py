"""What one rank tells the others: a value, or that it failed.

Of an error that this package raises on purpose, the others get the words, which name no data. Of
any other error they get the name of its class alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from userdp import errors
from userdp.errors import StoppedRunError
from userdp.ranks_launched import TOLD_BY


@dataclass(frozen=True, kw_only=True)
class Told:
    """A value, or the class and the words of an error and the rank that met it."""

    value: Any = None
    error: str | None = None
    words: str = ""
    rank: int = 0

    def __repr__(self) -> str:
        return f"Told(error={self.error!r}, rank={self.rank})"

    @staticmethod
    def of_error(error: BaseException, rank: int) -> Told:
        """What a rank that failed tells the others."""
        name = type(error).__name__
        is_ours = getattr(errors, name, None) is type(error)
        return Told(error=name, words=str(error) if is_ours else "", rank=rank)


def retold(told: Told) -> Exception:
    """The error of another rank, to raise here."""
    assert told.error is not None
    kind = getattr(errors, told.error, None)
    if told.words and isinstance(kind, type) and issubclass(kind, Exception):
        error: Exception = kind(told.words)
    else:
        error = StoppedRunError(
            f"rank {told.rank} stopped with {told.error}, and the others with it. Its own output "
            "says more."
        )
    setattr(error, TOLD_BY, told.rank)
    return error
