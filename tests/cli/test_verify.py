"""What `userdp verify` shows a person: a line for each kind of user, and what is unsafe apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runner import userdp
from userdp.cli.verify import _table
from userdp.probe.seen import Probe
from userdp.probe.verify import Verified


def probe(name: str, movement: float, coupling: float = 0.0) -> Probe:
    return Probe(name=name, movement=movement, coupling=coupling, allowed_coupling=1e-3)


def test_places_in_the_cohort_share_a_line_that_tells_the_worst() -> None:
    places = ("first", "in the middle", "last")
    found = _table(
        [probe(f"a long user, {place}", 0.1 * n, 1e-6 * n) for n, place in enumerate(places)]
        + [probe("another order", 0.5)]
    ).splitlines()
    assert [line.split() for line in found[1:]] == [
        ["a", "long", "user", "0.200000", "2.0e-06", "3"],
        ["another", "order", "0.500000", "0.0e+00", "1"],
    ]


def test_what_is_unsafe_has_a_line_of_its_own() -> None:
    found = _table([probe("a user, first", 0.5), probe("a user, last", 1.5)])
    assert "UNSAFE a user, last" in found
    assert "1.500000" in found
    no_number = _table([probe("a user, first", 0.5), probe("a user, last", 0.5, math.nan)])
    assert "UNSAFE a user, last" in no_number
    assert "nan" in no_number


@pytest.mark.parametrize(
    ("training", "kind"),
    [
        ('update = "fedavg"\nlocal_learning_rate = 0.5\nlocal_batch_size = 1', "FedAvg"),
        ('optimizer = "scaled"', "ScaledGradient"),
        ("", "MeanGradient"),
    ],
)
def test_what_the_configuration_computes_is_probed(
    training: str, kind: str, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def probed(*given: Any, update: Any, **more: Any) -> Verified:
        seen.append(update)
        return Verified(probes=(probe("a user", 1.0),), cause="")

    monkeypatch.setattr("userdp.probe.verify.verify", probed)
    assert userdp("verify", config_file(training=training), "--json").json["safe"]
    assert [type(update).__name__ for update in seen] == [kind]
