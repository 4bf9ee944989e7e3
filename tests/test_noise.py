"""The noise: its size, its shape, and where its randomness comes from."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from userdp.errors import InputError
from userdp.noise.draw import add_normal_, noisy_number
from userdp.noise.gaussian import Gaussian
from userdp.streams import RunSecret

SECRET = RunSecret.fixed_for_tests(12)


def add(values: torch.Tensor, *, stddev: float, secret: RunSecret, step: int) -> None:
    add_normal_(
        values,
        offset=0,
        size=values.numel(),
        stddev=stddev,
        step=step,
        streams=secret.streams("noise"),
    )


def draw(secret: RunSecret, step: int, size: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    noise = torch.zeros(size, dtype=dtype)
    add(noise, stddev=1.0, secret=secret, step=step)
    return noise.numpy()


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_gaussian_with_the_stated_deviation(dtype: torch.dtype) -> None:
    # 1e6 draws, seed 12. Deviation: 4 standard errors of 1/sqrt(2e6), failure 6e-5. KS: p > 0.001.
    noised = torch.zeros(1_000_000, dtype=dtype)
    add(noised, stddev=2.5, secret=SECRET, step=0)
    values = noised.double().numpy() / 2.5
    assert values.std() == pytest.approx(1.0, abs=4 / math.sqrt(2e6))
    assert values.mean() == pytest.approx(0.0, abs=4 / math.sqrt(1e6))
    assert stats.kstest(values, "norm").pvalue > 0.001


@pytest.mark.statistical
def test_streams_differ_by_step_purpose_run_and_secret() -> None:
    # 21 pairs of 100,000 draws: correlations below 5 / sqrt(1e5), failure about 1e-5 in all.
    streams = [
        draw(SECRET, 0, 100_000),
        draw(SECRET, 1, 100_000),
        draw(SECRET, 10, 100_000),
        draw(SECRET.bound_to("run a"), 0, 100_000),
        draw(SECRET.bound_to("run b"), 0, 100_000),
        draw(RunSecret.fixed_for_tests(13), 0, 100_000),
        SECRET.streams("cohort").rng(0).standard_normal(100_000),
    ]
    for a, b in combinations(streams, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(100_000)


@pytest.mark.statistical
def test_no_draw_repeats_within_or_across_steps() -> None:
    # 300,000 float64 draws: two alike would have probability below 1e-4.
    values = np.concatenate([draw(SECRET, step, 100_000, torch.float64) for step in range(3)])
    assert len(np.unique(values)) == len(values)


def test_same_stream_gives_the_same_noise_again() -> None:
    assert np.array_equal(draw(SECRET, 4, 100), draw(SECRET, 4, 100))


def test_system_secrets_differ_and_are_not_called_fixed() -> None:
    first, second = RunSecret.from_system(), RunSecret.from_system()
    assert first.key != second.key
    assert len(first.key) == 32
    assert not first.fixed_seed
    assert RunSecret.fixed_for_tests(1).fixed_seed
    assert RunSecret.fixed_for_tests(1).bound_to("x").fixed_seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_keeps_dtype_and_shape(dtype: torch.dtype) -> None:
    values = torch.ones(2, 3, dtype=dtype)
    add(values, stddev=1.0, secret=SECRET, step=0)
    assert (values.dtype, values.shape) == (dtype, (2, 3))
    assert (values != 1).all()


def test_noise_is_added_to_the_value() -> None:
    value, zero = torch.full((5,), 100.0), torch.zeros(5)
    for tensor in (value, zero):
        add(tensor, stddev=1.0, secret=SECRET, step=0)
    torch.testing.assert_close(value - 100.0, zero, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [1, 7, 64])
def test_each_piece_of_the_buffer_has_a_stream_of_its_own(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("userdp.noise.draw.PIECE", piece)
    found = torch.from_numpy(draw(SECRET, 3, 64, dtype))
    for number, start in enumerate(range(0, 64, piece)):
        rng = SECRET.streams("noise").rng(3, number)
        part = found[start : start + piece]
        assert torch.equal(part, torch.from_numpy(rng.standard_normal(len(part))).to(dtype))
    assert len(found.unique()) == 64


def test_noise_is_drawn_by_position_and_not_by_how_the_buffer_is_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("userdp.noise.draw.PIECE", 10)
    whole = draw(SECRET, 3, 35)
    for first, last in [(0, 10), (3, 7), (8, 23), (20, 35), (34, 35), (10, 10)]:
        values = torch.zeros(last - first)
        add_normal_(
            values,
            offset=first,
            size=35,
            stddev=1.0,
            step=3,
            streams=SECRET.streams("noise"),
        )
        assert np.array_equal(values.numpy(), whole[first:last])


def test_a_piece_is_always_drawn_whole_whoever_asks_for_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A number depends on those that are drawn before it: ranks would draw other noise.
    counts: list[int] = []

    def noted(like: torch.Tensor, count: int, *_: object) -> torch.Tensor:
        counts.append(count)
        return torch.zeros(count)

    monkeypatch.setattr("userdp.noise.draw.PIECE", 10)
    monkeypatch.setattr("userdp.noise.draw._piece", noted)
    for first, last in [(3, 7), (8, 23), (31, 32)]:
        add_normal_(
            torch.zeros(last - first),
            offset=first,
            size=35,
            stddev=1.0,
            step=0,
            streams=SECRET.streams("noise"),
        )
    assert counts == [10, 10, 10, 10, 5]


def test_a_purpose_cannot_be_read_as_a_step_of_another() -> None:
    # "noise:1" at step 2 would share the stream of "noise" at step 1, piece 2.
    with pytest.raises(ValueError, match="colon"):
        SECRET.streams("noise:1")


def test_zero_deviation_changes_nothing() -> None:
    value = torch.randn(5)
    before = value.clone()
    add(value, stddev=0.0, secret=SECRET, step=0)
    assert torch.equal(value, before)


@pytest.mark.statistical
def test_a_number_gets_noise_of_its_own_stream_and_stated_size() -> None:
    # 4,000 steps, seed 12. Deviation within 5 standard errors of 1 / sqrt(8000): failure 6e-7.
    noise = [
        noisy_number(7.0, noise_stddev=3.0, streams=SECRET.streams("number"), step=step) - 7.0
        for step in range(4000)
    ]
    assert np.std(noise) / 3 == pytest.approx(1.0, abs=5 / math.sqrt(8000))
    vector = [float(draw(SECRET, step, 1)[0]) for step in range(4000)]
    assert abs(np.corrcoef(noise, vector)[0, 1]) < 5 / math.sqrt(4000)


@pytest.mark.parametrize("noise_multiplier", [-1.0, math.nan, math.inf])
def test_noise_multiplier_must_be_finite_and_not_negative(noise_multiplier: float) -> None:
    with pytest.raises(InputError, match="noise_multiplier"):
        Gaussian(noise_multiplier=noise_multiplier)


def test_standard_deviation_is_multiplier_times_sensitivity() -> None:
    assert Gaussian(noise_multiplier=1.5).noise_stddev(0.2) == pytest.approx(0.3)
    assert Gaussian(noise_multiplier=0.0).noise_stddev(math.inf) == 0.0


def test_float32_noise_on_the_cpu_is_float64_noise_rounded() -> None:
    # numpy's own float32 normals end at 8.21: their tail has 24 bits.
    narrow, wide = (draw(SECRET, 3, 1000, kind) for kind in (torch.float32, torch.float64))
    assert np.array_equal(narrow, wide.astype("f4"))
    assert np.array_equal(wide, SECRET.streams("noise").rng(3).standard_normal(1000))


# Box and Muller: the smallest uniform number is half of 2^-bits. numpy: beyond 3.654 it adds an
# exponential number over 3.654, from a uniform number of so many bits.
@pytest.mark.parametrize(
    ("edge", "stated_edge", "stated"),
    [
        (math.sqrt(2 * 33 * math.log(2)), 6.76, 1.5e-6),
        (math.sqrt(2 * 65 * math.log(2)), 9.49, 4e-16),
        (3.6541528853610088 + 24 * math.log(2) / 3.6541528853610088, 8.21, 3e-11),
        (3.6541528853610088 + 53 * math.log(2) / 3.6541528853610088, 13.71, 0.0),
    ],
)
def test_what_the_edge_of_the_normals_gives_away_is_as_stated(
    edge: float, stated_edge: float, stated: float
) -> None:
    assert edge == pytest.approx(stated_edge, abs=0.01)
    mass = math.sqrt(1e9) * math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi)
    assert mass == pytest.approx(stated, rel=0.2, abs=1e-30)
