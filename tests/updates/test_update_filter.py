"""The filter of Asi & Liu: what it keeps, when it halts, and what it costs."""

from __future__ import annotations

import copy
import gzip
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import GaussianDpEvent
from torch import Tensor, nn

import filter_oracle
import userdp
from cli_runner import userdp as command
from shared import SHARED, needs_shared
from stores import KEY, sentences
from tiny import make_model, make_store
from userdp.accounting import accountant, events
from userdp.clipping.filtered import FilteredClipping
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import AdaptiveClip, FlatClip
from userdp.config.file import load_config
from userdp.data.store import write_store
from userdp.errors import BudgetExhaustedError, InputError, LedgerError
from userdp.files.remembered import SUMS
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.planner.filter_noise import effective_noise, whether_it_pays
from userdp.prices.marks import Hypothetical
from userdp.prices.paid import Paid
from userdp.report import pictures
from userdp.report.write import write_report
from userdp.runs.check import check_run
from userdp.runs.record import RunRecord
from userdp.runs.validation_curve import read_points
from userdp.sampling import PoissonRecords
from userdp.step import PrivateStep
from userdp.units import Adjacency
from userdp.updates.filter import Filter
from userdp.updates.halting import HaltingTest

USERS, SIZE = 60, 4
# Much epsilon for the test, so that few users are enough to prove something.
RULE = Filter(concentration=0.2, threshold_epsilon=60.0, threshold_delta=1e-4)


def the_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": USERS,
        "expected_cohort_size": USERS,
        "group_size": 1,
        "steps": 5,
        "clip_norm": 1.0,
        "noise_multiplier": 4.0,
        "delta": 1e-3,
        "update": RULE,
    }
    return Plan.sample_users(**(settings | changes))


class Given:
    """Stands in for the plain loop: a group's update is its row."""

    def update(self, group: dict[str, Tensor]) -> list[Tensor]:
        return [group["x"][0]]


def filtered(points: Sequence[np.ndarray], test: HaltingTest) -> tuple[np.ndarray, float]:
    """N times the weighted mean of these updates, and their score."""
    model = nn.Linear(SIZE, 1, bias=False)
    parameters = [nn.Parameter(torch.zeros(SIZE))]
    clipping = FilteredClipping.__new__(FilteredClipping)
    clipping._plain = cast("PlainClipping", Given())
    clipping._parameters, clipping._test = parameters, test
    clipping._layers = Layers(model, list(model.parameters()))
    clipping.skip_failing, clipping._is_shared = False, False
    groups = [{"x": torch.tensor(point[None], dtype=torch.float32)} for point in points]
    found = clipping.clipped_sum(groups, FlatClip(clip_norm=1.0))
    assert found.concentration is not None
    return found.total.views[0].double().numpy(), found.concentration


def halting_of(plan: Plan) -> HaltingTest:
    assert plan.halting_test is not None
    return plan.halting_test


def by_hand(points: Sequence[np.ndarray], plan: Plan) -> tuple[np.ndarray, float]:
    """Alg. 3, lines 8 to 13, written down once more: slow, in float64."""
    users, tau = plan.num_users, RULE.concentration
    distance = np.array([[np.linalg.norm(a - b) for b in points] for a in points])
    score = (distance <= tau).sum() / users
    near = (distance <= 2 * tau).sum(1)
    half = math.ceil(users / 2)
    weights = np.clip((near - half) / (2 * users / 3 - half), 0, 1)
    total = weights.sum()
    mean = (weights[:, None] * np.array(points)).sum(0) / total if total else np.zeros(SIZE)
    return users * mean, float(score)


def cloud(rng: np.random.Generator, count: int, spread: float) -> list[np.ndarray]:
    """Points around one place, some of them further off."""
    centre = rng.normal(size=SIZE) * 0.2
    far = rng.random(count) < 0.15
    scale = np.where(far, rng.uniform(1, 6), 1.0) * spread
    return [centre + s * rng.normal(size=SIZE) for s in scale]


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_and_the_score_are_those_of_the_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = cloud(rng, 55, 0.04)
    points = [point / max(1.0, np.linalg.norm(point) * 1.001) for point in points]
    ours, theirs = filtered(points, halting_of(the_plan())), by_hand(points, the_plan())
    assert ours[1] == pytest.approx(theirs[1])
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)


def test_no_neighbour_moves_the_filtered_mean_by_more_than_the_sensitivity() -> None:
    # Seed 0; every neighbour is tried by its own distance, so nothing here can fail by chance.
    rng, plan = np.random.default_rng(0), the_plan()
    test = halting_of(plan)
    bound = test.sensitivity(1.0)
    seen, largest = 0, 0.0
    for _ in range(30):
        count = int(rng.integers(50, USERS + 1))
        points = cloud(rng, count, float(rng.uniform(0.01, 0.06)))
        mean, score = filtered(points, test)
        # At the edge of what counts as near, one user changes the weights of many others.
        direction = rng.normal(size=SIZE)
        direction /= np.linalg.norm(direction)
        new = points[0] + direction * rng.choice([0.39, 0.41, 0.6, 3.0])
        neighbours = [points[1:], [new, *points[1:]], [new, *points]]
        for other in neighbours:
            moved, other_score = filtered(other, test)
            assert abs(score - other_score) <= 2
            if max(score, other_score) >= test.lowest_score:
                seen += 1
                largest = max(largest, float(np.linalg.norm(mean - moved)))
    assert seen > 25
    assert 0.05 * bound < largest <= bound


def test_one_user_who_changes_many_weights_is_still_within_the_bound() -> None:
    """A ring of users whose weights all depend on whether one user is near them."""
    rule = Filter(concentration=0.2, threshold_epsilon=30.0, threshold_delta=1e-4)
    test = halting_of(the_plan(update=rule))
    axis = np.eye(SIZE)[0]
    # 51 users within tau of each other. The ring has half of them within 2 tau.
    points = [np.zeros(SIZE)] * 26 + [axis * 0.19] * 25 + [axis * 0.55] * 8
    assert halfway(test, 25 + 8)
    mean, score = filtered([*points, axis * 0.5], test)
    other, _ = filtered([*points, -axis * 0.3], test)
    assert score >= test.lowest_score
    assert 0 < np.linalg.norm(mean - other) <= test.sensitivity(1.0)


def halfway(test: HaltingTest, neighbours: int) -> bool:
    """Whether a user with so many others nearby counts in part."""
    return 0 < test.weight(neighbours) < test.whole


def test_whether_two_users_are_close_depends_on_these_two_alone() -> None:
    """In float32 products the order of adding decides near the radius; here nothing does."""
    rng = np.random.default_rng(3)
    tau = RULE.concentration
    a = rng.normal(size=SIZE) * 0.1
    b = a + tau * np.eye(SIZE)[1]
    others = [rng.normal(size=SIZE) * 9 for _ in range(30)]
    test = halting_of(the_plan())
    alone = filtered([a, b], test)[1]
    apart = filtered([others[0], *others[1:], a, b], test)[1] - filtered(others, test)[1]
    assert apart == pytest.approx(alone)


def test_users_beyond_the_public_number_do_not_count() -> None:
    points = cloud(np.random.default_rng(1), USERS + 7, 0.02)
    ours, first = filtered(points, halting_of(the_plan())), filtered(points[:USERS], halting_of(the_plan()))  # fmt: skip  # noqa: E501
    assert ours[1] == first[1] <= USERS
    np.testing.assert_array_equal(ours[0], first[0])


def test_above_threshold_has_the_noise_of_dwork_and_roth() -> None:
    test = halting_of(the_plan())
    # Sensitivity 2: Lap(2 * 2 / epsilon) on the threshold, Lap(4 * 2 / epsilon) on every score.
    assert test.threshold_noise == pytest.approx(4 / 60)
    assert test.score_noise == pytest.approx(8 / 60)
    line = 0.8 * USERS
    assert test.passes(line, on_threshold=0.0, on_score=0.0)
    assert not test.passes(line, on_threshold=1.0, on_score=0.49)
    assert test.passes(line, on_threshold=1.0, on_score=0.51)
    assert not test.passes(line - 0.14, on_threshold=0.0, on_score=1.0)
    # A step below the lowest score passes a run with probability at most delta; 400,000 runs, seed
    # 0: more than 70 of 40 expected at most has probability below 1e-5.
    rng = np.random.default_rng(0)
    count = 400_000
    reached = test.lowest_score + test.score_noise * rng.laplace(size=(count, test.steps)).max(1)
    passed = reached >= line + test.threshold_noise * rng.laplace(size=count)
    assert passed.sum() <= 70


# ---- Steps


def make_step(values: Tensor, plan: Plan, path: Path | None = None) -> PrivateStep:
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from userdp.clipping.settings import StepSettings

    record = RunRecord.create(plan, model, optimizer, settings=StepSettings(), path=path)
    step = PrivateStep(
        model,
        optimizer,
        plan,
        UserIndex.from_owners([str(user) for user in range(len(values))]),
        record_loss=lambda model, batch: model(batch["x"])[:, 0],
        record=record,
    )
    step.check_model({"x": torch.randn(3, SIZE)})
    return step


def run(values: Tensor, plan: Plan, path: Path | None = None) -> PrivateStep:
    step = make_step(values, plan, path)
    for cohort in step.cohorts():
        step.apply({"x": values[rows]} for rows in cohort)
    return step


def concentrated() -> Tensor:
    return torch.ones(USERS, SIZE) * 0.1 + 0.01 * torch.randn(
        USERS, SIZE, generator=torch.Generator().manual_seed(1)
    )


def scattered() -> Tensor:
    return torch.randn(USERS, SIZE, generator=torch.Generator().manual_seed(2))


def test_concentrated_gradients_pass_every_step(tmp_path: Path) -> None:
    step = run(concentrated(), the_plan(), tmp_path / "run")
    assert step.ledger.steps == 5
    assert not step.is_halted
    step.ledger.finish({})
    statement = Ledger.read(tmp_path / "run" / "ledger.jsonl").statement()
    assert statement.guarantee
    assert "filter of Asi & Liu" in str(statement)
    assert not any("halted" in caution for caution in statement.cautions)


def test_scattered_gradients_halt_the_run_and_the_step_is_charged(tmp_path: Path) -> None:
    step = make_step(scattered(), the_plan(), tmp_path / "run")
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.apply({"x": scattered()[rows]} for rows in step.draw())
    assert step.is_halted
    assert step.steps_left == 0
    assert list(step.cohorts()) == []
    with pytest.raises(BudgetExhaustedError, match="halted"):
        step.draw()
    for parameter, was in zip(step.model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    step.ledger.finish({})
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.is_halted
    assert ledger.steps == 1
    found = ledger.statement()
    assert found.guarantee
    assert any("halted at step 1" in caution for caution in found.cautions)
    # The answer of the test is paid for, though nothing else was released.
    assert found.epsilon > RULE.threshold_epsilon


def test_an_independent_script_gets_the_statements_epsilon_from_the_ledger(tmp_path: Path) -> None:
    for name, values in (("all", concentrated()), ("halted", scattered())):
        step = run(values, the_plan(), tmp_path / name)
        step.ledger.finish({})
        path = tmp_path / name / "ledger.jsonl"
        script = Path(filter_oracle.__file__)
        assert "import userdp" not in script.read_text()
        assert "from userdp" not in script.read_text()
        told = subprocess.run(
            [sys.executable, "-I", str(script), str(path)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = Ledger.read(path).statement().epsilon
        # Ours is an upper bound, at most 0.05% above the truth.
        assert float(told.stdout) - 1e-9 <= found <= float(told.stdout) * 1.0005
    plan = the_plan(num_users=61, expected_cohort_size=61)
    assert filter_oracle.noise_stddev_of(plan.to_json()) == pytest.approx(plan.noise_stddev)


def test_noise_is_calibrated_for_the_steps_and_the_test() -> None:
    rule = Filter(threshold_epsilon=1.5, threshold_delta=5e-6)
    plan = the_plan(
        num_users=3000, expected_cohort_size=3000, steps=100, delta=1e-5, update=rule,
        noise_multiplier=None, epsilon=3.0,
    )  # fmt: skip
    assert plan.epsilon() == pytest.approx(3.0, rel=1e-3)
    assert plan.epsilon() <= 3.0
    assert plan.noise.noise_multiplier == pytest.approx(26.82, abs=0.01)


def test_without_a_cohort_size_everybody_is_in_every_step(config_file: Callable[..., Path]) -> None:
    assert the_plan(expected_cohort_size=None).divisor == USERS
    path = config_file(
        privacy="noise_multiplier = 4.0\nclip_norm = 1.0\ndelta = 1e-3",
        training='update = "filter"\nthreshold_epsilon = 60.0\nthreshold_delta = 1e-4',
    )
    text = path.read_text().replace("num_users = 20\nexpected_cohort_size = 5", "num_users = 61")
    path.write_text(text)
    assert load_config(path).plan().divisor == 61


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_cohort_size": 30}, "every user is in every step"),
        ({"adjacency": Adjacency.REPLACE}, "no accounting rule"),
        (
            {"clip_norm": None, "clip": AdaptiveClip(clip_norm=1.0, count_noise=9.0)},
            "finite clip norm",
        ),
        ({"clip_norm": math.inf, "noise_multiplier": 0.0, "non_private": True}, "finite clip"),
        ({"mark": Hypothetical(num_users=60, expected_groups=60)}, "hypothetical"),
        ({"delta": 1e-5}, "leaves nothing of delta"),
        ({"update": Filter()}, "nothing could be proven"),
        ({"num_users": 40, "expected_cohort_size": 40, "update": Filter()}, "nothing could be"),
    ],
)
def test_what_the_filter_has_no_price_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        the_plan(**changes)


def test_records_have_no_filter() -> None:
    with pytest.raises(InputError, match="no accounting rule"):
        Plan.sample_records(
            num_users=60, expected_batch_size=60, group_size=1, steps=2, clip_norm=1.0,
            noise_multiplier=1.0, delta=1e-3, update=RULE,
        )  # fmt: skip
    assert PoissonRecords.name == "poisson"


@pytest.mark.parametrize(
    "wrong",
    [{"concentration": 0.0}, {"concentration": math.nan}, {"threshold": 1.0}, {"threshold": -1.0},
     {"threshold_epsilon": -1.0}, {"threshold_delta": 0.0}, {"threshold_delta": 1.0},
     {"memory_gib": math.inf}],
)  # fmt: skip
def test_numbers_that_no_filter_has_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Filter(**wrong)


def test_too_many_gradients_are_refused_before_the_first_step() -> None:
    plan = the_plan(update=Filter(concentration=0.2, threshold_epsilon=60.0, memory_gib=1e-6))
    with pytest.raises(InputError, match="GiB, above memory_gib"):
        make_step(concentrated(), plan)


def test_what_a_step_takes_is_said_before_the_first_one(caplog: pytest.LogCaptureFixture) -> None:
    make_step(concentrated(), the_plan())
    assert "60 users x 5 weights x 4 bytes" in caplog.text
    assert "1.8e+04 products a step" in caplog.text


def test_the_filter_pays_only_far_below_the_clip_norm() -> None:
    # Chua et al. 2024, Fig. 3: "must be smaller than 0.1". At 0.1 it leaves more noise.
    for epsilon in (3.0, 8.0):
        found = effective_noise(num_users=10_000, steps=100, epsilon=epsilon, delta=1e-5)
        assert found.filtered > found.user_wise
        assert found.paper > found.user_wise
        assert 0.01 < found.break_even < found.paper_break_even < 0.1
    less = effective_noise(num_users=10_000, steps=100, epsilon=3.0, delta=1e-5, concentration=0.01)
    assert less.filtered < less.user_wise
    assert less.break_even == pytest.approx(
        effective_noise(num_users=10_000, steps=100, epsilon=3.0, delta=1e-5).break_even, rel=0.03
    )


def test_whether_the_filter_pays_is_said_from_the_plan_alone() -> None:
    def planned(concentration: float) -> Plan:
        rule = Filter(concentration=concentration, threshold_epsilon=1.5, threshold_delta=5e-6)
        return Plan.sample_users(
            num_users=10_000,
            expected_cohort_size=10_000,
            group_size=1,
            steps=100,
            clip_norm=0.5,
            epsilon=3.0,
            delta=1e-5,
            update=rule,
        )

    expected = effective_noise(num_users=10_000, steps=100, epsilon=3.0, delta=1e-5)
    found = float(re.findall(r"about ([0-9.]+);", whether_it_pays(planned(0.1)))[0])
    assert found == pytest.approx(expected.break_even, rel=0.05)
    assert "does not pay" in whether_it_pays(planned(0.1))
    assert "does not pay" not in whether_it_pays(planned(found / 2))
    assert f"yours is {found / 2:g}" in whether_it_pays(planned(found / 2))
    plain = Plan.sample_users(num_users=100, clip_norm=1.0, epsilon=3.0, delta=1e-5)
    assert whether_it_pays(plain) == ""


# ---- Through files


def test_a_halted_run_is_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "store", [1] * USERS)
    other = sentences(users=5, records_per_user=2, seed=4, prefix="other ")
    write_store(other, tmp_path / "other", key=KEY)
    make_model(tmp_path / "base")
    (tmp_path / "run.toml").write_text(
        f'[data]\nstore = "{tmp_path}/store"\nevaluation = "{tmp_path}/other"\n'
        "sequence_length = 16\n[model]\n"
        f'path = "{tmp_path}/base"\n[privacy]\nnum_users = {USERS}'
        "\ngroup_size = 1\nclip_norm = 0.1\nnoise_multiplier = 4.0\ndelta = 1e-3\n[training]\n"
        'steps = 6\nupdate = "filter"\nconcentration = 0.01\nthreshold_epsilon = 60.0\n'
        "threshold_delta = 1e-4\n"
    )
    train = ("train", tmp_path / "run.toml", "--out", tmp_path / "run", "--json")

    def stop(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    # Stopped after the step was charged and halted, and before the run was closed.
    with monkeypatch.context() as patched:
        patched.setattr(RunRecord, "finish", stop)
        stopped = command(*train)
    assert stopped.code != 0
    assert "the filter leaves less noise than the same run without it below" in stopped.err
    rows = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert [json.loads(row)["kind"] for row in rows.splitlines()] == ["run", "step", "halt"]
    told = command(*train, "--resume").json
    assert told["guarantee"] is True
    # When it halted depends on data: all planned steps are priced.
    assert told["steps"] == 6
    assert any("halted at step 1" in caution for caution in told["cautions"])
    assert command("ledger", "verify", tmp_path / "run", "--json").json["ok"] is True
    again = command(*train, "--resume").json
    assert again["steps"] == 6
    spent = command("budget", tmp_path / "store", "--delta", 1e-3, "--json").json
    assert spent["spent_epsilon"] == pytest.approx(told["epsilon"])
    assert spent["spent_epsilon"] > 60
    card = Path(command("report", tmp_path / "run", "--json").json["card"]).read_text()
    assert "halted at step 1" in card
    # The last point is of the released weights, and the card has it.
    points = read_points(tmp_path / "run" / "validation.jsonl")
    assert [point.step for point in points] == [0, 1]
    assert points[0].loss == points[1].loss
    assert "| before | after training |" in card
    # The report's pictures are of all planned steps, as the statement's epsilon is.
    drawn: list[int] = []
    with monkeypatch.context() as patched:
        for name in ("best_attack", "epsilon_spent"):
            patched.setattr(pictures, name, lambda plan, steps, **_: drawn.append(steps) or "")
        write_report(tmp_path / "run")
    assert drawn == [6, 6]
    exported = command("export", tmp_path / "run", "--out", tmp_path / "out", "--base", "x/y")
    assert exported.code == 0


class StoppedError(Exception):
    pass


def test_a_test_is_asked_again_with_its_noise_of_the_same_gradients_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [1] * USERS)
    model, tokenizer = make_model(tmp_path / "base")
    # Everybody is near to all others, so that nobody is left out.
    plan = the_plan(update=replace(RULE, concentration=3.0))
    asked: list[tuple[float, float]] = []

    def answers(self: HaltingTest, score: float, *, on_threshold: float, on_score: float) -> bool:
        asked.append((score, on_score))
        # The second step fails.
        return len(asked) % 2 == 1

    monkeypatch.setattr(HaltingTest, "passes", answers)

    def train(on_step: Callable[[nn.Module, int], None], **options: Any) -> Any:
        own = copy.deepcopy(model)
        return userdp.train(
            own,
            tokenizer,
            store,
            plan,
            optimizer="sgd",
            learning_rate=0.1,
            sequence_length=16,
            out=tmp_path / "run",
            saving=userdp.Saving(every_steps=100),
            on_step=lambda step: on_step(own, step),
            **options,
        )

    def stop(model: nn.Module, step: int) -> None:
        if step == 2:
            raise StoppedError

    def moved(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    # Stopped after the halt and before the checkpoint of that step.
    with pytest.raises(StoppedError):
        train(stop)
    before = list(asked)
    # The halt came after the sum. Without it the test would be asked once more, with new noise.
    sums = (tmp_path / "run" / SUMS).read_bytes()
    (tmp_path / "run" / SUMS).write_bytes(sums.splitlines(keepends=True)[0])
    with pytest.raises(LedgerError, match="lacks the sum of step 2"):
        train(moved, resume=True)
    (tmp_path / "run" / SUMS).write_bytes(sums)
    with pytest.raises(InputError, match="step 2 is taken again, and its sum is not"):
        train(moved, resume=True)
    # The second step's test is not asked.
    assert asked == [*before, before[0]]
    asked.clear()
    run = train(lambda model, step: None, resume=True)
    assert asked == before
    assert run.ledger.is_halted
    assert run.ledger.continuations == []
    assert check_run(tmp_path / "run").problems == ()


def test_a_halt_without_a_test_or_before_more_steps_is_refused(tmp_path: Path) -> None:
    plain = Ledger.create(the_plan(update=None), path=tmp_path / "a", bound_to={}, fixed_seed=True)
    plain.charge_step()
    plain.halt()
    plain.close()
    with pytest.raises(LedgerError, match="no test to halt it"):
        Ledger.read(tmp_path / "a")
    late = Ledger.create(the_plan(), path=tmp_path / "b", bound_to={}, fixed_seed=True)
    late.charge_step()
    late.halt()
    late.charge_step()
    late.close()
    with pytest.raises(LedgerError, match="nothing else"):
        Ledger.read(tmp_path / "b")


# ---- What is added


def test_parts_known_by_one_epsilon_and_delta_are_added() -> None:
    gaussian = GaussianDpEvent(2.0)
    part = events.above_threshold(epsilon=0.5, delta=1e-6)
    whole = events.combined([gaussian, events.repeated(part, 2)])
    expected = accountant.epsilon(gaussian, delta=1e-5 - 2e-6, adjacency=Adjacency.ADD_REMOVE) + 1.0
    found = accountant.epsilon(whole, delta=1e-5, adjacency=Adjacency.ADD_REMOVE)
    assert found == pytest.approx(expected)
    assert accountant.can_price(whole, Adjacency.ADD_REMOVE)
    assert events.from_json(events.to_json(whole)) == whole
    assert accountant.epsilon(part, delta=1e-6, adjacency=Adjacency.ADD_REMOVE) == math.inf
    curve = accountant.deltas(
        whole, epsilons=[0.5, found], delta=1e-5, adjacency=Adjacency.ADD_REMOVE
    )
    assert curve[0] == 1.0
    assert curve[1] == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"epsilon": -5.0}, {"delta": -1e-3}, {"delta": 1.5}])
def test_no_part_lowers_the_price(wrong: dict[str, float]) -> None:
    written = {"type": "EpsilonDeltaDpEvent", "epsilon": 1.0, "delta": 1e-9} | wrong
    with pytest.raises(LedgerError):
        Paid.from_json({"what": "a look", "event": written})


# ---- Real text


@needs_shared
def test_gradients_of_real_people_halt_the_filter() -> None:
    """Chua et al. 2024, Sec. 5.3: tau / C is about 1 on real text, and 0.1 is out of reach."""
    from transformers import GPT2Config, GPT2LMHeadModel

    texts: dict[str, list[str]] = {}
    with gzip.open(SHARED / "data" / "tinyshakespeare.jsonl.gz", "rt") as file:
        for line in file:
            record = json.loads(line)
            texts.setdefault(record["users"][0], []).append(record["text"])
    people = sorted(texts)[:240]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=256, n_positions=64,
                   bos_token_id=0, eos_token_id=0)
    ).eval()  # fmt: skip
    plan = the_plan(
        num_users=len(people), expected_cohort_size=len(people), steps=3, clip_norm=0.1,
        update=Filter(concentration=0.1, threshold_epsilon=20.0, threshold_delta=1e-4),
    )  # fmt: skip
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan,
        UserIndex.from_owners(people), sequence_length=48,
    )  # fmt: skip
    for cohort in step.cohorts():
        step.apply(
            {"input_ids": (ids := torch.tensor([list(texts[people[row]][0].encode()[:48])])),
             "labels": ids}
            for row in cohort.rows
        )  # fmt: skip
    assert step.is_halted
    assert step.ledger.steps == 1
