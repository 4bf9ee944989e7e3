"""The conformance suite of noises, run on every registered one.

Each test adds unit noise to a flat buffer of zeros. The seed is 5.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from common_rules import (
    check_every_number_is_said,
    check_frozen,
    check_json,
    check_keys,
    check_named,
    check_words,
)
from part_examples import each, without_example
from torch import Tensor

from userdp.errors import InputError
from userdp.noise import NOISES, Noise
from userdp.streams import RunSecret

SIZE = 23


def drawn(
    part: Noise,
    *,
    step: int = 0,
    first: int = 0,
    last: int = SIZE,
    size: int = SIZE,
    seed: int = 5,
    stddev: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The noise of positions [first, last) at one step, drawn by a process that does only this."""
    started, values = part.started(), torch.zeros(last - first, dtype=dtype)
    # A noise that remembers has to go through the steps before.
    for before in range(step + 1):
        values.zero_()
        started.add_(
            values,
            offset=first,
            size=size,
            noise_stddev=stddev,
            step=before,
            streams=RunSecret.fixed_for_tests(seed).streams("noise"),
        )
    return values


def test_every_registered_noise_has_an_example() -> None:
    assert without_example(NOISES) == []


@pytest.mark.parametrize("piece", [1, 4, 7, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each(NOISES)
def test_any_slice_drawn_alone_is_that_slice_of_the_whole(
    part: Noise, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("userdp.noise.draw.PIECE", piece)
    whole = drawn(part, step=3, dtype=dtype)
    for first in range(SIZE):
        for last in range(first, SIZE + 1):
            alone = drawn(part, step=3, first=first, last=last, dtype=dtype)
            assert torch.equal(alone, whole[first:last]), (first, last)


@each(NOISES)
def test_no_two_positions_and_no_two_steps_share_a_draw(
    part: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("userdp.noise.draw.PIECE", 4)
    numbers = torch.cat([drawn(part, step=step, dtype=torch.float64) for step in range(4)])
    assert len(numbers.unique()) == len(numbers)


@each(NOISES)
def test_noise_follows_the_secret_and_nothing_else(part: Noise) -> None:
    assert torch.equal(drawn(part, step=2), drawn(part, step=2))
    assert not bool((drawn(part, step=2) == drawn(part, step=2, seed=6)).any())


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each(NOISES)
def test_noise_of_all_steps_has_the_stated_covariance(part: Noise, dtype: torch.dtype) -> None:
    # 100,000 coordinates over 5 steps: each mean and each of the 15 covariances is within 5
    # standard errors. Failure 6e-7 each, about 1.2e-5 in all, for a fresh seed; seed 5.
    size, wanted, steps = 100_000, 2.5, 5
    started, streams = part.started(), RunSecret.fixed_for_tests(5).streams("noise")
    rows: list[Tensor] = []
    for step in range(steps):
        values = torch.zeros(size, dtype=dtype)
        started.add_(values, offset=0, size=size, noise_stddev=wanted, step=step, streams=streams)
        rows.append(values.double() / wanted)
    found = torch.stack(rows)
    mixing = torch.from_numpy(part.mixing(steps))
    stated = mixing @ mixing.T
    sizes = stated.diagonal()
    assert bool((found.mean(dim=1).abs() < 5 * (sizes / size).sqrt()).all())
    errors = ((sizes[:, None] * sizes + stated**2) / size).sqrt()
    assert bool(((found @ found.T / size - stated).abs() < 5 * errors).all())
    # Step 0 has nothing before it: there the size is the stated one over C's first entry.
    assert float(mixing[0, 0]) >= 1


@each(NOISES)
def test_noise_is_added_to_what_is_there(part: Noise) -> None:
    values = torch.full((SIZE,), 100.0, dtype=torch.float64)
    part.started().add_(
        values,
        offset=0,
        size=SIZE,
        noise_stddev=1.0,
        step=0,
        streams=RunSecret.fixed_for_tests(5).streams("noise"),
    )
    assert (values.dtype, values.shape) == (torch.float64, (SIZE,))
    alone = drawn(part, dtype=torch.float64)
    torch.testing.assert_close(values - 100.0, alone, rtol=0, atol=1e-12)
    assert bool((alone != 0).all())


@each(NOISES)
def test_stated_deviation_is_the_multiplier_times_the_sensitivity(part: Noise) -> None:
    assert part.noise_stddev(0.2) == pytest.approx(part.noise_multiplier * 0.2)
    assert replace(part, noise_multiplier=0.0).noise_stddev(math.inf) == 0.0  # type: ignore[type-var]
    doubled = replace(part, noise_multiplier=2 * part.noise_multiplier)  # type: ignore[type-var]
    assert doubled.noise_stddev(1.0) == pytest.approx(2 * part.noise_stddev(1.0))


@each(NOISES)
def test_a_run_that_goes_on_from_its_state_draws_the_same(part: Noise) -> None:
    streams = RunSecret.fixed_for_tests(5).streams("noise")

    def next_step(noise: Noise, step: int) -> Tensor:
        values = torch.zeros(SIZE)
        noise.add_(values, offset=0, size=SIZE, noise_stddev=1.0, step=step, streams=streams)
        return values

    straight = part.started()
    for step in range(3):
        next_step(straight, step)
    resumed = part.started()
    resumed.load_state_dict(straight.state_dict())
    assert resumed.state_dict().keys() == straight.state_dict().keys()
    for step in range(3, 6):
        assert torch.equal(next_step(resumed, step), next_step(straight, step))


@each(NOISES)
def test_a_state_of_another_noise_is_refused(part: Noise) -> None:
    with pytest.raises(InputError):
        part.started().load_state_dict({"of another noise": 1})


@pytest.mark.parametrize("noise_multiplier", [-1.0, math.nan, math.inf])
@each(NOISES)
def test_multiplier_must_be_finite_and_not_negative(part: Noise, noise_multiplier: float) -> None:
    with pytest.raises(InputError, match="noise_multiplier"):
        replace(part, noise_multiplier=noise_multiplier)  # type: ignore[type-var]


@each(NOISES)
def test_parameters_are_frozen_named_and_written_down(part: Noise) -> None:
    check_frozen(part)
    check_json(NOISES, part)
    check_named(NOISES, part)
    check_keys(part)
    check_words(part)
    check_every_number_is_said(part)
    assert part.words
    assert part.title
    assert f"{part.noise_multiplier:.4g}" in part.words
