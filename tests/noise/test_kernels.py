"""The noise kernels compile, and by Triton's interpreter draw what numpy draws from the words."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_streams as reference

# Random123 1.14, tests/kat_vectors: philox4x32, 10 rounds.
PHILOX_ANSWERS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
# RFC 8439, Sec. 2.3.2: key 00 to 1f, block 1, nonce 00:00:00:09:00:00:00:4a:00:00:00:00.
CHACHA_ANSWER = (
    "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
    "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
)
STREAMS = ["philox", "chacha20"]

with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


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


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Everything that the interpreted program measured, in one run."""
    return json.loads(last_line_of("noise_interpreted.py", {"TRITON_INTERPRET": "1"}))


@pytest.mark.parametrize(("counter", "key", "answer"), PHILOX_ANSWERS)
def test_reference_philox_gives_the_published_words(counter: str, key: str, answer: str) -> None:
    words = [int(word, 16) for word in counter.split()]
    first, second = (int(word, 16) for word in key.split())
    found = reference.philox4x32(np.array([words]), (first, second))[0]
    assert " ".join(f"{word:08x}" for word in found) == answer


def test_reference_chacha20_gives_the_words_of_the_rfc() -> None:
    nonce = bytes.fromhex("000000090000004a00000000")
    found = reference.chacha20_block(bytes(range(32)), 1, nonce)
    assert " ".join(f"{word:08x}" for word in found) == CHACHA_ANSWER


@with_triton
def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    assert int(last_line_of("noise_compiled.py", {"TRITON_INTERPRET": "0"})) == 7


@with_triton
def test_words_of_the_kernels_are_the_published_ones(interpreted: dict[str, Any]) -> None:
    assert interpreted["philox words"] == [answer for _, _, answer in PHILOX_ANSWERS]
    assert interpreted["chacha20 words"] == CHACHA_ANSWER


@with_triton
def test_pairs_are_right_at_both_ends_of_the_radius(interpreted: dict[str, Any]) -> None:
    found = interpreted["edges"]
    assert found["count"] == 147
    assert found["relative error"] < 4e-7
    # The smallest uniform number is 2^-65, and so is the smallest distance from 1.
    assert found["largest"] == pytest.approx(math.sqrt(2 * 65 * math.log(2)), rel=1e-6)
    assert found["largest"] > 8.5
    assert found["smallest"] == pytest.approx(1.0, rel=1e-6)


@with_triton
@pytest.mark.parametrize("randomness", STREAMS)
def test_numbers_follow_from_the_position_and_are_added_there_only(
    randomness: str, interpreted: dict[str, Any]
) -> None:
    found = interpreted[randomness]
    assert found["error"] < 2e-6
    assert found["slice"] == 0.0
    assert found["added"] < 2e-6
    assert found["outside"] == 0.0
    assert found["far"] < 4e-6


@with_triton
@pytest.mark.parametrize("case", ["philox 2", "philox 4", "philox 9", "chacha20 3"])
def test_correlated_noise_is_that_of_plain_sums_and_is_stored_as_added(
    case: str, interpreted: dict[str, Any]
) -> None:
    found = interpreted[f"banded {case}"]
    assert found["error"] < 4e-6
    assert found["stored"] < 2e-6
    assert found["outside"] == 0.0


@with_triton
@pytest.mark.parametrize("randomness", STREAMS)
def test_redrawn_noise_is_the_weighted_sum_of_the_steps(
    randomness: str, interpreted: dict[str, Any]
) -> None:
    assert interpreted[f"redrawn {randomness}"]["error"] < 4e-6
    assert interpreted[f"redrawn {randomness}"]["outside"] == 0.0


@pytest.mark.statistical
@pytest.mark.parametrize("randomness", STREAMS)
def test_positions_and_tiles_are_uncorrelated(randomness: str) -> None:
    # Four tiles of 2,048 numbers, key fixed: correlations below 5 / sqrt(2048), failure 3e-6 in
    # all. Deviation and mean within 5 standard errors.
    key = bytes(range(16 if randomness == "philox" else 32))
    tiles = reference.normals(randomness, key, 0, 4 * 2048).reshape(4, 2048)
    correlations = np.corrcoef(np.concatenate([tiles, tiles[:, ::-1]]))
    assert np.abs(correlations - np.eye(8)).max() < 5 / math.sqrt(2048)
    halves = np.corrcoef(tiles[:, :1024].ravel(), tiles[:, 1024:].ravel())[0, 1]
    assert abs(halves) < 5 / math.sqrt(4096)
    assert tiles.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * 8192))
    assert tiles.mean() == pytest.approx(0.0, abs=5 / math.sqrt(8192))
