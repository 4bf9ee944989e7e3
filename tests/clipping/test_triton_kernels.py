"""The CUDA kernels compile, and compute what plain torch computes by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

Errors = dict[str, dict[str, float]]
DTYPES = ["float32", "float16"]
GRAM = ["gram 5", "gram 16", "gram 130", "gram 16 even", "gram 256 even"]
RUNS = ["runs 5", "runs 32", "runs 130", "runs 32 even", "runs 128 even"]


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Everything that the interpreted program measured, in one run."""
    return json.loads(last_line_of("triton_interpreted.py", {"TRITON_INTERPRET": "1"}))


def last_line_of(program: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program))],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_all_kernels_compile_for_hopper_without_a_gpu() -> None:
    assert int(last_line_of("triton_compiled.py", {"TRITON_INTERPRET": "0"})) == 48


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRAM)
def test_gram_norms_are_never_below_the_exact_ones_and_hardly_above(
    case: str, dtype: str, errors: Errors
) -> None:
    # Rounding of the norm itself, one part in ten million, is the clip factors' margin.
    found = errors[f"{case} {dtype}"]
    assert found["norms below"] <= 2e-7
    assert found["norms above"] <= 5e-4
    assert found["exposure"] <= 5e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRAM)
def test_scaled_pairs_are_torchs_to_the_bit_and_their_errors_from_above(
    case: str, dtype: str, errors: Errors
) -> None:
    found = errors[f"{case} {dtype}"]
    assert found["scaled values"] == 0.0
    assert found["silenced"] <= 1e-12
    assert found["moved below"] <= 2e-7
    assert found["moved above"] <= 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", RUNS)
def test_users_of_unlike_many_rows_count_as_if_alone(case: str, dtype: str, errors: Errors) -> None:
    found = errors[f"{case} {dtype}"]
    assert found["norms"] <= 5e-4
    assert found["exposure"] <= 5e-4
    assert found["moved below"] <= 2e-7
    assert found["moved"] <= 0.05
    assert found["scaled values"] == 0.0
    assert found["stored"] <= 1e-6
    assert found["not read"] == 0.0
    assert found["others read"] <= 1e-6


@pytest.mark.parametrize("name", ["float32", "float16", "halves"])
@pytest.mark.parametrize("kind", ["equal", "runs"])
@pytest.mark.parametrize("length", [5, 32, 130])
def test_inner_products_of_tied_weights_are_from_above_and_hardly_more(
    length: int, kind: str, name: str, errors: Errors
) -> None:
    # Relative to the sizes of all terms, which bound what rounding can do.
    found = errors[f"inner {length} {kind} {name}"]
    assert found["below"] <= 0.0
    assert found["above"] <= (2.0**-14 if name == "halves" else 2e-6)


@pytest.mark.parametrize("case", ["together", "by layer", "with gaps", "nobody"])
def test_stored_norms_and_weighted_sums_are_torchs(case: str, errors: Errors) -> None:
    found = errors[f"stored {case}"]
    assert found["finite alike"] == 0.0
    assert found["norms"] <= 1e-6
    assert found["sums"] <= 1e-5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_over_a_users_tokens_are_torchs_and_stay_with_the_user(
    dtype: str, errors: Errors
) -> None:
    found = errors[f"user sums {dtype}"]
    assert found["finite alike"] == 0.0
    assert found["sums"] <= (1e-13 if dtype == "float64" else 2e-5)
    assert found["without tokens"] == 0.0


def test_some_users_are_scaled_again_others_silenced_or_left_untouched(errors: Errors) -> None:
    assert errors["settle"] == {"scaled": 0.0, "silenced": 0.0, "others": 0.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [(2, 1, 16), (2, 2, 24), (4, 2, 64)])
def test_attention_within_records_is_torchs(
    case: tuple[int, int, int], dtype: str, errors: Errors
) -> None:
    assert max(errors[f"attention {case} {dtype}"].values()) <= (
        2e-6 if dtype == "float32" else 5e-3
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_values_that_are_not_finite_stay_with_their_user_in_attention(
    value: str, errors: Errors
) -> None:
    # Users begin in the middle of tiles, so tiles hold tokens of two users.
    found = errors[f"attention beside {value}"]
    assert found["others"] == 0.0
    assert found["own"] > 0.5
