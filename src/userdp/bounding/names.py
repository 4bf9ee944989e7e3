"""The words of contribution bounding, the same in Python, on the command line and in files.

This module imports nothing heavy, so that the command line starts quickly.
"""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How records are chosen. Those named unbounded ignore the bound: baselines, no guarantee."""

    GREEDY = "greedy"
    GREEDY_DUPLICATES = "greedy-duplicates"
    EXACT = "exact"
    EXACT_DUPLICATES = "exact-duplicates"
    BALANCED = "balanced"
    MIN_SEPARATION = "min-separation"
    RANDOM = "random"
    LONGEST = "longest"
    SHORTEST = "shortest"
    HIGHEST_PERPLEXITY = "highest-perplexity"
    LOWEST_PERPLEXITY = "lowest-perplexity"
    UNBOUNDED_RANDOM = "unbounded-random"
    UNBOUNDED_RANDOM_LOW = "unbounded-random-low"
    UNBOUNDED_RANDOM_HIGH = "unbounded-random-high"


BY_PERPLEXITY = frozenset({Method.HIGHEST_PERPLEXITY, Method.LOWEST_PERPLEXITY})
BY_TEXT = BY_PERPLEXITY | {Method.LONGEST, Method.SHORTEST}

# Where every record has one owner, these choose for a user from that user's records alone. The
# others do not: a random order under a fixed seed depends on the number of all records, batches
# have a common size, and a solver may break ties by anything.
USER_BY_USER = BY_TEXT | {Method.GREEDY, Method.GREEDY_DUPLICATES}


class Where(StrEnum):
    """Where the selection is computed: in memory, or in rounds on an engine."""

    LOCAL = "local"
    DUCKDB = "duckdb"
    SPARK = "spark"


class Weight(StrEnum):
    """What a record is worth to the methods greedy and exact."""

    EQUAL = "equal"
    OWNERS = "owners"
