"""Several processes that take one step together: who they are, and what each of them does.

Every rank draws the same cohort, computes the clipped sum of its own share of the groups, and adds
the same noise to the sum of all shares. The first rank alone writes files.
"""

from userdp.ranks.group import Ranks
from userdp.ranks.shares import shares

__all__ = ["Ranks", "shares"]
