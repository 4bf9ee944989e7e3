"""Rows 8 and 19 of the fault table: users coupled by model or loss, records of several owners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import models_zoo
from userdp.data.record import Record
from userdp.data.store import UserStore
from userdp.errors import InputError, MixedExamplesError
from userdp.index import UserIndex
from userdp.plan import Plan
from userdp.step import PrivateStep
from userdp.training.loop import train


def plan(*, users: int, steps: int = 1) -> Plan:
    return Plan.sample_users(
        num_users=users,
        expected_cohort_size=users,
        group_size=4,
        steps=steps,
        clip_norm=float("inf"),
        noise_multiplier=0.0,
        delta=1e-3,
        non_private=True,
    )


def movement(architecture: str, owners: list[int], batch: dict[str, Tensor]) -> list[Tensor]:
    """What one step without clipping and noise adds to the weights, undivided."""
    model = models_zoo.build(architecture, torch.float64)
    chosen = plan(users=32)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    step = PrivateStep(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        chosen,
        UserIndex.from_owners(owners),
    )
    for cohort in step.cohorts():
        step.apply({name: values[rows] for name, values in batch.items()} for rows in cohort)
    after = [p.detach() for p in model.parameters() if p.requires_grad]
    return [(b - a) * chosen.divisor for a, b in zip(after, before, strict=True)]


@pytest.mark.parametrize("architecture", ["gpt2 tied", "llama", "lstm tied", "llama tied + lora"])
def test_row_8_user_alone_or_with_31_others_has_the_same_gradient(architecture: str) -> None:
    lengths = [3 + (7 * record) % 9 for record in range(64)]
    batch = models_zoo.ragged_batch(lengths, seed=8)
    owners = [record // 2 for record in range(64)]
    everyone = movement(architecture, owners, batch)
    alone = movement(architecture, owners[:2], {n: v[:2] for n, v in batch.items()})
    others = movement(architecture, owners[2:], {n: v[2:] for n, v in batch.items()})
    for total, user, rest in zip(everyone, alone, others, strict=True):
        torch.testing.assert_close(total - rest, user, rtol=1e-6, atol=1e-6)


def step_with(model: nn.Module, **options: object) -> PrivateStep:
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan(users=4),
        UserIndex.from_owners(range(4)),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.BatchNorm2d(3), nn.LazyBatchNorm1d()]
)
def test_row_8_batch_norm_is_refused_and_named(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer))
    with pytest.raises(MixedExamplesError, match=r"BatchNorm\w* at '1.0'.*LayerNorm"):
        step_with(model)


def test_row_8_instance_norm_that_tracks_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True))
    with pytest.raises(MixedExamplesError, match="track_running_stats"):
        step_with(model)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        transformers.Qwen2MoeConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
        ),
    ],
    ids=["mixtral", "qwen2 moe"],
)
def test_row_8_mixture_of_experts_is_refused(config: transformers.PretrainedConfig) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(MixedExamplesError, match="mixture of experts"):
        step_with(model)


def test_row_8_batch_mean_loss_is_refused_without_a_charge() -> None:
    step = step_with(
        nn.Linear(3, 1),
        record_loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    )
    cohort = step.draw()
    with pytest.raises(MixedExamplesError, match="one value per record"):
        step.apply([{"x": torch.randn(2, 3)} for _ in cohort])
    assert step.ledger.steps == 0


class Remembers(nn.Module):
    """Keeps a running mean of what it saw, in one of the ways people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.how = how
        if how == "frozen parameter":
            self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)
        else:
            self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "replaced":
                self.seen = 0.9 * self.seen + 0.1 * x.mean(dim=0)
            else:
                self.seen.mul_(0.9).add_(0.1 * x.mean(dim=0))
        return self.linear(x)[:, 0]


@pytest.mark.parametrize("how", ["in place", "replaced", "frozen parameter"])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_row_8_module_that_writes_what_it_saw_is_refused(how: str, groups: int) -> None:
    model = Remembers(how)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan(users=4),
        UserIndex.from_owners(range(groups)),
        record_loss=lambda model, batch: model(batch["x"]) ** 2,
    )
    cohort = step.draw()
    assert len(cohort) == groups
    with pytest.raises(MixedExamplesError, match="'seen'"):
        step.apply([{"x": torch.randn(1, 3)} for _ in cohort])
    assert step.ledger.steps == 0


def test_row_8_buffers_that_only_stand_there_are_fine() -> None:
    model = Remembers("in place")
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan(users=4),
        UserIndex.from_owners(range(4)),
        record_loss=lambda model, batch: model.linear(batch["x"])[:, 0] ** 2,
    )
    cohort = step.draw()
    step.apply([{"x": torch.randn(1, 3)} for _ in cohort])
    assert step.ledger.steps == 1


def test_row_19_records_of_several_owners_are_refused(
    make_store: Callable[[list[Record]], UserStore], tmp_path: Path
) -> None:
    store = make_store(
        [
            Record("w1 w2 w3", ("a",), "line 1"),
            Record("w1 w4 w3", ("a", "b", "c"), "line 2"),
            Record("w5 w6", ("b",), "line 3"),
        ]
    )
    assert store.users_per_record().tolist() == [1, 3, 1]
    with pytest.raises(InputError, match="several owners"):
        train(
            models_zoo.gpt2(),
            models_zoo.word_tokenizer(),
            store,
            plan(users=4),
            sequence_length=16,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
