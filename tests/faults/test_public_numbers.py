"""Rows 2, 4, 7, 10 of the fault table: public divisor, empty cohorts, one noise draw, .grad."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from userdp.clipping.flat import FlatBuffer
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.noise.draw import add_normal_
from userdp.plan import Plan
from userdp.runs.record import RunRecord
from userdp.step import PrivateStep
from userdp.streams import RunSecret

SECRET = RunSecret.fixed_for_tests(2)


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    plan: Plan,
    index: UserIndex,
    inputs: Tensor,
    *,
    scale: float = 1.0,
    microbatch_records: int | None = None,
    ledger: Ledger | None = None,
    lr: float = 0.1,
    optimizer_kind: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> tuple[PrivateStep, list[Tensor]]:
    """Train a small network on `inputs`; returns the step and the parameters after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    step = PrivateStep(
        model,
        optimizer_kind(model.parameters(), lr=lr),  # pyright: ignore
        plan,
        index,
        record_loss=lambda model, batch: scale * (model(batch["x"])[:, 0] - 1.0) ** 2,
        settings=StepSettings(microbatch_records=microbatch_records),
        record=None if ledger is None else RunRecord(ledger, SECRET),
        secret=SECRET,
    )
    history = [parameters_of(model)]
    for cohort in step.cohorts():
        step.apply({"x": inputs[rows]} for rows in cohort)
        history.append(parameters_of(model))
    return step, history


def data(records: int, seed: int = 0) -> Tensor:
    return torch.randn(records, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("unit", ["users", "records"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_row_2_one_user_fewer_with_zero_gradients_leaves_parameters_bit_identical(
    unit: str, kind: type[torch.optim.Optimizer]
) -> None:
    settings = {"num_users": 30, "group_size": 2, "steps": 5, "clip_norm": 1.0, "delta": 1e-3}
    if unit == "users":
        plan = Plan.sample_users(expected_cohort_size=10, noise_multiplier=1.0, **settings)
    else:
        plan = Plan.sample_records(expected_batch_size=10, noise_multiplier=1.0, **settings)
    owners = [user for user in range(30) for _ in range(2)]
    full, fewer = (
        train(plan, UserIndex.from_owners(owners[:count]), data(60), scale=0.0, optimizer_kind=kind)
        for count in (60, 58)
    )
    assert torch.equal(full[1][-1], fewer[1][-1])
    assert not torch.equal(full[1][0], full[1][-1])
    assert full[0].plan == fewer[0].plan
    assert full[0].ledger.steps == fewer[0].ledger.steps == 5


def test_row_2_realised_number_of_users_never_enters_the_plan() -> None:
    plan = Plan.sample_users(
        num_users=30,
        expected_cohort_size=10,
        group_size=1,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    for count in (3, 29, 200):
        step, _ = train(plan, UserIndex.from_owners(range(count)), data(count))
        assert step.plan.divisor == 10
        assert step.statement().num_users == 30


def test_row_4_empty_cohorts_take_100_noisy_steps_and_are_charged(tmp_path: Path) -> None:
    # (1 - 1/100)^100 = 0.366: over a third of the cohorts are empty.
    plan = Plan.sample_users(
        num_users=100,
        expected_cohort_size=1,
        group_size=1,
        steps=100,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(plan, path=path, bound_to={}, fixed_seed=True)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners(range(100)),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        record=RunRecord(ledger, SECRET),
    )
    inputs = data(100)
    empty = moved = 0
    for cohort in step.cohorts():
        before = parameters_of(model)
        step.apply({"x": inputs[rows]} for rows in cohort)
        empty += len(cohort) == 0
        moved += bool((parameters_of(model) != before).all())
    ledger.close()
    # Binomial(100, 0.366): outside [20, 55] with probability 4e-4; the seed is fixed.
    assert 20 <= empty <= 55
    assert moved == 100
    assert step.ledger.steps == 100
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows[1:]] == list(range(100))


def test_row_4_empty_dataset_trains_on_noise_alone() -> None:
    plan = Plan.sample_records(
        num_users=10,
        expected_batch_size=2,
        group_size=1,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    step, history = train(plan, UserIndex.from_owners([]), data(0))
    assert step.ledger.steps == 3
    assert all((a != b).all() for a, b in itertools.pairwise(history))


def test_row_7_accumulation_1_4_16_same_noise_same_ledger_same_update(tmp_path: Path) -> None:
    plan = Plan.sample_users(
        num_users=6,
        expected_cohort_size=3,
        group_size=16,
        steps=4,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    owners = [user for user in range(6) for _ in range(16)]
    results: list[tuple[list[Tensor], str]] = []
    for accumulation in (1, 4, 16):
        path = tmp_path / f"{accumulation}.jsonl"
        ledger = Ledger.create(plan, path=path, bound_to={}, fixed_seed=True)
        _, history = train(
            plan,
            UserIndex.from_owners(owners),
            data(96),
            microbatch_records=16 // accumulation,
            ledger=ledger,
        )
        ledger.close()
        results.append((history, path.read_text()))
    (first, rows), *others = results
    for history, other_rows in others:
        assert other_rows == rows
        for a, b in zip(first, history, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_row_7_noise_is_drawn_once_a_step_whatever_the_accumulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws: list[int] = []

    def counted(values, *, step, **others):  # type: ignore[no-untyped-def]
        draws.append(step)
        add_normal_(values, step=step, **others)

    monkeypatch.setattr("userdp.noise.draw.add_normal_", counted)
    plan = Plan.sample_users(
        num_users=4,
        expected_cohort_size=4,
        group_size=16,
        steps=3,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-3,
    )
    owners = [user for user in range(4) for _ in range(16)]
    train(plan, UserIndex.from_owners(owners), data(64), microbatch_records=1)
    assert draws == [0, 1, 2]


def noise_only_plan(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 4,
        "expected_cohort_size": 4,
        "group_size": 1,
        "steps": 2,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(**(settings | changes))  # type: ignore[arg-type]


def test_row_10_with_the_sum_zeroed_weights_move_by_the_noise_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = PrivateStep._release

    def zeroed(self, total):  # type: ignore[no-untyped-def]
        assert any(view.any() for view in total.total.views)
        total.total.zero_()
        released(self, total)

    monkeypatch.setattr(PrivateStep, "_release", zeroed)
    plan = noise_only_plan()
    step, history = train(plan, UserIndex.from_owners(range(4)), 1e3 * data(4))
    secret = SECRET.bound_to(step.ledger.run_digest)
    expected = history[0].clone()
    for number in range(2):
        noise = FlatBuffer(list(step.model.parameters()))
        add_normal_(
            noise.values,
            offset=0,
            size=len(noise.values),
            stddev=plan.noise_stddev,
            step=number,
            streams=secret.streams("noise"),
        )
        expected -= 0.1 * torch.cat([(n / plan.divisor).flatten() for n in noise.views])
        torch.testing.assert_close(history[number + 1], expected, rtol=1e-6, atol=1e-7)


def test_row_10_stale_gradients_are_ignored_and_none_is_left() -> None:
    def result(stale: float | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_only_plan(),
            UserIndex.from_owners(range(4)),
            record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
            secret=SECRET,
        )
        inputs = data(4)
        for cohort in step.cohorts():
            if stale is not None:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, stale)
            step.apply({"x": inputs[rows]} for rows in cohort)
            assert all(parameter.grad is None for parameter in model.parameters())
        return parameters_of(model)

    assert torch.equal(result(None), result(1e6))


def test_row_10_optimizer_with_foreign_parameters_is_refused() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(InputError, match="bypass clipping and noise"):
        PrivateStep(model, optimizer, noise_only_plan(), UserIndex.from_owners(range(4)))


def test_row_10_optimizer_with_a_frozen_parameter_that_holds_a_gradient_is_refused() -> None:
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    model.bias.grad = torch.ones_like(model.bias)
    with pytest.raises(InputError, match="bypass"):
        PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_only_plan(),
            UserIndex.from_owners(range(4)),
        )


def test_row_10_frozen_parameters_stay_where_they_are() -> None:
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    step = PrivateStep(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
        noise_only_plan(),
        UserIndex.from_owners(range(4)),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
    )
    inputs = data(4)
    for cohort in step.cohorts():
        step.apply({"x": inputs[rows]} for rows in cohort)
    assert torch.equal(model.bias, before)
