"""What `train` refuses to do with a selection, called from Python without a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import make_model, make_store
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.training.loop import train


def test_selection_in_which_users_interfere_is_not_trained_on_under_add_remove(
    tmp_path: Path,
) -> None:
    # A random order over all records: one user who leaves changes which records others keep.
    store = make_store(tmp_path / "store", [2, 2, 2])
    model, tokenizer = make_model(tmp_path / "model")
    plan = Plan.sample_users(
        num_users=3,
        expected_cohort_size=2,
        group_size=2,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    edges = Edges.load(store.path)
    selection = Selection.of(edges, np.array([1, 0, 1, 0, 1, 0]), 2, method="random")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(InputError, match="may let one user change"):
        train(model, tokenizer, store, plan, sequence_length=16, selection=selection)
    after = model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
