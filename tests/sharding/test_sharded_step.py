"""A sharded model takes the private step that one process takes: same users, same noise bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sharded_runs import Trained, Training, furthest, run_ranks, trained
from userdp import StepSettings
from userdp.clipping.rules import AdaptiveClip, PerLayerClip
from userdp.noise.discrete import Discrete
from userdp.updates.contract import UpdateRule
from userdp.updates.fedavg import FedAvg
from userdp.updates.mean_gradient import MEAN_GRADIENT

# The order of summation alone differs.
SAME = 1e-6
# Half precision rounds in batches of other shapes, or in other parts of a product.
SAME_IN_HALF = 1e-2
# An architecture that is proven needs no probe, which takes most of a short run.
UNCHECKED = StepSettings(check=False, microbatch_tokens=64)


# Two passes over a user's records, and weights of users that differ.
LOCAL = FedAvg(local_learning_rate=0.3, local_batch_size=1, local_epochs=2, user_weight_cap=2.0)
CLIPPED_AVERAGE = FedAvg(local_learning_rate=0.3, estimator="f_c", min_weight=2.0)


def check_equal(training: Training, ranks: int) -> list[Trained]:
    """Train sharded, and compare every rank's weights with those of one process."""
    alone = trained(training)
    found = run_ranks(ranks, trained, training)
    for rank in found:
        in_half = training.base_dtype == torch.bfloat16 or training.optimizer == "Muon"
        assert furthest(rank.weights, alone.weights) <= (SAME_IN_HALF if in_half else SAME)
        assert rank.num_steps == alone.num_steps == training.steps
    return found


def test_sharded_lora_equals_one_process() -> None:
    found = check_equal(Training(lora=True, steps=3, settings=UNCHECKED), 2)
    # Matrices of 3 rows: two on the first rank, one on the second.
    assert [piece[0] for piece in found[0].pieces[:2]] == [2, 8]
    assert [piece[0] for piece in found[1].pieces[:2]] == [1, 8]


def test_sharded_local_training_equals_one_process() -> None:
    found = check_equal(
        Training(
            lora=False,
            steps=2,
            settings=StepSettings(microbatch_tokens=64),
            plan={"update": LOCAL},
        ),
        2,
    )
    # Between steps a rank holds its rows alone: 19 of 37, and 18.
    assert [rank.pieces[0] for rank in found] == [(19, 16), (18, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("update", [MEAN_GRADIENT, LOCAL], ids=["gradient", "fedavg"])
def test_sharded_equals_data_parallel_equals_one_process(
    ranks: int, lora: bool, update: UpdateRule
) -> None:
    settings = StepSettings(microbatch_tokens=64)
    training = Training(lora=lora, settings=settings, plan={"update": update})
    sharded = check_equal(training, ranks)
    whole = replace(training, sharded="")
    parallel = run_ranks(ranks, trained, whole)
    assert furthest(sharded[0].weights, parallel[0].weights) <= SAME
    # All ranks agree bit for bit on what is released.
    assert len({rank.final_digest for rank in sharded}) == 1
    assert all(
        torch.equal(weight, rank.weights[name])
        for rank in sharded
        for name, weight in sharded[0].weights.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [
        pytest.param(
            Training(settings=StepSettings(checkpoint_blocks=True, microbatch_tokens=64)),
            id="checkpointed",
        ),
        pytest.param(Training(settings=StepSettings(path="plain")), id="plain"),
        pytest.param(Training(settings=StepSettings(microbatch_tokens=16)), id="microbatches"),
        pytest.param(Training(lora=False, strategy="optimised"), id="banded"),
        pytest.param(Training(plan={"noise": Discrete(noise_multiplier=0.0)}), id="discrete"),
        pytest.param(
            Training(
                plan={
                    "clip": AdaptiveClip(clip_norm=0.5, count_noise=2.0),
                    "epsilon": None,
                    "noise_multiplier": 1.0,
                }
            ),
            id="adaptive",
        ),
        pytest.param(Training(plan={"clip": PerLayerClip(clip_norm=0.5)}), id="by layer"),
        pytest.param(Training(optimizer="SGD"), id="sgd"),
        pytest.param(Training(sharded="theirs"), id="by its owner"),
        pytest.param(Training(sharded="base"), id="whole adapters"),
        pytest.param(
            Training(sharded="base", plan={"update": CLIPPED_AVERAGE}),
            id="adapters trained locally",
        ),
        pytest.param(
            Training(lora=False, settings=StepSettings(path="plain"), plan={"update": LOCAL}),
            id="one user trained at a time",
        ),
        pytest.param(Training(optimizer="Muon"), id="muon"),
        pytest.param(Training(base_dtype=torch.bfloat16), id="bfloat16 base"),
    ],
)
def test_every_kind_of_step_equals_one_process(training: Training) -> None:
    check_equal(training, 2)
