"""What a model learns from a record: one file per task."""

from __future__ import annotations

from userdp.names.tasks import TaskName as TaskName
from userdp.tasks.batches import cohort_batches as cohort_batches
from userdp.tasks.causal import CausalTask as CausalTask
from userdp.tasks.chat import ChatTask as ChatTask
from userdp.tasks.choose import labels_left_out as labels_left_out
from userdp.tasks.choose import task_named as task_named
from userdp.tasks.choose import usual_task as usual_task
from userdp.tasks.classification import ClassificationTask as ClassificationTask
from userdp.tasks.contract import Task as Task
from userdp.tasks.masked import MaskedTask as MaskedTask
from userdp.tasks.own_loss import OwnLoss as OwnLoss
