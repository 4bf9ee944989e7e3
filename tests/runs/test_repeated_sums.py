"""A step that is taken again has the sum that it had, or it is not taken."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import userdp
from tiny import make_model, make_store
from userdp.errors import InputError, LedgerError
from userdp.files.remembered import SUMS
from userdp.ledger.book import Ledger
from userdp.ranks import Ranks
from userdp.runs import repeated_sums
from userdp.runs.check import check_run
from userdp.runs.continuation import Continuation
from userdp.runs.repeated_sums import FollowedSums, NoSums, RepeatedSums, settled_together

KEY = bytes(range(32))
NUMBERS = [1.0, 2.5, 10.0]


class StoppedError(Exception):
    pass


def shown(
    kept: RepeatedSums, step: int, values: Tensor, numbers: Any = NUMBERS, *, device: str = "cpu"
) -> None:
    """Show a sum as if it was computed on this device."""
    seen = kept.of_step(step, numbers, bound=1.0, device=device)
    # In two pieces, as ranks show it: the first is whole rows.
    seen.see(values[:8_192])
    seen.see(values[8_192:])
    settled_together(kept, seen, Ranks.alone(), in_parts=False, is_repeated=True)


@pytest.fixture
def values() -> Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(0))


def kept_of(values: Tensor, run: Path, *, device: str = "cpu") -> RepeatedSums:
    kept = RepeatedSums.begun(run, KEY)
    for step in range(3):
        shown(kept, step, values + step, device=device)
    kept.close()
    return RepeatedSums.opened(run, KEY, (1, 3), device)


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
    # With 64 totals a length is off by more than half with probability below 1e-3; here the seed is
    # fixed, and lengths are a factor of 10 from the tolerance.
    generator = torch.Generator().manual_seed(1)
    apart = torch.randn(len(values), generator=generator)
    apart /= apart.norm()

    def again(name: str, change: Tensor) -> None:
        kept = kept_of(values, tmp_path / name, device="cuda")
        shown(kept, 1, values + 1 + change, device="cuda")

    again("a", 1e-3 * apart)
    with pytest.raises(InputError, match="step 2 is taken again, and its sum is not"):
        again("b", 1e-1 * apart)
    one = torch.zeros(len(values))
    one[-1] = 1e-1
    with pytest.raises(InputError, match="its sum is not"):
        again("c", one)


@pytest.mark.parametrize("place", [0, 5_000, 19_999])
def test_a_cpu_lets_no_difference_through(values: Tensor, place: int, tmp_path: Path) -> None:
    # Who reads a word of the data by a small change would read it without noise.
    other = values + 1
    other[place] = torch.nextafter(other[place], torch.tensor(9.0))
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept_of(values, tmp_path), 1, other)


def test_a_cpu_sees_what_is_far_below_a_rounding_of_the_noise(tmp_path: Path) -> None:
    # Spread over many small values, less than this flips last bits of the noised sum.
    generator = torch.Generator().manual_seed(3)
    values = 1e-7 * torch.randn(1_000_000, generator=generator)
    apart = torch.full_like(values, 1e-13)
    assert 0 < (values + apart - values).double().norm() < 1e-9
    noise = torch.randn(len(values), generator=generator)
    assert not torch.equal(values + noise, values + apart + noise)
    kept = RepeatedSums.begun(tmp_path, KEY)
    shown(kept, 0, values)
    kept.close()
    with pytest.raises(InputError, match="its sum is not"):
        shown(RepeatedSums.opened(tmp_path, KEY, (0, 1), "cpu"), 0, values + apart)


def test_rows_that_are_swapped_are_told_apart(tmp_path: Path) -> None:
    # Of 1,000 rows with 16 random signs each, two have the same signs with probability 0.9995.
    values = torch.randn(1_000, 4_096, generator=torch.Generator().manual_seed(4))
    values /= values.norm()
    kept = RepeatedSums.begun(tmp_path, KEY)
    shown(kept, 0, values.flatten(), device="cuda")
    seen = kept.of_step(0, NUMBERS, bound=1.0, device="cuda")
    seen.see(values.flatten())
    # Those of the rows that are shown second.
    factors = seen._factors.of_rows(2, 998, torch.zeros(1, dtype=torch.float64))
    # The two rows that are hardest to tell apart.
    apart = torch.cdist(factors.T, factors.T) + 1e9 * torch.eye(998)
    first, second = (2 + row for row in divmod(int(apart.argmin()), 998))
    swapped = values.clone()
    swapped[[first, second]] = values[[second, first]]
    change = float((swapped - values).norm())
    assert change > 0.05
    again = RepeatedSums.opened(tmp_path, KEY, (0, 1), "cuda")
    with pytest.raises(InputError, match="its sum is not"):
        shown(again, 0, swapped.flatten(), device="cuda")


@pytest.mark.parametrize("width", [1_000, 4_096, 8_192])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_gradients_that_add_up_to_zero_are_told_apart(
    width: int, along: str, tmp_path: Path
) -> None:
    # The gradient of an output layer is the outer product of what belongs to the words, which adds
    # up to zero, and what belongs to the hidden state.
    generator = torch.Generator().manual_seed(2)
    words = torch.randn(40, generator=generator)
    hidden = torch.randn(width, generator=generator)
    zero = words if along == "rows" else hidden
    zero -= zero.mean()
    apart = torch.outer(words, hidden).flatten()
    values = torch.zeros(len(apart))
    kept = kept_of(values, tmp_path, device="cuda")
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept, 1, values + 1 + apart / apart.norm(), device="cuda")


def test_where_small_differences_pass_a_step_is_taken_again_only_so_often(
    values: Tensor, tmp_path: Path
) -> None:
    kept_of(values, tmp_path, device="cuda").close()

    def again(change: float) -> None:
        kept = RepeatedSums.opened(tmp_path, KEY, (0, 3), "cuda")
        shown(kept, 1, values + 1 + change, device="cuda")
        kept.close()

    for _ in range(20):
        # The same bits tell nothing.
        again(0.0)
    for _ in range(10):
        again(1e-6)
    with pytest.raises(InputError, match="was taken again 10 times"):
        again(1e-6)


def test_a_row_that_the_disk_takes_in_parts_is_written_whole(
    values: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = RepeatedSums.begun(tmp_path, KEY)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:7]))
    shown(kept, 0, values)
    monkeypatch.undo()
    with pytest.raises(InputError, match="its sum is not"):
        shown(RepeatedSums.opened(tmp_path, KEY, (0, 1), "cpu"), 0, values + 1)

    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space left"):
        shown(kept, 1, values)


@pytest.mark.parametrize("numbers", [[1.0, 2.6, 10.0], [1.0, 2.5], [1.0, 2.5, 10.0, 3]])
def test_other_noise_on_the_same_sum_is_refused(
    numbers: Any, values: Tensor, tmp_path: Path
) -> None:
    # z times two sizes on one sum: both are found by subtraction.
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept_of(values, tmp_path), 1, values + 1, numbers)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_sum_that_is_no_number_is_not_the_same(
    values: Tensor, device: str, tmp_path: Path
) -> None:
    kept = kept_of(values, tmp_path, device=device)
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept, 1, values * torch.nan, device=device)


def test_a_torn_row_is_cut_off_and_other_damage_is_refused(values: Tensor, tmp_path: Path) -> None:
    kept_of(values, tmp_path).close()
    place = tmp_path / SUMS
    content = place.read_bytes()
    place.write_bytes(content[:-9])
    kept = RepeatedSums.opened(tmp_path, KEY, (0, 3), "cpu")
    # The lost row is that of the last step, which is judged by nothing here.
    shown(kept, 2, 7 * values)
    with pytest.raises(InputError, match="its sum is not"):
        shown(kept, 1, 7 * values)
    kept.close()
    place.write_bytes(b"{}\n" + content)
    with pytest.raises(LedgerError, match="no list of sums"):
        RepeatedSums.opened(tmp_path, KEY, (0, 3), "cpu")
    place.unlink()
    with pytest.raises(LedgerError, match="is not there: without it nobody can tell"):
        RepeatedSums.opened(tmp_path, KEY, (0, 3), "cpu")


def test_nothing_is_kept_where_nobody_goes_on() -> None:
    kept = NoSums()
    assert kept.of_step(0, NUMBERS, bound=1.0, device="cpu") is None
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


class TwoThreads:
    """Stands for one of two ranks, each in a thread of its own."""

    count = 2

    def __init__(self, rank: int, barrier: threading.Barrier, told: dict[int, Any]) -> None:
        self.rank, self._barrier, self._told = rank, barrier, told

    def _exchanged(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait(10)
        found = [self._told[0], self._told[1]]
        self._barrier.wait(10)
        return found

    def numbers(self, own: list[float]) -> Any:
        return np.array(self._exchanged(own))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        for other in self._exchanged(error):
            if other is not None:
                raise other


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_one_rank_refuses_no_rank_takes(
    values: Tensor, in_parts: bool, changed: int, device: str, tmp_path: Path
) -> None:
    barrier, told = threading.Barrier(2), dict[int, Any]()

    def take(rank: int, kept: Any, values: Tensor, is_repeated: bool) -> None:
        seen = kept.of_step(0, NUMBERS, bound=1.0, device=device)
        if in_parts or rank == 0:
            seen.see(values)
        ranks: Any = TwoThreads(rank, barrier, told)
        settled_together(kept, seen, ranks, in_parts=in_parts, is_repeated=is_repeated)

    def step(change: float, is_repeated: bool) -> list[BaseException | None]:
        first = (
            RepeatedSums.opened(tmp_path, KEY, (0, 1), device)
            if is_repeated
            else RepeatedSums.begun(tmp_path, KEY)
        )
        parts = [values[:9_000], values[9_000:]] if in_parts else [values, values]
        parts[changed] = parts[changed] + change
        kinds = [first, FollowedSums(KEY, 1)]
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(take, rank, kinds[rank], parts[rank], is_repeated) for rank in (0, 1)
            ]
            found = [call.exception() for call in calls]
        first.close()
        return found

    assert step(0.0, is_repeated=False) == [None, None]
    assert step(0.0, is_repeated=True) == [None, None]
    found = step(0.5, is_repeated=True)
    # Where all ranks have the whole sum, that of the first is looked at.
    is_seen = in_parts or changed == 0
    assert [isinstance(error, InputError) for error in found] == [is_seen, is_seen]
    # Of a GPU, small differences pass in parts of the sum as they do in the whole.
    found = step(1e-6, is_repeated=True)
    is_seen = is_seen and device == "cpu"
    assert [isinstance(error, InputError) for error in found] == [is_seen, is_seen]


def test_no_rank_takes_a_step_before_its_totals_are_on_the_disk(
    values: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without totals the step counts as never taken, and would be taken again with new noise.
    barrier, told = threading.Barrier(2), dict[int, Any]()

    def full(self: RepeatedSums, row: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(RepeatedSums, "_write", full)

    def take(rank: int, kept: Any) -> None:
        seen = kept.of_step(0, NUMBERS, bound=1.0, device="cpu")
        if rank == 0:
            seen.see(values)
        ranks: Any = TwoThreads(rank, barrier, told)
        settled_together(kept, seen, ranks, in_parts=False, is_repeated=False)

    kinds = [RepeatedSums.begun(tmp_path, KEY), FollowedSums(KEY, 1)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(take, rank, kinds[rank]) for rank in (0, 1)]
        assert [type(call.exception()) for call in calls] == [OSError, OSError]


def test_a_step_that_was_charged_and_not_taken_gets_noise_of_its_own(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = RepeatedSums._write

    def stopped(self: RepeatedSums, row: dict[str, Any]) -> None:
        if row["step"] == 1:
            raise StoppedError
        kept(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedSums, "_write", stopped)
        with pytest.raises(StoppedError):
            train(nothing)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    # Nobody has seen its second step, so another callback does no harm, in a copy neither.
    assert train(halved, resume=True).statement.guarantee
    first = Ledger.read(tmp_path / "run" / "ledger.jsonl").continuations
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "copy", tmp_path / "run")
    run = train(nothing, resume=True)
    assert run.statement.guarantee
    assert run.ledger.steps == 3
    assert check_run(tmp_path / "run").problems == ()
    second = run.ledger.continuations
    assert [step for step, _ in first + second] == [1, 1]
    assert first != second


def test_a_sum_that_is_lost_before_others_is_missed(train: Train, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(stop)
    place = tmp_path / "run" / SUMS
    rows = place.read_bytes().splitlines(keepends=True)
    assert len(rows) == 2
    place.write_bytes(rows[1])
    with pytest.raises(LedgerError, match="lacks the sum of step 1, which was charged"):
        train(nothing, resume=True)


@pytest.mark.parametrize("left", [0, 1])
def test_steps_that_were_seen_are_not_taken_again_with_new_noise(
    left: int, train: Train, tmp_path: Path
) -> None:
    # As where an older copy of the directory of secrets is put back.
    with pytest.raises(StoppedError):
        train(stop)
    place = tmp_path / "run" / SUMS
    rows = place.read_bytes().splitlines(keepends=True)
    place.write_bytes(b"".join(rows[:left]))
    if left == 0:
        with pytest.raises(LedgerError, match="lacks the sum of step 1, which was charged"):
            train(nothing, resume=True)
    else:
        # The last one may have been charged alone: a kill between the two looks the same.
        assert train(nothing, resume=True).ledger.continuations[0][0] == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_last_step_may_lack_its_sum_unless_rows_after_it_show_that_it_was_kept(
    values: Tensor, device: str, tmp_path: Path
) -> None:
    kept_of(values, tmp_path, device=device).close()
    assert RepeatedSums.opened(tmp_path, KEY, (1, 3), device, is_settled=True).untaken == 0
    # On a GPU totals come later: the step may have been seen, and keeps its noise.
    untaken = 1 if device == "cpu" else 0
    assert RepeatedSums.opened(tmp_path, KEY, (1, 4), device).untaken == untaken
    for steps, is_settled in (((1, 4), True), ((1, 5), False), ((4, 6), False)):
        with pytest.raises(LedgerError, match="lacks the sum of step"):
            RepeatedSums.opened(tmp_path, KEY, steps, device, is_settled=is_settled)


def test_a_step_is_charged_after_the_sum_of_the_step_before_is_written(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU totals come later. The step before was seen by then: were its sum lost, it would be
    # taken again with new noise.
    found: list[int] = []

    def later(self: RepeatedSums, seen: Any, totals: Tensor) -> None:
        found.append(len((tmp_path / "run" / SUMS).read_bytes().splitlines()))
        self._waiting = repeated_sums._Waiting(seen, totals)

    monkeypatch.setattr(RepeatedSums, "settle", later)
    train(nothing)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("steps", [0, 1])
def test_an_older_ledger_that_is_put_back_lacks_steps_that_were_taken(
    steps: int, train: Train, tmp_path: Path
) -> None:
    # Before the first checkpoint nothing else tells: they would be taken twice for one charge.
    with pytest.raises(StoppedError):
        train(stop)
    place = tmp_path / "run" / "ledger.jsonl"
    rows = place.read_bytes().splitlines(keepends=True)
    place.write_bytes(b"".join(rows[: 1 + steps]))
    for options in ({"resume": True}, {"fork": True}):
        with pytest.raises(LedgerError, match="2 steps were taken, by the sums in"):
            train(nothing, **options)
    place.unlink()
    with pytest.raises(LedgerError, match=r"holds secret/sums\.jsonl, and its ledger no step"):
        train(nothing, resume=True)
    place.write_bytes(b"".join(rows))
    assert train(nothing, resume=True).statement.guarantee


def test_another_numpy_takes_no_step_again(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    # It may draw other noise from the same stream, and the same sum would be released twice.
    with pytest.raises(StoppedError):
        train(stop)
    monkeypatch.setattr(np, "__version__", "99.0")
    with pytest.raises(InputError, match=r"numpy 99\.0 instead of"):
        train(nothing, resume=True)


def test_who_takes_part_is_drawn_anew_where_each_step_is_drawn_by_itself(train: Train) -> None:
    with pytest.raises(StoppedError):
        train(stop)
    ledger = train(nothing, resume=True).ledger
    found = Continuation()
    for purpose in ("noise", "noise on a number", "score of a test", "cohort", "rows"):
        assert found.changes(ledger, purpose) == ledger.continuations != []
    # Some decide once for the whole run.
    for purpose in ("threshold of a test", "choose rows", "limit contributions"):
        assert found.changes(ledger, purpose) == []
