"""Attacks through a loop of one's own: owners, losses, lengths, modes, what a model keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import families
from userdp import FlatClip, StepSettings, UserIndex
from userdp.clipping.fast import FastClipping
from userdp.clipping.made_up import MadeUp
from userdp.clipping.verify import FastPathError
from userdp.errors import InputError
from userdp.losses import causal_lm_loss

# ---- whose rows are whose


@pytest.mark.parametrize("kind", ["tensor", "list of tensors", "array", "list of numpy numbers"])
def test_rows_of_one_owner_are_one_user_however_the_owners_are_given(kind: str) -> None:
    plain = [7, 7, 8, 7]
    owners: Any = {
        "tensor": torch.tensor(plain),
        "list of tensors": list(torch.tensor(plain)),
        "array": np.array(plain),
        "list of numpy numbers": [np.int32(7), 7, np.int64(8), np.uint8(7)],
    }[kind]
    index = UserIndex.from_owners(owners)
    assert [index.rows_of(user).tolist() for user in range(index.num_users)] == [[0, 1, 3], [2]]


NAN = float("nan")


@pytest.mark.parametrize(
    "owners",
    [
        [NAN, NAN],
        np.array([NAN, 1.0]),
        np.array(["ann", None], dtype=object),
        [None, "ann"],
        [True, 1],
        [("ann", NAN)],
        torch.zeros(2, 2),
        [object()],
    ],
    ids=lambda owners: str(type(owners[0]).__name__),
)
def test_an_owner_that_may_not_equal_itself_is_refused(owners: Any) -> None:
    with pytest.raises(InputError, match="give a string"):
        UserIndex.from_owners(owners)


def test_one_person_as_a_number_and_as_a_string_is_refused() -> None:
    with pytest.raises(InputError, match="several kinds"):
        UserIndex.from_owners([1, "1"])
    assert UserIndex.from_owners([("a", 1), ("a", np.int64(1)), ("a", 2)]).num_users == 2


# ---- the comparison with the plain loop

MADE_UP = MadeUp.tokens(families.VOCABULARY)
RULE = FlatClip(clip_norm=0.05)


def test_the_oracle_of_a_comparison_starts_from_the_model_as_it_was() -> None:
    # Looking at a batch runs the model once: embeddings that grow had grown for the oracle, too.
    model = families.build(families.PLAIN_ONLY["llama, dynamic rotation"])
    groups = [*(MADE_UP.group(1, 12, seed=i) for i in range(9)), MADE_UP.group(1, 40, seed=98)]
    fast = FastClipping(
        model,
        list(model.parameters()),
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(mix_sizes=True, join_records=False),
    )
    with pytest.raises(FastPathError, match="differs from the plain loop"):
        fast.clipped_sum(groups, RULE)
