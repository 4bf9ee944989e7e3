"""Scaled momentum: its arithmetic written out, its price, its public gradients, its resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models_zoo
import userdp
from cli_runner import answer
from cli_runner import userdp as command
from stores import KEY, sentences
from userdp import Plan, PrivateStep, StepSettings, UserIndex
from userdp.data.store import UserStore, write_store
from userdp.digests.of_runs import optimizer_digest
from userdp.errors import InputError
from userdp.optimizers.public_gradient import DECLARED, LEARNT, PublicData
from userdp.optimizers.scaled_momentum import LEARNT_BEFORE, ScaledMomentum, learnt_before
from userdp.streams import RunSecret
from userdp.updates.fedavg import FedAvg


def small() -> nn.Module:
    """A matrix, a bias and a scalar."""
    torch.manual_seed(1)
    model = nn.Linear(3, 4)
    model.register_parameter("gain", nn.Parameter(torch.tensor(0.5)))
    return model


def noised(model: nn.Module, step: int) -> None:
    """Gradients whose coordinates differ much in size."""
    rng = np.random.default_rng(step)
    for parameter in model.parameters():
        size = np.exp(np.arange(parameter.numel()) % 5).reshape(parameter.shape)
        values = rng.standard_normal(parameter.shape) * size
        parameter.grad = torch.tensor(values, dtype=parameter.dtype)


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def test_private_scales_and_steps_are_those_of_the_definition() -> None:
    model = small()
    optimizer = ScaledMomentum(model.parameters(), lr=0.1, momentum=0.8, decay=0.9, floor=0.5)
    weights, scale = flat(model.parameters()), np.ones(17)
    moment, squares = np.zeros(17), np.zeros(17)
    for step in range(4):
        noised(model, step)
        gradient = flat(p.grad for p in model.parameters())
        moment = 0.8 * moment + 0.2 * gradient
        squares = 0.9 * squares + 0.1 * (gradient / scale) ** 2
        weights = weights - 0.1 * scale * moment / np.sqrt(np.mean(moment**2))
        optimizer.step()
        np.testing.assert_allclose(flat(model.parameters()), weights, rtol=1e-4, atol=1e-5)
        scale = 1 / (np.sqrt(squares) + 0.5 * np.sqrt(squares.mean()))
        scale /= np.sqrt(np.mean(scale**2))
        found = optimizer.scales_for(list(model.parameters())).times(
            [torch.ones_like(p) for p in model.parameters()]
        )
        np.testing.assert_allclose(flat(found), scale, rtol=1e-4)


def public_gradients(model: nn.Module) -> Iterator[list[Tensor | None]]:
    for step in range(3):
        noised(model, step)
        yield [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_public_scales_are_made_of_rows_and_columns() -> None:
    model = small()
    optimizer = ScaledMomentum(model.parameters(), lr=0.1, scales="public", floor=0.2)
    optimizer.learn(public_gradients(model))
    # By hand: mean squares over the batches, then over rows and over columns of the matrix.
    each = [flat(gradients) ** 2 for gradients in public_gradients(model)]
    mean = np.mean(each, axis=0)
    usual = np.sqrt(mean.mean())
    gain, matrix, bias = mean[:1], mean[1:13].reshape(4, 3), mean[13:]
    if [p.dim() for p in model.parameters()] != [0, 2, 1]:
        matrix, bias, gain = mean[:12].reshape(4, 3), mean[12:16], mean[16:]
    whole = np.sqrt(matrix.mean())
    rows = 1 / (np.sqrt(matrix.mean(1)) / whole + 0.2)
    columns = 1 / (np.sqrt(matrix.mean(0)) / whole + 0.2)
    of_matrix = rows[:, None] * columns[None] / (whole + 0.2 * usual)
    by_dim = {0: 1 / (np.sqrt(gain) + 0.2 * usual), 1: 1 / (np.sqrt(bias) + 0.2 * usual)}
    expected = [by_dim.get(p.dim(), of_matrix).ravel() for p in model.parameters()]
    together = np.concatenate(expected)
    parameters = list(model.parameters())
    found = optimizer.scales_for(parameters).times([torch.ones_like(p) for p in parameters])
    np.testing.assert_allclose(flat(found), together / np.sqrt(np.mean(together**2)), rtol=1e-4)
    # They stay: a step changes the weights alone.
    noised(model, 7)
    optimizer.step()
    again = optimizer.scales_for(parameters).times([torch.ones_like(p) for p in parameters])
    assert np.array_equal(flat(again), flat(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", ["private", "public"])
def test_a_loaded_state_goes_on_bit_for_bit(source: Any, dtype: torch.dtype) -> None:
    model = small().to(dtype)
    optimizer = ScaledMomentum(model.parameters(), lr=0.1, scales=source)
    if source == "public":
        optimizer.learn(public_gradients(model))
    for step in range(3):
        noised(model, step)
        optimizer.step()
    other = copy.deepcopy(model)
    loaded = ScaledMomentum(other.parameters(), lr=0.1, scales=source)
    parameters = list(other.parameters())
    scales = loaded.scales_for(parameters)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for one, way in ((model, optimizer), (other, loaded)):
            noised(one, step)
            way.step()
        assert np.array_equal(flat(model.parameters()), flat(parameters))
    # What was handed out before is what is changed, as captured steps need.
    assert scales.of(parameters[0]).factors[0] is loaded.scales_for(parameters).scales[0].factors[0]
    expected = optimizer.scales_for(list(model.parameters())).times([p.data for p in parameters])
    assert np.array_equal(flat(scales.times([p.data for p in parameters])), flat(expected))


def test_gradients_of_zero_move_nothing() -> None:
    model = small()
    before = flat(model.parameters())
    optimizer = ScaledMomentum(model.parameters(), lr=0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert np.array_equal(flat(model.parameters()), before)
    noised(model, 0)
    optimizer.step()
    assert np.isfinite(flat(model.parameters())).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scales": "secret"}, "use 'private' or 'public'"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"floor": 0.0}, "floor=0.0"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScaledMomentum(small().parameters(), **given)


def private_step(
    optimizer_of: Callable[[nn.Module], ScaledMomentum], path: Any = "fast", **chosen: Any
) -> PrivateStep:
    model = models_zoo.build("gpt2 tied", dtype=torch.float32)
    options: dict[str, Any] = {"clip_norm": 0.5} | chosen
    plan = Plan.sample_users(
        num_users=12,
        expected_cohort_size=6,
        group_size=2,
        steps=4,
        noise_multiplier=1.0,
        delta=1e-2,
        **options,
    )
    return PrivateStep(
        model,
        optimizer_of(model),
        plan,
        UserIndex.from_owners([row // 2 for row in range(24)]),
        sequence_length=8,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(5),
    )


def take_steps(step: PrivateStep) -> list[Tensor]:
    ids = torch.randint(1, 23, (24, 8), generator=torch.Generator().manual_seed(2))
    for cohort in step.cohorts():
        step.apply({"input_ids": ids[rows], "labels": ids[rows]} for rows in cohort)
    return [p.detach().clone() for p in step.model.parameters()]


@pytest.mark.parametrize("source", ["private", "public"])
def test_both_paths_train_alike_and_cost_what_gradients_cost(source: Any) -> None:
    def made(model: nn.Module) -> ScaledMomentum:
        optimizer = ScaledMomentum(model.parameters(), lr=0.02, scales=source)
        if source == "public":
            optimizer.learn(public_gradients(model))
        return optimizer

    fast, plain = (private_step(made, path) for path in ("fast", "plain"))
    began = [p.detach().clone() for p in fast.model.parameters()]
    found, expected = take_steps(fast), take_steps(plain)
    moved = sum(float((a - b).square().sum()) for a, b in zip(found, began, strict=True)) ** 0.5
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True)) ** 0.5
    assert apart <= 1e-4 * moved
    adam = private_step(lambda model: torch.optim.Adam(model.parameters()))  # type: ignore[arg-type]
    take_steps(adam)
    assert fast.statement().epsilon == adam.statement().epsilon
    assert fast.plan.to_json() == adam.plan.to_json()


def test_the_model_is_probed_with_made_up_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step those of a run are all 1, with which a fault would not be seen."""
    from userdp.probe import checked_model

    seen: list[float] = []

    def watched(*_: Any, **__: Any) -> bool:
        scales = step.optimizer.scales_for(list(step.model.parameters()))  # type: ignore[attr-defined]
        seen.extend(float(scale.factors[0].std()) for scale in scales.scales)
        return True

    monkeypatch.setattr(checked_model, "check_model", watched)
    step = private_step(lambda model: ScaledMomentum(model.parameters()))
    step.check_model()
    assert min(seen) > 0.5
    scales = step.optimizer.scales_for(list(step.model.parameters()))  # type: ignore[attr-defined]
    assert all(bool((scale.factors[0] == 1).all()) for scale in scales.scales)


def test_noise_is_added_in_the_scaled_geometry() -> None:
    """With nobody in the cohort a step is noise alone, of one size for every coordinate."""
    seen: list[Tensor] = []

    def made(model: nn.Module) -> ScaledMomentum:
        optimizer = ScaledMomentum(model.parameters(), lr=1e-6, scales="public")
        optimizer.learn(public_gradients(model))
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        )
        return optimizer

    step = private_step(made)
    step.check_model()
    scales = step.optimizer.scales_for(list(step.model.parameters()))  # type: ignore[attr-defined]
    spread = torch.cat(
        [
            s.times(torch.ones_like(p)).flatten()
            for p, s in zip(scales.parameters, scales.scales, strict=True)
        ]
    )
    assert float(spread.max() / spread.min()) > 5
    for cohort in step.cohorts():
        step.apply({"input_ids": torch.zeros(0, 8, dtype=torch.long)} for _ in cohort)
    values = torch.stack(seen).double()
    expected = step.plan.noise_stddev / step.plan.divisor
    # 4 steps of 5,000 values each: their root mean square is within 3% (a chance below 1e-8).
    for part in (values[:, spread < spread.median()], values[:, spread >= spread.median()]):
        assert abs(float(part.square().mean().sqrt()) / expected - 1) < 0.03


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(InputError, match="no public gradients"):
        take_steps(private_step(lambda m: ScaledMomentum(m.parameters(), scales="public")))
    with pytest.raises(InputError, match="lacks trainable parameters"):
        private_step(lambda m: ScaledMomentum(list(m.parameters())[1:]))
    with pytest.raises(InputError, match="update is 'fedavg'"):
        private_step(
            lambda m: ScaledMomentum(m.parameters()), update=FedAvg(local_learning_rate=0.1)
        )
    with pytest.raises(InputError, match="floor=1e-30: give a finite number, 1e-06 or more"):
        ScaledMomentum(small().parameters(), floor=1e-30)
    optimizer = ScaledMomentum(small().parameters(), scales="public")
    with pytest.raises(InputError, match="no public gradients to learn from"):
        optimizer.learn([])
    optimizer.learn(public_gradients(small()))
    with pytest.raises(InputError, match="once, at most"):
        optimizer.learn(public_gradients(small()))


def test_gradients_of_zero_are_learnt_from_once_and_a_loaded_state_says_so() -> None:
    optimizer = ScaledMomentum(small().parameters(), scales="public")
    optimizer.learn([[torch.zeros_like(p) for p in small().parameters()]])
    loaded = ScaledMomentum(small().parameters(), scales="public")
    assert loaded.lacks_public
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not loaded.lacks_public
    assert learnt_before(loaded)


def test_a_loop_of_ones_own_says_that_scales_were_learnt_before() -> None:
    def learnt(model: nn.Module) -> ScaledMomentum:
        optimizer = ScaledMomentum(model.parameters(), scales="public")
        optimizer.learn(public_gradients(model))
        return optimizer

    assert LEARNT_BEFORE in private_step(learnt).statement().cautions
    step = private_step(lambda m: ScaledMomentum(m.parameters()))
    assert LEARNT_BEFORE not in step.statement().cautions


def test_every_setting_counts_where_a_run_goes_on() -> None:
    model = small()
    given: list[dict[str, Any]] = [
        {},
        {"scales": "public"},
        {"floor": 0.5},
        {"decay": 0.5},
        {"momentum": 0.5},
        {"weight_decay": 0.5},
        {"lr": 0.5},
    ]
    found = {optimizer_digest(ScaledMomentum(model.parameters(), **own)) for own in given}
    assert len(found) == len(given)


def test_a_step_without_gradients_moves_nothing() -> None:
    model = small()
    before = flat(model.parameters())
    ScaledMomentum(model.parameters()).step()
    assert np.array_equal(flat(model.parameters()), before)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> UserStore:
    out = tmp_path_factory.mktemp("public") / "public"
    write_store(sentences(users=4, records_per_user=2, seed=5, prefix="p"), out, key=KEY)
    return UserStore.open(out)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_training_takes_scales_from_public_records(
    base_model: Path, train_store: Path, tmp_path: Path, public: UserStore, weight: float
) -> None:
    def trained(out: Path | None = None, **options: Any) -> userdp.training.loop.Run:
        model, tokenizer = userdp.load_model(base_model)
        return userdp.train(
            model,
            tokenizer,
            UserStore.open(train_store),
            Plan.sample_users(
                num_users=20,
                expected_cohort_size=6,
                group_size=3,
                steps=3,
                noise_multiplier=1.0,
                delta=1e-2,
            ),
            optimizer="scaled",
            learning_rate=0.01,
            sequence_length=16,
            secret=RunSecret.fixed_for_tests(3),
            out=out,
            **options,
        )

    public_scales: dict[str, Any] = {"optimizer_options": {"scales": "public"}}
    with pytest.raises(InputError, match="no public gradients"):
        trained(**public_scales)
    data = PublicData(store=public, weight=weight, batch_size=4)
    if not weight:
        with pytest.raises(InputError, match="nothing uses the public records"):
            trained(public=data)
    whole = trained(tmp_path / "whole", public=data, **public_scales)
    assert (DECLARED if weight else LEARNT) in whole.statement.cautions

    class StoppedError(Exception):
        pass

    def stop(steps: int) -> None:
        if steps == 2:
            raise StoppedError

    saving = userdp.Saving(every_steps=1)
    with pytest.raises(StoppedError):
        trained(tmp_path / "b", public=data, saving=saving, on_step=stop, **public_scales)
    again = trained(tmp_path / "b", public=data, saving=saving, resume=True, **public_scales)
    for ours, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_command_trains_and_says_what_does_not_go_together(
    config_file: Callable[..., Path], tmp_path: Path, public: UserStore
) -> None:
    scaled = 'fixed_seed = 7\noptimizer = "scaled"\noptimizer_options = { scales = "public" }'
    data = f'public = "{public.path}"\npublic_weight = 0.0\npublic_batch_size = 4'
    for named, training, message in (
        ("", scaled, "scales = 'public' without [data] public"),
        (data, "", "nothing uses the public records"),
        (data, scaled + "\nshard = true", "shard = true"),
        ("", scaled.replace("scales", "scale"), "no option 'scale'"),
        ("", scaled.replace('"public"', '"secret"'), "'private' or 'public'"),
    ):
        file = config_file(data=named, training=training)
        refused = command("train", file, "--out", tmp_path / "refused")
        assert refused.err.count("\n") == 1, refused.err
        assert refused.code == 2
        assert message in refused.err
        assert not (tmp_path / "refused").exists()
    done = command("train", config_file(data=data, training=scaled), "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert answer("account", tmp_path / "run")["epsilon"] <= 8.0
