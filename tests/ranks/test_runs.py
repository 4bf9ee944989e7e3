"""Whole runs on several ranks: the same record and nearly the same weights as on one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks_runs import CASES, RECORDS, Seen, Stopped, distance, rows, run, store_of

from ranks_runner import answers, on_ranks
from tiny import make_model, make_store
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.runs.check import check_run
from userdp.runs.validation_curve import read_points
from userdp.training.validation import Validation


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    make_store(path / "store", RECORDS)
    make_model(path / "base")
    return path


def on(count: int, root: Path, out: Path, case: str = "users", **options: Any) -> list[Seen]:
    """The run on so many ranks."""
    store_of(root, out)
    return answers(count, lambda _: Seen.of(run(root, out, case, **options)))


def stopped(count: int, root: Path, out: Path, case: str = "users", **options: Any) -> None:
    """The run on so many ranks, stopped on all of them in the middle."""
    store_of(root, out)
    found = on_ranks(count, lambda _: run(root, out, case, **options))
    assert {item.kind for item in found} == {"Stopped"}, found


def signalled(count: int, root: Path, out: Path, case: str = "users", **options: Any) -> None:
    """The run on so many ranks, of which one is told to stop. It is saved."""
    store_of(root, out)
    found = on_ranks(count, lambda _: run(root, out, case, **options))
    assert {item.kind for item in found} == {"InterruptedRunError"}, found


def assert_same_record(one: Path, other: Path) -> None:
    """The same rows, but for the digest of the weights in the last one."""
    ours, theirs = rows(one), rows(other)
    assert [row["hash"] for row in ours[:-1]] == [row["hash"] for row in theirs[:-1]]
    names = ("kind", "steps", "event", "people")
    assert [ours[-1][name] for name in names] == [theirs[-1][name] for name in names]


def both_ways(root: Path, straight: Path, broken: Path) -> tuple[Seen, Seen]:
    """A run, and the same one stopped after 5 steps, of which 4 are saved, and taken up again."""
    whole = Seen.of(run(root, straight, "users, LoRA"))
    with pytest.raises(Stopped):
        run(root, broken, "users, LoRA", stop_after=5)
    again = Seen.of(run(root, broken, "users, LoRA", resume=True))
    return whole, again


def test_a_run_on_two_ranks_is_that_of_one_and_goes_on_bit_for_bit(
    root: Path, tmp_path: Path
) -> None:
    (alone,) = on(1, root, tmp_path / "one", "users, LoRA")
    for name in ("two", "broken"):
        store_of(root, tmp_path / name)
    found = answers(2, lambda _: both_ways(root, tmp_path / "two", tmp_path / "broken"))
    (first, first_again), (second, second_again) = found
    assert first.digest == second.digest == first_again.digest == second_again.digest
    assert first.head == second.head == rows(tmp_path / "two")[-1]["hash"]
    assert distance(first, alone) < 1e-6
    assert first.epsilon == alone.epsilon
    assert_same_record(tmp_path / "two", tmp_path / "one")
    assert_same_record(tmp_path / "broken", tmp_path / "one")
    assert check_run(tmp_path / "broken").problems == ()
    # The steps after the last checkpoint cannot be repeated by another number of ranks.
    assert (tmp_path / "two" / "secret" / "ranks").read_text() == "2\n"


def test_repeated_steps_need_the_same_number_of_ranks(root: Path, tmp_path: Path) -> None:
    stopped(2, root, tmp_path / "r", stop_after=5, every=2)
    with pytest.raises(InputError, match=r"by 2 ranks, and here are 1\. Start 2 ranks"):
        run(root, tmp_path / "r", resume=True)
    # A run that is told to stop is saved by all ranks, so there is nothing to repeat.
    signalled(2, root, tmp_path / "s", every=None, signal_after=3)
    assert len(rows(tmp_path / "s")) == 1 + 3
    (alone,) = on(1, root, tmp_path / "s", resume=True)
    assert alone.steps == 6
    assert (tmp_path / "s" / "secret" / "ranks").read_text() == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_step_on_one_two_and_four_ranks(
    root: Path, tmp_path: Path, case: str
) -> None:
    (alone,) = on(1, root, tmp_path / "1", case, steps=20)
    for count in (2, 4):
        found = on(count, root, tmp_path / str(count), case, steps=20)
        assert len({item.digest for item in found}) == 1
        assert len({item.head for item in found}) == 1
        assert distance(found[0], alone) < 1e-6
        assert found[0].epsilon == alone.epsilon
        assert_same_record(tmp_path / str(count), tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["users, LoRA", "banded", "fedavg", "adaptive"])
def test_a_run_goes_on_with_another_number_of_ranks(root: Path, tmp_path: Path, case: str) -> None:
    (alone,) = on(1, root, tmp_path / "1", case, steps=12)
    for before, after in ((2, 4), (4, 1), (1, 2)):
        out = tmp_path / f"{before}-{after}"
        signalled(before, root, out, case, steps=12, every=None, signal_after=7)
        found = on(after, root, out, case, steps=12, resume=True)
        assert len({item.digest for item in found}) == 1
        assert distance(found[0], alone) < 1e-6
        assert_same_record(out, tmp_path / "1")


@pytest.mark.slow
def test_forks_dry_runs_averages_and_measurements_on_two_ranks(root: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "others", [2] * 5, seed=9, prefix="other")
    others = UserStore.open(tmp_path / "others")
    options: dict[str, Any] = {"ema": 0.9, "validation": Validation(store=others, every=2)}
    out: dict[int, Path] = {1: tmp_path / "one", 2: tmp_path / "two"}
    seen: dict[int, list[Seen]] = {}
    on(1, root, out[1], **options)
    # A fork has noise of its own weights, so both begin with the same.
    for name in ("", "-store"):
        shutil.copytree(tmp_path / f"one{name}", tmp_path / f"two{name}")
    for count, place in out.items():
        seen[count] = on(count, root, place, fork=True, steps=9, **options)
        assert check_run(place).problems == ()
        assert [row["kind"] for row in rows(place)].count("earlier") == 1
    assert distance(seen[2][0], seen[1][0]) < 1e-6
    assert seen[2][0].digest == seen[2][1].digest
    assert seen[2][0].epsilon == seen[1][0].epsilon
    ours, theirs = (read_points(out[count] / "validation.jsonl") for count in (1, 2))
    assert [point.step for point in ours] == [point.step for point in theirs] == [0, 2, 3]
    assert all(a.loss == pytest.approx(b.loss, rel=1e-5) for a, b in zip(ours, theirs, strict=True))
    dry = on(2, root, tmp_path / "dry", dry_run=True)
    assert [item.steps for item in dry] == [6, 6]
    assert dry[0].head == dry[1].head


@pytest.mark.slow
def test_a_finished_run_is_given_back_on_every_rank(root: Path, tmp_path: Path) -> None:
    whole = on(2, root, tmp_path / "run", "users, LoRA")
    again = on(2, root, tmp_path / "run", "users, LoRA", resume=True)
    assert {item.digest for item in (*whole, *again)} == {whole[0].digest}
    assert {item.head for item in (*whole, *again)} == {whole[0].head}
    assert {item.epsilon for item in (*whole, *again)} == {whole[0].epsilon}
