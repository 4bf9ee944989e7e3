"""A step that is taken again has the sum that it had, or it is not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import userdp
from tiny import make_model, make_store
from userdp.errors import InputError, LedgerError
from userdp.files.remembered import SUMS
from userdp.runs.repeated_sums import NoSums, RepeatedSums

KEY = bytes(range(32))
NUMBERS = [1.0, 2.5, 10.0]


class StoppedError(Exception):
    pass


def shown(kept: RepeatedSums, step: int, values: Tensor, numbers: Any = NUMBERS) -> None:
    seen = kept.of_step(step, numbers, bound=1.0)
    # In two pieces, as ranks show it: the first is whole columns.
    seen.see(values[:8_192])
    seen.see(values[8_192:])
    seen.settle()


@pytest.fixture
def values() -> Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(0))


def kept_of(values: Tensor, run: Path) -> RepeatedSums:
    kept = RepeatedSums.begun(run, KEY)
    for step in range(3):
        shown(kept, step, values + step)
    kept.close()
    return RepeatedSums.opened(run, KEY, after=1)


def test_the_same_sums_are_taken_again_and_new_ones_are_kept(
    values: Tensor, tmp_path: Path
) -> None:
    kept = kept_of(values, tmp_path)
    for step in (1, 2, 3):
        shown(kept, step, values + step)
    kept.close()
    assert len((tmp_path / SUMS).read_bytes().splitlines()) == 4
    assert (tmp_path / SUMS).stat().st_mode & 0o777 == 0o600


@pytest.mark.statistical
def test_a_difference_is_found_by_its_length(values: Tensor, tmp_path: Path) -> None:
    # With 16 random signs a length is off by more than half with probability below 1e-2; here the
    # seed is fixed, and lengths are a factor of 10 from the tolerance of 1e-4.
    generator = torch.Generator().manual_seed(1)
    apart = torch.randn(len(values), generator=generator)
    apart /= apart.norm()
    shown(kept_of(values, tmp_path / "a"), 1, values + 1 + 1e-5 * apart)
    with pytest.raises(InputError, match="step 2 is taken again, and its sum is not"):
        shown(kept_of(values, tmp_path / "b"), 1, values + 1 + 1e-3 * apart)
    one = torch.zeros(len(values))
    one[-1] = 1e-3
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept_of(values, tmp_path / "c"), 1, values + 1 + one)


@pytest.mark.parametrize("numbers", [[1.0, 2.6, 10.0], [1.0, 2.5], [1.0, 2.5, 10.0, 3]])
def test_other_noise_on_the_same_sum_is_refused(
    numbers: Any, values: Tensor, tmp_path: Path
) -> None:
    # z times two sizes on one sum: both are found by subtraction.
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept_of(values, tmp_path), 1, values + 1, numbers)


def test_a_sum_that_is_no_number_is_not_the_same(values: Tensor, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept_of(values, tmp_path), 1, values * torch.nan)


def test_a_torn_row_is_cut_off_and_other_damage_is_refused(values: Tensor, tmp_path: Path) -> None:
    kept_of(values, tmp_path).close()
    place = tmp_path / SUMS
    content = place.read_bytes()
    place.write_bytes(content[:-9])
    kept = RepeatedSums.opened(tmp_path, KEY, after=0)
    # The lost row is that of the last step, which is judged by nothing here.
    shown(kept, 2, 7 * values)
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept, 1, 7 * values)
    kept.close()
    place.write_bytes(b"{}\n" + content)
    with pytest.raises(LedgerError, match="no list of sums"):
        RepeatedSums.opened(tmp_path, KEY, after=0)
    place.unlink()
    with pytest.raises(LedgerError, match="is not there: without it nobody can tell"):
        RepeatedSums.opened(tmp_path, KEY, after=0)


def test_nothing_is_kept_where_nobody_goes_on() -> None:
    kept = NoSums()
    assert kept.of_step(0, NUMBERS, bound=1.0) is None
    kept.flush()
    kept.close()


Train = Callable[..., Any]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains three steps in one directory; every call begins with the same model."""
    store = make_store(tmp_path / "store", [3] * 30)
    model, tokenizer = make_model(tmp_path / "model")
    plan = userdp.Plan.sample_users(
        num_users=30,
        expected_cohort_size=10,
        group_size=3,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=5.0,
        delta=1e-3,
    )

    def run(edit: Callable[[nn.Module, int], None], **options: Any) -> Any:
        own = copy.deepcopy(model)
        return userdp.train(
            own,
            tokenizer,
            store,
            plan,
            optimizer="sgd",
            learning_rate=0.1,
            sequence_length=32,
            out=tmp_path / "run",
            saving=userdp.Saving(every_steps=100),
            on_step=lambda step: edit(own, step),
            **options,
        )

    return run


def stop(model: nn.Module, step: int) -> None:
    if step == 2:
        raise StoppedError


def nothing(model: nn.Module, step: int) -> None:
    pass


def halved(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def test_a_callback_that_moves_weights_is_not_let_through(train: Train, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(stop)
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match="step 2 is taken again, and its sum is not"):
        train(halved, resume=True)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    run = train(nothing, resume=True)
    assert run.statement.guarantee
    assert run.ledger.steps == 3
    lines = (tmp_path / "run" / SUMS).read_bytes().splitlines()
    assert len(lines) == 3


def test_a_run_without_its_sums_does_not_go_on(train: Train, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(stop)
    (tmp_path / "run" / SUMS).unlink()
    with pytest.raises(LedgerError, match="is not there: without it nobody can tell"):
        train(nothing, resume=True)
    assert train(nothing, fork=True).statement.guarantee


def test_with_a_fixed_seed_nothing_is_kept(train: Train, tmp_path: Path) -> None:
    train(nothing, secret=userdp.streams.RunSecret.fixed_for_tests(1))
    assert not (tmp_path / "run" / SUMS).exists()
