"""Users' records side by side, for local training."""

from __future__ import annotations

import torch

import models_zoo
from userdp.clipping.stacked.records import StackedRecords


def test_a_place_without_a_record_can_be_read() -> None:
    # A model may take the mean over the tokens attended to, and there must be one.
    groups = []
    for rows in (3, 1):
        group = models_zoo.ragged_batch([4] * rows, seed=rows)
        groups.append(group | {"attention_mask": torch.ones(rows, 4, dtype=torch.int64)})
    found = StackedRecords.of(
        groups,
        slice(None),
        batch_size=2,
        places=3,
        device=torch.device("cpu"),
        lengths={"input_ids": 4, "labels": 4, "attention_mask": 4},
    )
    assert found.counts == [3, 1, 0]
    mask = found.tensors["attention_mask"]
    assert mask.shape == (3, 4, 4)
    full, one = [1, 1, 1, 1], [1, 0, 0, 0]
    assert mask[0].tolist() == [full, full, full, one]
    assert mask[1].tolist() == [full, one, one, one]
    assert mask[2].tolist() == [one] * 4
