"""No file makes a reader fail otherwise than by an `InputError` that tells nothing.

By default every reader gets the cases that were once found and a few new ones, always the same.
`make fuzz` hunts for longer, and `USERDP_FUZZ_SECONDS` says how long for each reader.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, seed, settings

from fuzz.inputs import SECRET
from fuzz.targets import TARGETS, Target
from userdp.errors import InputError

FEW = 6
MANY = 300


def judge(target: Target, value: Any) -> None:
    """Read the value. Only a refusal that tells nothing is allowed to come out."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.read(Path(folder), value)
        except InputError as error:
            told = str(error)
        else:
            return
    assert SECRET not in told


def hunt(target: Target, *, number: int, examples: int) -> None:
    """Try what was found before, and so many new inputs of this seed."""

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(target.inputs)
    def once(value: Any) -> None:
        judge(target, value)

    for value in target.found:
        once = example(value)(once)
    once()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_reader_refuses_or_reads(target: Target) -> None:
    hunt(target, number=0, examples=FEW)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_reader_refuses_or_reads_for_a_long_time(target: Target) -> None:
    until = time.monotonic() + float(os.environ.get("USERDP_FUZZ_SECONDS", "60"))
    number = 1
    while time.monotonic() < until:
        hunt(target, number=number, examples=MANY)
        number += 1


def test_a_reader_that_fails_or_tells_is_found() -> None:
    def fails(folder: Path, value: Any) -> None:
        raise KeyError(value)

    def tells(folder: Path, value: Any) -> None:
        raise InputError(f"{SECRET} is wrong.")

    inputs = TARGETS[0].inputs
    with pytest.raises(KeyError):
        hunt(Target(name="fails", inputs=inputs, read=fails), number=0, examples=1)
    with pytest.raises(AssertionError):
        hunt(Target(name="tells", inputs=inputs, read=tells), number=0, examples=1)
