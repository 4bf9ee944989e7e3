"""What a model learns from a record: one file per task."""

from __future__ import annotations

from userdp.tasks.batches import cohort_batches as cohort_batches
from userdp.tasks.causal import CausalTask as CausalTask
from userdp.tasks.contract import Task as Task
