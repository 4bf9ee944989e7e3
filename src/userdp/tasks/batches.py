"""From the groups of a cohort to the batches of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from userdp.data.choose import Contributions
from userdp.index import Rows
from userdp.losses import Batch
from userdp.streams import Streams
from userdp.tasks.contract import Task


def cohort_batches(
    rows: Contributions, cohort: Iterable[Rows], task: Task, *, step: int, streams: Streams
) -> Iterator[Batch]:
    """One batch per group, as the task makes it. Each group of each step has its own randomness."""
    for group in cohort:
        piece = int(group[0]) + 1 if len(group) else 0
        rng = streams.rng(step, piece)
        table, places = rows.read(group, rng)
        yield task.batch(table, places, rng)
