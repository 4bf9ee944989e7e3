"""A loop of one's own on several ranks: the same cohorts, noise, ledger and weights as on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_loop import Data, Loop, squared_error, usual_plan
from torch import nn

from ranks_runner import answers, on_ranks
from userdp import StepSettings
from userdp.clipping import fast
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import AdaptiveClip
from userdp.errors import InputError, MixedExamplesError, StoppedRunError
from userdp.losses import Batch
from userdp.ranks import Ranks
from userdp.ranks.joining import begin_group, timeout_seconds
from userdp.ranks_launched import is_told
from userdp.runs.record import RunRecord

Seen = dict[str, Any]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def everything(_: int) -> Seen:
    """All that is compared of one loop after another: one start of the ranks for all of them."""
    found: Seen = {}
    for name, loop in {
        "flat": Loop.of(Data.of(), usual_plan()),
        "adaptive": Loop.of(
            Data.of(),
            usual_plan(clip=AdaptiveClip(clip_norm=30.0, count_noise=3.0), clip_norm=None),
        ),
        "noise alone": Loop.of(
            Data.of(), usual_plan(), loss=lambda model, batch: 0 * squared_error(model, batch)
        ),
        "nobody": Loop.of(
            Data.of(), usual_plan(num_users=4000, expected_cohort_size=1, delta=1e-5)
        ),
    }.items():
        loop.take_all()
        found[name] = {
            "rank": Ranks.found().rank,
            "drawn": loop.drawn,
            "weights": loop.weights,
            "clip": loop.step.clip_norm,
            "head": loop.step.ledger.head,
            "steps": loop.step.ledger.steps,
            "bytes": Ranks.found().bytes_added_up,
        }
    return found


def test_two_ranks_take_the_steps_of_one_process() -> None:
    one = everything(0)
    two = answers(2, everything)
    for name, alone in one.items():
        first, second = two[0][name], two[1][name]
        # Bit for bit between the ranks; up to the order of the sum between one and two.
        assert torch.equal(first["weights"], second["weights"])
        assert relative(first["weights"], alone["weights"]) < 1e-6
        assert first["clip"] == pytest.approx(alone["clip"], rel=1e-9)
        assert first["head"] == second["head"] == alone["head"]
        for whole, mine, yours in zip(alone["drawn"], first["drawn"], second["drawn"], strict=True):
            assert sorted(mine + yours) == sorted(whole)
    # The weights of an empty run are its noise.
    assert torch.equal(two[0]["noise alone"]["weights"], one["noise alone"]["weights"])
    assert torch.equal(two[0]["nobody"]["weights"], one["nobody"]["weights"])
    # One buffer of 8 + 4 numbers, padded, in float32 a step, four loops of eight steps.
    assert two[0]["nobody"]["bytes"] == 4 * 8 * 12 * 4


def failing(rank: int) -> list[str]:
    """What every rank is told, one way to fail after another, and that the ranks go on after it."""
    told: list[str] = []

    def note(act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    def no_memory(model: nn.Module, batch: Batch) -> torch.Tensor:
        if is_over and rank == 1:
            raise torch.OutOfMemoryError("there is none")
        return squared_error(model, batch)

    is_over = False
    loop = Loop.of(Data.of(), usual_plan(expected_cohort_size=30), loss=no_memory)
    loop.take()
    is_over = True
    note(loop.take)
    is_over = False
    loop.take()

    # A rank that brings another number of batches.
    loop.step.draw()
    note(lambda: loop.step.apply([]))

    # A rank that was started with something else.
    note(lambda: Loop.of(Data.of(), usual_plan(), rate=0.1 + rank))

    # A record that each rank has made for itself.
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = RunRecord.create(usual_plan(), model, optimizer, settings=StepSettings())
    note(lambda: Loop.of(Data.of(), usual_plan(), model=model, record=own))

    # Weights that move on one rank alone.
    loop = Loop.of(Data.of(), usual_plan())
    if rank:
        with torch.no_grad():
            next(loop.step.model.parameters())[0, 0] += 1e-7
    note(loop.step.check_ranks)

    # A loss that keeps records of one rank's users.
    kept: list[torch.Tensor] = []

    def remembers(model: nn.Module, batch: Batch) -> torch.Tensor:
        if rank == 1 and steps:
            kept.append(batch["y"])
        return squared_error(model, batch) + sum(float(y.abs().sum()) for y in kept) * model(
            batch["x"]
        ).sum(1)

    steps = 0
    loop = Loop.of(Data.of(), usual_plan(expected_cohort_size=30), loss=remembers)
    loop.take()
    steps = 1
    loop.take()
    told.append(f"{loop.step.ledger.doubts} {loop.step.ledger.head}")
    return told


def test_what_fails_or_is_seen_on_one_rank_is_known_to_all() -> None:
    first, second = answers(2, failing)
    assert second[0] == "OutOfMemoryError: there is none"
    assert first[0].startswith("StoppedRunError: rank 1 stopped with OutOfMemoryError")
    assert "give one batch per group" in first[1]
    assert "give one batch per group" in second[1]
    assert first[2] == second[2]
    assert "rank 1 has another optimizer or learning rate than rank 0" in first[2]
    assert first[3] == second[3]
    assert "2 ranks take each step together, and this record is that of 1" in first[3]
    assert first[4] == second[4]
    assert "rank 1 has other weights than rank 0" in first[4]
    assert first[5] == second[5]
    assert "keeps something of one group for the next" in first[5]


def differing(rank: int) -> tuple[torch.Tensor, int, bool, tuple[str, ...]]:
    """Rank 1 sees at the first step that the fast path differs; how often rank 0 then uses it."""
    plain_sums = 0

    class Counting(PlainClipping):
        def clipped_sum(self, *given: Any, **named: Any) -> Any:
            nonlocal plain_sums
            plain_sums += 1
            return super().clipped_sum(*given, **named)

    def fail(*_: Any) -> None:
        raise MixedExamplesError("the fast path differs from the plain loop")

    loop = Loop.of(Data.of(), usual_plan(expected_cohort_size=30), rate=0.0)
    fast.PlainClipping = Counting  # type: ignore[misc]
    if rank == 1:
        loop.step._checked.summation._compare = fail  # type: ignore[attr-defined]
    loop.take()
    step = loop.step
    return loop.weights, plain_sums, step._checked.summation.differs, step.ledger.doubts


def test_what_one_rank_sees_of_the_fast_path_holds_for_all_before_the_step_is_released() -> None:
    for _, plain_sums, differs, doubts in answers(2, differing):
        assert plain_sums
        assert differs
        # Nothing was released by then, so the promise stands.
        assert doubts == ()


def hanging(rank: int) -> str:
    """Rank 1 does not come to the second step."""
    loop = Loop.of(Data.of(), usual_plan())
    loop.take()
    if rank:
        time.sleep(2.5)
        return ""
    try:
        loop.take()
    except StoppedRunError as error:
        return str(error)
    return "it did not time out"


def test_a_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERDP_RANK_TIMEOUT", "1")
    told, _ = on_ranks(2, hanging)
    assert "rank 0 waited 1 s: rank 1 (process " in told
    assert "has ended or hangs" in told
    assert "\n" not in told


def test_a_wrong_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERDP_RANK_TIMEOUT", "soon")
    with pytest.raises(InputError, match="USERDP_RANK_TIMEOUT='soon'"):
        timeout_seconds()


def test_wrapped_models_are_refused_with_the_way_out() -> None:
    wrapped = nn.DataParallel(nn.Linear(6, 1))
    with pytest.raises(InputError, match=r"DataParallel adds up gradients .*`\.module`"):
        Loop.of(Data.of(), usual_plan(), model=wrapped)


def test_two_ranks_on_one_gpu_are_refused_on_both_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    told: list[bool] = []
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(InputError, match="2 ranks on a machine with 1 GPUs") as refused:
            begin_group()
        told.append(is_told(refused.value))
    assert told == [False, True]


def with_two_users(_: int) -> tuple[torch.Tensor, list[int]]:
    """The weights after all steps, and how many users this rank had at each."""
    everybody = usual_plan(num_users=2, expected_cohort_size=2, steps=3)
    loop = Loop.of(Data.of(2), everybody).take_all()
    return loop.weights, [len(cohort) for cohort in loop.drawn]


def test_a_rank_without_users_takes_part() -> None:
    alone, sizes = with_two_users(0)
    assert sizes == [2, 2, 2]
    found = answers(4, with_two_users)
    assert sorted(sizes for _, sizes in found) == [[0] * 3, [0] * 3, [1] * 3, [1] * 3]
    for weights, _ in found:
        assert relative(weights, alone) <= 1e-6
        assert torch.equal(weights, found[0][0])
