"""What several ranks train with shards: small models, users, steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ranks_runner import answers
from userdp import Plan, PrivateStep, StepSettings, UserIndex
from userdp.clipping.rules import FlatClip
from userdp.noise.banded import Banded
from userdp.sampling import CyclicPoissonUsers
from userdp.streams import RunSecret
from userdp.units import Adjacency

VOCABULARY = 37
LONGEST = 20
Value = TypeVar("Value")


def run_ranks(count: int, work: Callable[..., Value], *given: Any) -> list[Value]:
    """What `work(*given)` returns on each of `count` ranks, in processes of their own."""
    return answers(count, lambda rank: work(*given))


def make_model(*, lora: bool, base_dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama of two blocks with a tied head; its uneven sizes leave uneven shards."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=25,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(base_dtype)
    if lora:
        targets = ["q_proj", "v_proj", "down_proj"]
        adapter = LoraConfig(r=3, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, adapter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model.eval()


def shard_as_others_do(model: Any, *, with_adapters: bool) -> None:
    """Divide a model as its owner might, with torch's defaults."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = {p for p in model.parameters() if p.requires_grad and not with_adapters}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*model.base_model.model.model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=whole)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of token ids, and who owns each."""

    rows: list[Tensor]
    owners: list[str]

    @staticmethod
    def made_up(users: int = 12, most_rows: int = 4) -> Texts:
        draw = torch.Generator().manual_seed(5)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=draw))

        rows: list[Tensor] = []
        owners: list[str] = []
        for user in range(users):
            for _ in range(number(1, most_rows + 1)):
                length = number(3, LONGEST)
                rows.append(torch.randint(0, VOCABULARY, (length,), generator=draw))
                owners.append(f"u{user}")
        return Texts(rows=rows, owners=owners)

    def batch(self, places: list[int]) -> dict[str, Tensor]:
        some = [self.rows[place] for place in places] or [torch.zeros(1, dtype=torch.int64)]
        keep = slice(0, len(places))
        return {
            "input_ids": pad_sequence(some, batch_first=True)[keep],
            "labels": pad_sequence(some, batch_first=True, padding_value=-100)[keep],
        }


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how."""

    lora: bool = True
    steps: int = 20
    # By whom the model is divided: by us, by its owner, by its owner but for the adapters, or not.
    sharded: Literal["ours", "theirs", "base", ""] = "ours"
    base_dtype: torch.dtype = torch.float32
    settings: StepSettings = field(default_factory=StepSettings)
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    strategy: str | None = None
    optimizer: str = "AdamW"

    def make_plan(self) -> Plan:
        given = {"epsilon": 20.0, "delta": 1e-2, "clip": FlatClip(clip_norm=0.5), **self.plan}
        if self.strategy is None:
            return Plan.sample_users(
                num_users=12, expected_cohort_size=6, group_size=3, steps=self.steps, **given
            )
        return Plan(
            sampler=CyclicPoissonUsers(user_sampling_prob=0.9, parts=3, group_size=3),
            clip=given["clip"],
            noise=Banded(
                noise_multiplier=1.0,
                bands=3,
                steps=self.steps,
                strategy=self.strategy,  # type: ignore[arg-type]
            ),
            steps=self.steps,
            divisor=4.0,
            num_users=12,
            delta=1e-2,
            adjacency=Adjacency.ZERO_OUT,
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has at the end; `pieces` are the shapes of what it held of each weight."""

    weights: dict[str, Tensor]
    pieces: list[tuple[int, ...]]
    num_steps: int
    final_digest: str


def trained(training: Training) -> Trained:
    """Train on this rank, alone or together with the others."""
    from userdp.sharded_tensors import local_of, whole_of
    from userdp.sharding.shard import divides_trained, shard

    model = make_model(lora=training.lora, base_dtype=training.base_dtype)
    if training.sharded == "ours":
        shard(model, trained=divides_trained(model, training.make_plan()))
    elif training.sharded and torch.distributed.is_initialized():
        shard_as_others_do(model, with_adapters=training.sharded == "theirs")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = getattr(torch.optim, training.optimizer)(named.values(), lr=1e-2)
    texts = Texts.made_up()
    step = PrivateStep(
        model,
        optimizer,
        training.make_plan(),
        UserIndex.from_owners(texts.owners),
        sequence_length=LONGEST,
        settings=training.settings,
        secret=RunSecret.fixed_for_tests(3),
    )
    for cohort in step.cohorts():
        step.apply([texts.batch(rows.tolist()) for rows in cohort])
    weights = {name: whole_of(p.detach()).clone() for name, p in named.items()}
    pieces = [tuple(local_of(p).shape) for p in named.values()]
    num_steps = step.ledger.steps
    step.finish()
    end = step.ledger.end
    assert end is not None
    return Trained(
        weights=weights,
        pieces=pieces,
        num_steps=num_steps,
        final_digest=end["digests"]["final_weights"],
    )


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a weight from what it should be, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - weight).norm() / weight.norm()) for name, weight in expected.items()
    )
