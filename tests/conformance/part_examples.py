"""One or more examples of every registered part: what the conformance suites run on.

Whoever registers a part adds a line here. A type without one fails its suite by name.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from userdp.clipping.rules import (
    AdaptiveClip,
    AutomaticClip,
    FlatClip,
    NormalisedClip,
    PerLayerClip,
    PerVectorClip,
    ScheduledClip,
)
from userdp.noise import Banded, Discrete, Gaussian
from userdp.parts import Part, Registry
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    MinSeparated,
    PoissonRecords,
    PoissonUsers,
    Shuffled,
    ShuffledRecords,
    WithoutReplacement,
)
from userdp.updates.fedavg import FedAvg
from userdp.updates.filter import Filter
from userdp.updates.mean_gradient import MeanGradient

AnyPart = TypeVar("AnyPart", bound=Part)

EXAMPLES: list[Part] = [
    PoissonUsers(user_sampling_prob=0.4, group_size=2),
    PoissonUsers(user_sampling_prob=1.0, group_size=3),
    PoissonRecords(record_sampling_prob=0.4, group_size=2),
    PoissonRecords(record_sampling_prob=1.0, group_size=3),
    CappedPoissonUsers(user_sampling_prob=0.4, cap=3, num_users=9, group_size=2),
    CyclicPoissonUsers(user_sampling_prob=0.8, parts=3, group_size=2),
    CyclicPoissonRecords(record_sampling_prob=0.7, parts=3, group_size=2),
    MinSeparated(separation=4, steps=30, group_size=8),
    BallsInBins(bins=4, group_size=2),
    BalancedIteration(round_length=4, group_size=2),
    Allocation(steps=30, participations=7, group_size=2),
    WithoutReplacement(cohort_size=3, num_users=9, group_size=2),
    Shuffled(cohort_size=2, num_users=5, group_size=2),
    ShuffledRecords(batch_size=3, num_records=33, group_size=2),
    Gaussian(noise_multiplier=1.5),
    Discrete(noise_multiplier=1.5),
    Banded(noise_multiplier=1.5, bands=1, steps=8),
    Banded(noise_multiplier=0.7, bands=3, steps=8),
    Banded(noise_multiplier=1.5, bands=3, steps=8, strategy="toeplitz"),
    Banded(noise_multiplier=1.5, bands=3, steps=8, strategy="inverse-square-root"),
    Banded(noise_multiplier=1.5, bands=3, steps=8, strategy="buffered"),
    Banded(
        noise_multiplier=1.5,
        bands=4,
        steps=9,
        workload="optimizer",
        momentum=0.9,
        decay=0.01,
        schedule="cosine",
        warmup_steps=2,
        schedule_hold=0.5,
    ),
    FlatClip(clip_norm=0.5),
    FlatClip(clip_norm=float("inf")),
    PerLayerClip(clip_norm=0.5),
    PerVectorClip(clip_norm=0.5),
    PerVectorClip(clip_norm=0.5, groups=("embedding.*", "*")),
    NormalisedClip(clip_norm=0.1),
    NormalisedClip(clip_norm=30.0),
    AutomaticClip(),
    AutomaticClip(stability=1e-6),
    AdaptiveClip(clip_norm=2.0, count_noise=3.0),
    ScheduledClip(phases=((0, 2.0),)),
    ScheduledClip(phases=((0, 2.0), (5, 0.5), (9, 0.1))),
    FedAvg(local_learning_rate=0.5),
    FedAvg(
        local_learning_rate=0.1,
        local_epochs=2,
        local_batch_size=2,
        user_weight_cap=4.0,
        total_weight=1.5,
        estimator="f_c",
        min_weight=1.0,
        update_penalty=0.1,
    ),
    MeanGradient(),
    Filter(),
    Filter(concentration=0.05, threshold=0.9, threshold_epsilon=3.0, threshold_delta=1e-8),
]


def examples(registry: Registry[AnyPart]) -> list[AnyPart]:
    """The examples of the registered types."""
    return [part for part in EXAMPLES if type(part) in list(registry)]  # type: ignore[misc]


def each(registry: Registry[Any]) -> pytest.MarkDecorator:
    """Run a test on every example of this kind of part."""
    return pytest.mark.parametrize("part", examples(registry), ids=str)


def without_example(registry: Registry[Any]) -> list[str]:
    """The registered types that nobody gave an example of."""
    return [kind.__name__ for kind in registry if kind not in map(type, EXAMPLES)]
