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
)
from userdp.noise import Discrete, Gaussian
from userdp.parts import Part, Registry
from userdp.sampling import PoissonRecords, PoissonUsers
from userdp.updates.filter import Filter
from userdp.updates.mean_gradient import MeanGradient

AnyPart = TypeVar("AnyPart", bound=Part)

EXAMPLES: list[Part] = [
    PoissonUsers(user_sampling_prob=0.4, group_size=2),
    PoissonUsers(user_sampling_prob=1.0, group_size=3),
    PoissonRecords(record_sampling_prob=0.4, group_size=2),
    PoissonRecords(record_sampling_prob=1.0, group_size=3),
    Gaussian(noise_multiplier=1.5),
    Discrete(noise_multiplier=1.5),
    FlatClip(clip_norm=0.5),
    FlatClip(clip_norm=float("inf")),
    PerLayerClip(clip_norm=0.5),
    NormalisedClip(clip_norm=0.1),
    NormalisedClip(clip_norm=30.0),
    AutomaticClip(),
    AutomaticClip(stability=1e-6),
    AdaptiveClip(clip_norm=2.0, count_noise=3.0),
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
