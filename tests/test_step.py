"""The private step alone: budget, order of events, what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models_zoo
from userdp.clipping.rules import AdaptiveClip, NormalisedClip
from userdp.clipping.settings import StepSettings
from userdp.errors import BudgetExhaustedError, InputError
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.losses import causal_lm_loss
from userdp.plan import Plan
from userdp.runs.record import RunRecord
from userdp.step import PrivateStep
from userdp.streams import RunSecret

SEED = RunSecret.fixed_for_tests(1)


def plan(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "num_users": 4,
        "expected_cohort_size": 2,
        "group_size": 2,
        "steps": 3,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(settings | changes))  # type: ignore[arg-type]


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


DATA = {
    "x": torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
    "y": torch.randn(8, generator=torch.Generator().manual_seed(1)),
}
OWNERS = [0, 0, 1, 1, 2, 2, 3, 3]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def make(chosen: Plan, **options: object) -> PrivateStep:
    model = linear()
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        chosen,
        UserIndex.from_owners(OWNERS),
        record_loss=squares,  # type: ignore[arg-type]
        secret=SEED,
        **options,  # type: ignore[arg-type]
    )


def run(step: PrivateStep) -> None:
    for cohort in step.cohorts():
        step.apply({name: values[rows] for name, values in DATA.items()} for rows in cohort)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_infinite_clip_norm_and_zero_noise_is_plain_sgd_bit_for_bit() -> None:
    # Every user every step, one record a user, so that both divide the same sum by the same number.
    model = models_zoo.build("gpt2 tied", torch.float32)
    plain = copy.deepcopy(model)
    batch = models_zoo.ragged_batch([6, 4, 9, 3], seed=0)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        plan(
            expected_cohort_size=4,
            group_size=1,
            noise_multiplier=0.0,
            clip_norm=float("inf"),
            non_private=True,
        ),
        UserIndex.from_owners(range(4)),
        settings=StepSettings(path="plain"),
        secret=SEED,
    )
    for cohort in step.cohorts():
        step.apply({name: values[rows] for name, values in batch.items()} for rows in cohort)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        # The usual accumulation of gradients, one record at a time, as in any training script.
        for line in range(4):
            record = {name: values[line : line + 1] for name, values in batch.items()}
            (causal_lm_loss(plain, record).mean() / 4).backward()
        optimizer.step()
    for ours, theirs in zip(weights(model), weights(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_are_charged_once_each_and_no_more_than_planned() -> None:
    step = make(plan())
    run(step)
    assert step.ledger.steps == 3
    assert step.steps_left == 0
    with pytest.raises(BudgetExhaustedError, match="all 3 planned steps"):
        step.draw()


def test_ledger_row_is_on_disk_before_the_optimizer_steps(tmp_path: Path) -> None:
    chosen = plan()
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(chosen, path=path, bound_to={}, fixed_seed=True)
    step = make(chosen, record=RunRecord(ledger, SEED))
    rows_seen: list[int] = []
    take = step.optimizer.step

    def watched() -> None:
        rows_seen.append(len(path.read_text().splitlines()) - 1)
        take()

    step.optimizer.step = watched  # type: ignore[method-assign]
    run(step)
    ledger.close()
    assert rows_seen == [1, 2, 3]


def test_step_that_fails_before_its_release_changes_no_weight_and_costs_nothing() -> None:
    step = make(plan(expected_cohort_size=4))
    before = weights(step.model)
    step.draw()
    with pytest.raises(RuntimeError, match="out of memory"):
        step.apply(_failing())
    assert step.ledger.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(step.model), strict=True))


def _failing():  # type: ignore[no-untyped-def]
    yield {name: values[:2] for name, values in DATA.items()}
    raise RuntimeError("out of memory")


def test_cohort_must_be_applied_before_the_next_is_drawn() -> None:
    step = make(plan())
    step.draw()
    with pytest.raises(InputError, match="not applied"):
        step.draw()


def test_apply_without_a_cohort_is_refused() -> None:
    step = make(plan())
    with pytest.raises(InputError, match="draw"):
        step.apply([])


@pytest.mark.parametrize("surplus", [-1, 1])
def test_one_batch_per_group_is_required(surplus: int) -> None:
    step = make(plan(expected_cohort_size=4))
    cohort = step.draw()
    batch = {name: values[:2] for name, values in DATA.items()}
    with pytest.raises(InputError, match="one batch per group"):
        step.apply([batch] * (len(cohort) + surplus))
    assert step.ledger.steps == 0


def test_ledger_of_another_plan_is_refused() -> None:
    other = Ledger.create(plan(steps=9), bound_to={}, fixed_seed=True)
    with pytest.raises(InputError, match="another plan"):
        make(plan(), record=RunRecord(other, SEED))


def test_ledger_that_hides_a_fixed_seed_is_refused() -> None:
    chosen = plan()
    hidden = Ledger.create(chosen, bound_to={}, fixed_seed=False)
    with pytest.raises(InputError, match="seed"):
        make(chosen, record=RunRecord(hidden, SEED))


def test_same_secret_gives_the_same_run_and_another_plan_other_noise() -> None:
    first, again, other = make(plan()), make(plan()), make(plan(delta=2e-2))
    for step in (first, again, other):
        run(step)
    same = [
        torch.equal(a, b) for a, b in zip(weights(first.model), weights(again.model), strict=True)
    ]
    changed = [
        torch.equal(a, b) for a, b in zip(weights(first.model), weights(other.model), strict=True)
    ]
    assert all(same)
    assert not any(changed)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_any_torch_optimizer_serves(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = linear()
    before = weights(model)
    step = PrivateStep(
        model,
        kind(model.parameters(), lr=0.1),
        plan(),
        UserIndex.from_owners(OWNERS),
        record_loss=squares,  # type: ignore[arg-type]
    )
    run(step)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert step.statement().steps == 3


def test_the_first_step_costs_the_whole_plan() -> None:
    step = make(plan())
    assert step.statement().epsilon == 0.0
    step.draw()
    step.apply([{n: v[rows] for n, v in DATA.items()} for rows in step._drawn])  # type: ignore
    # Whoever ends the loop here may have looked at the weights.
    assert step.statement().epsilon == step.plan.epsilon()


def test_user_without_rows_is_drawn_and_counts_as_zero() -> None:
    model = linear()
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan(expected_cohort_size=4),
        UserIndex.from_owner_numbers(np.array([0, 0, 1, 1, 2, 2]), num_users=4),
        record_loss=squares,  # type: ignore[arg-type]
        secret=SEED,
    )
    run(step)
    assert step.ledger.steps == 3


def test_repr_of_secrets_shows_nothing() -> None:
    step = make(plan(expected_cohort_size=4))
    assert repr(step.draw()) == "Cohort(<secret>)"
    assert repr(SEED) == "RunSecret(<secret>)"
    assert repr(UserIndex.from_owners(OWNERS)) == "UserIndex(<secret>)"


@pytest.mark.parametrize("size", [0, -3])
def test_a_part_of_a_batch_that_holds_nothing_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="microbatch_records"):
        make(plan(), settings=StepSettings(path="plain", microbatch_records=size))
    with pytest.raises(InputError, match="microbatch_tokens"):
        make(plan(), settings=StepSettings(microbatch_tokens=size))


def adaptive() -> Plan:
    return plan(clip_norm=None, clip=AdaptiveClip(clip_norm=1.0, count_noise=2.0), steps=4)


def take(step: PrivateStep, steps: int) -> None:
    for _ in range(steps):
        cohort = step.draw()
        step.apply({name: values[rows] for name, values in DATA.items()} for rows in cohort)


def test_a_step_that_goes_on_from_its_state_takes_the_same_steps() -> None:
    chosen = adaptive()
    straight = make(chosen)
    take(straight, 2)
    state = straight.state_dict()
    assert json.loads(json.dumps(state)) == state
    take(straight, 2)

    # Another run as far as the state was taken, which has forgotten what its clip norm came to.
    resumed = make(chosen)
    take(resumed, 2)
    resumed._clip = chosen.clip
    resumed.load_state_dict(state)
    take(resumed, 2)
    assert resumed.clip_norm == straight.clip_norm != chosen.clip.clip_norm
    for ours, theirs in zip(weights(resumed.model), weights(straight.model), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_another_moment_is_refused() -> None:
    step = make(adaptive())
    first = step.state_dict()
    take(step, 1)
    with pytest.raises(InputError, match="state is that of step 0, and the record has 1"):
        step.load_state_dict(first)
    later = step.state_dict()
    step.load_state_dict(later)
    step.draw()
    # The cohort was drawn for a step that has begun.
    with pytest.raises(InputError, match="same moment"):
        step.load_state_dict(later)
    with pytest.raises(InputError, match="same moment"):
        make(adaptive()).load_state_dict(later)


def test_state_of_another_clip_rule_is_refused() -> None:
    step = make(plan())
    other = make(plan(clip_norm=None, clip=NormalisedClip(clip_norm=1.0)))
    with pytest.raises(InputError, match="another clip rule"):
        step.load_state_dict(other.state_dict())
    assert step.clip_norm == 1.0
