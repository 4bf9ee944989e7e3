"""What the ranks do between two steps: all do the same, whichever of them was asked."""

from __future__ import annotations

from dataclasses import dataclass

from userdp.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Whether to save a checkpoint, to stop for a signal (its number, or 0), or to end the run."""

    save: bool
    stop: int
    end: bool

    def of_all(self, ranks: Ranks) -> Wishes:
        """What all ranks do: the first says whether to save and to end, and any may be stopped."""
        if ranks.count == 1:
            return self
        found = ranks.numbers([self.save, self.stop, self.end])
        return Wishes(save=bool(found[0, 0]), stop=int(found[:, 1].max()), end=bool(found[0, 2]))
