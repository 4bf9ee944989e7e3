"""The kernels of local steps compile, and by Triton's interpreter compute what torch computes."""

from __future__ import annotations

import importlib.util
import json

import pytest
from test_triton_kernels import last_line_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

Errors = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Everything that the interpreted program measured, in one run."""
    return json.loads(last_line_of("local_kernels_interpreted.py", {"TRITON_INTERPRET": "1"}))


@pytest.mark.slow
def test_kernels_of_local_steps_compile_for_hopper_without_a_gpu() -> None:
    assert int(last_line_of("local_kernels_compiled.py", {"TRITON_INTERPRET": "0"})) == 19


@pytest.mark.parametrize("rule", ["flat", "per layer", "without clipping"])
def test_cohorts_train_in_the_kernels_as_in_torch(rule: str, errors: Errors) -> None:
    assert errors["training"][rule] <= 1e-6


@pytest.mark.parametrize("part", ["rows", "output gradient", "table", "squares"])
@pytest.mark.parametrize("shape", ["20 24", "40 16", "16 20"])
def test_tables_step_as_in_torch_clipped_or_not_finite(
    shape: str, part: str, errors: Errors
) -> None:
    assert errors[f"tables {shape}"][part] <= 1e-6


@pytest.mark.parametrize("part", ["summed ways", "squared ways", "settled"])
def test_ways_are_settled_measured_and_added_up_as_in_torch(part: str, errors: Errors) -> None:
    assert errors["small"][part] <= 1e-7


def test_a_copy_that_is_not_clipped_is_not_rounded(errors: Errors) -> None:
    assert errors["small"]["left alone"] == 0.0
