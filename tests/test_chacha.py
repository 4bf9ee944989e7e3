"""ChaCha20 as a source of random bits: the cipher's own words, and chosen by the plan."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import userdp
from noise.reference_streams import chacha20_block
from userdp import chacha
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.streams import KEY_BYTES, RunSecret

KEY = bytes(range(32))
STREAMS = RunSecret.fixed_for_tests(8).streams("noise", "chacha20")

with_cipher = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)


def plan(**changed: object) -> Plan:
    given: dict[str, object] = {
        "num_users": 20,
        "expected_cohort_size": 5,
        "group_size": 2,
        "steps": 3,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(given | changed))  # type: ignore[arg-type]


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)


@with_cipher
def test_bits_are_the_ciphers_words_across_buffers() -> None:
    # Block 0 to 1,100 of 64 bytes: the buffer of 32 KiB is filled three times.
    found = words(chacha.chacha20_rng(KEY), 8 * 1100).view("<u4").reshape(1100, 16)
    for block in (0, 1, 511, 512, 1023, 1024, 1099):
        assert found[block].tolist() == chacha20_block(KEY, block)


@with_cipher
def test_numbers_are_made_from_the_top_bits() -> None:
    raw = words(chacha.chacha20_rng(KEY), 4)
    assert chacha.chacha20_rng(KEY).random(4).tolist() == ((raw >> np.uint64(11)) / 2**53).tolist()
    halves = chacha.chacha20_rng(KEY).integers(0, 2**32 - 1, 4, dtype=np.uint32, endpoint=True)
    assert halves.tolist() == (raw >> np.uint64(32)).tolist()


@with_cipher
def test_streams_are_keyed_by_256_bits_and_differ() -> None:
    assert KEY_BYTES["chacha20"] == 32
    assert len(STREAMS.key(0)) == 32
    drawn = [STREAMS.rng(*at).random() for at in ((0,), (1,), (0, 1))]
    drawn.append(RunSecret.fixed_for_tests(8).streams("cohort", "chacha20").rng(0).random())
    assert len(set(drawn)) == 4
    assert STREAMS.rng(0).random() == drawn[0]
    assert STREAMS.key(0)[:16] != RunSecret.fixed_for_tests(8).streams("noise").key(0)


@with_cipher
def test_nothing_is_kept_of_a_stream_that_is_gone() -> None:
    gc.collect()
    before = len(chacha._CIPHERS)
    rng = chacha.chacha20_rng(KEY)
    rng.random(10_000)
    assert len(chacha._CIPHERS) == before + 1
    del rng
    gc.collect()
    assert len(chacha._CIPHERS) == before


@with_cipher
def test_without_new_bits_the_process_ends() -> None:
    # numpy cannot be told of a failure; zeros as noise would show the data.
    program = (
        "from userdp import chacha\n"
        "rng = chacha.chacha20_rng(bytes(32))\n"
        "rng.random(10)\n"
        "chacha._CIPHERS.clear()\n"
        "rng.random(4000)\n"
        "print('went on', flush=True)\n"
        "rng.random(4000)\n"
        "print('went on too far', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "went on\n"
    assert "no random bits" in done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(InputError, match=r"userdp\[crypto\]"):
        STREAMS.rng(0)


def test_the_plan_says_which_and_old_plans_are_philox() -> None:
    usual, ciphered = plan(), plan(randomness="chacha20")
    assert "randomness" not in usual.to_json()
    assert Plan.from_json(usual.to_json()).randomness == "philox"
    assert ciphered.to_json()["randomness"] == "chacha20"
    assert Plan.from_json(ciphered.to_json()) == ciphered != usual
    assert "randomness=chacha20" in str(ciphered.statement())
    assert "randomness" not in str(usual.statement())
    with pytest.raises(InputError, match="philox, chacha20"):
        plan(randomness="mersenne")


@with_cipher
def test_a_run_draws_from_the_cipher_and_goes_on_with_no_other(
    base_model: Path, train_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    made = chacha.chacha20_rng
    monkeypatch.setattr(chacha, "chacha20_rng", lambda key: asked.append(key) or made(key))

    def begin(randomness: str, *, resume: bool) -> None:
        model, tokenizer = userdp.load_model(base_model)
        userdp.train(
            model,
            tokenizer,
            userdp.UserStore.open(train_store),
            plan(randomness=randomness),
            sequence_length=16,
            out=tmp_path / "run",
            resume=resume,
            on_step=_stop_after_the_first if not resume else None,
        )

    with pytest.raises(RuntimeError, match="stopped"):
        begin("chacha20", resume=False)
    # Cohort, noise and the choice of rows, of one step at least.
    assert len(asked) >= 2
    with pytest.raises(InputError):
        begin("philox", resume=True)
    begin("chacha20", resume=True)
    assert "randomness=chacha20" in (tmp_path / "run" / "statement.json").read_text()


def _stop_after_the_first(steps: int) -> None:
    if steps == 1:
        raise RuntimeError("stopped")
