"""Optimizers by name, against torch's own; schedules, against those of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import models_zoo
from userdp.config.file import load_config
from userdp.digests.of_runs import optimizer_digest
from userdp.errors import InputError
from userdp.models.checks import check_optimizer
from userdp.names.optimizers import OPTIMIZERS, UNUSABLE
from userdp.optimizers.by_name import make_optimizer, make_schedule, optimizer_of, schedule_of
from userdp.optimizers.muon import MuonAndAdamW

STEPS = 12


def test_every_optimizer_of_torch_has_a_name_or_a_reason() -> None:
    found = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert found - {"optimizer"} == OPTIMIZERS.keys() | UNUSABLE.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizer_over_the_trainable_parameters(name: str) -> None:
    model = models_zoo.build("gpt2 + lora")
    optimizer = make_optimizer(model, name, 0.25)
    if name != "muon":
        assert type(optimizer) is getattr(torch.optim, OPTIMIZERS[name])
    trained = [p for p in model.parameters() if p.requires_grad]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, trained))
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}
    check_optimizer(optimizer, trained)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lbfgs", {}, "several times in a step"),
        ("sparseadam", {}, "sparse gradients"),
        ("adamm", {}, "did you mean 'adam"),
        ("adam", {"options": {"momentum": 0.9}}, "no option 'momentum'"),
        ("adam", {"options": {"beta": [0.9, 0.9]}}, "did you mean 'betas'"),
        ("adam", {"options": {"betas": [0.9, 2.0]}}, "Invalid beta parameter"),
        ("adam", {"options": {"maximize": True}}, "no option 'maximize'"),
        ("rprop", {"weight_decay": 0.1}, "no weight_decay"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_optimizer(models_zoo.build("gpt2 + lora"), name, 0.1, **settings)


def test_options_and_weight_decay_reach_the_optimizer() -> None:
    model = models_zoo.build("gpt2 + lora")
    options = {"betas": [0.8, 0.95], "eps": 1e-6}
    optimizer = make_optimizer(model, "adam", 0.1, weight_decay=0.5, options=options)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 0.5)
    assert make_optimizer(model, "adamw", 0.1).param_groups[0]["weight_decay"] == 0.01


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_muon_is_two_optimizers_side_by_side() -> None:
    ours = models_zoo.gpt2().float()
    theirs = copy.deepcopy(ours)
    optimizer = make_optimizer(ours, "muon", 0.01, weight_decay=0.1)
    schedule = make_schedule(optimizer, "linear", 4)
    assert schedule is not None
    # The rule written out for GPT-2: the matrices inside the blocks.
    inner = {n for n, p in theirs.named_parameters() if ".h." in n and p.ndim == 2}
    matrices = [p for n, p in theirs.named_parameters() if n in inner]
    others = [p for n, p in theirs.named_parameters() if n not in inner]
    assert matrices
    assert others
    for step in range(4):
        gradients(ours, step)
        optimizer.step()
        schedule.step()
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(4):
        gradients(theirs, step)
        for part in (muon, adamw):
            part.param_groups[0]["lr"] = 0.01 * (4 - step) / 4
            part.step()
    assert same_weights(ours, theirs)


def test_muon_goes_on_from_its_state() -> None:
    whole = models_zoo.gpt2().float()
    halves = copy.deepcopy(whole)
    optimizer = make_optimizer(whole, "muon", 0.01)
    for step in range(4):
        gradients(whole, step)
        optimizer.step()
    state: dict[str, Any] = {}
    for steps in ((0, 1), (2, 3)):
        part = make_optimizer(halves, "muon", 0.01)
        if state:
            part.load_state_dict(state)
        for step in steps:
            gradients(halves, step)
            part.step()
        state = copy.deepcopy(part.state_dict())
    assert same_weights(whole, halves)
    other = make_optimizer(halves, "muon", 0.01, options={"momentum": 0.9})
    assert optimizer_digest(other) != optimizer_digest(make_optimizer(halves, "muon", 0.01))


def test_muon_needs_a_matrix_and_nothing_else() -> None:
    only_bias = nn.Linear(2, 2)
    only_bias.weight.requires_grad = False
    with pytest.raises(InputError, match="this model trains none"):
        make_optimizer(only_bias, "muon", 0.1)
    only_matrix = make_optimizer(nn.Linear(2, 2, bias=False), "muon", 0.1)
    assert isinstance(only_matrix, MuonAndAdamW)
    assert len(only_matrix.param_groups) == 1


def rates(make: Callable[[torch.optim.Optimizer], Any], steps: int = STEPS) -> list[float]:
    """The rate of each step under a schedule, for a full rate of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    found: list[float] = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers_without_their_step_at_rate_zero(
    name: str, warmup_steps: int
) -> None:
    if name == "constant" and not warmup_steps:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        assert make_schedule(optimizer, name, STEPS) is None
        return
    ours = rates(lambda o: make_schedule(o, name, STEPS, warmup_steps=warmup_steps))
    make = {
        "constant": transformers.get_constant_schedule_with_warmup,
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
    }[name]
    # Theirs begins at zero: their run of one step more is ours from its second step on.
    length = {} if name == "constant" else {"num_training_steps": STEPS + 1}
    theirs = rates(lambda o: make(o, warmup_steps + 1, **length), STEPS + 1)
    assert theirs[0] == 0
    assert ours == pytest.approx(theirs[1:])
    assert min(ours) > 0
    if not warmup_steps:
        length = {"num_training_steps": STEPS}
        assert ours == pytest.approx(rates(lambda o: make(o, 0, **length)))


def test_a_held_schedule_stays_for_its_share_and_then_falls() -> None:
    found = rates(lambda o: make_schedule(o, "linear", 8, hold=0.5), 8)
    assert found == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    both = rates(lambda o: make_schedule(o, "linear", 8, hold=0.5, warmup_steps=1), 8)
    assert both == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("linear", {"warmup_steps": 8}, "fewer than there are"),
        ("linear", {"warmup_steps": -1}, "fewer than there are"),
        ("cosine", {"hold": 1.0}, "up to below 1"),
        ("constant", {"hold": 0.5}, "has no meaning"),
    ],
)
def test_schedules_without_sense_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(InputError, match=message):
        make_schedule(optimizer, name, 8, **settings)


def test_configuration_names_them_all(config_file: Callable[..., Path]) -> None:
    path = config_file(
        training='optimizer = "adam"\nschedule = "cosine"\nwarmup_steps = 1\nweight_decay = 0.25\n'
        "ema = 0.5\noptimizer_options = {betas = [0.8, 0.9]}"
    )
    settings = load_config(path).training
    optimizer = optimizer_of(models_zoo.build("gpt2 + lora"), settings)
    assert isinstance(optimizer, torch.optim.Adam)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.25)
    assert schedule_of(optimizer, settings) is not None
    assert settings.ema == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('optimizer = "lbfgs"', "each would have to be paid for"),
        ('optimizer = "adamv"', "did you mean"),
        ("ema = 1.0", "training.ema"),
        ("warmup_steps = -1", "training.warmup_steps"),
    ],
)
def test_configuration_is_refused_before_torch_is_needed(
    config_file: Callable[..., Path], line: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_config(config_file(training=line))
    assert "\n" not in str(caught.value)
