"""Ranks run a sharded model together, whatever each of them needs and whoever fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sharded_runs import LONGEST, Texts, make_model, run_ranks
from userdp import StepSettings
from userdp.clipping.fast import FastClipping
from userdp.clipping.local import LocalClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import FlatClip
from userdp.errors import InputError
from userdp.losses import causal_lm_loss
from userdp.updates.fedavg import FedAvg

CLIP = FlatClip(clip_norm=0.05)
LOCAL = FedAvg(local_learning_rate=0.1, local_batch_size=1)
BAD = 7
# Joined records would not all begin a row.
SMALL = StepSettings(check=False, microbatch_tokens=64, join_records=False)


def made(*, locally: bool = False) -> tuple[Any, Any, list[Any]]:
    """A sharded model, its passes and its trained parameters; whole ones if users train locally."""
    from userdp.ranks import Ranks
    from userdp.sharding.shard import passes_of, shard

    model = make_model(lora=True)
    shard(model, trained=not locally)
    passes = passes_of(model, Ranks.found())
    return model, passes, [p for p in model.parameters() if p.requires_grad]


def groups_of_users(*, bad: bool = False) -> list[dict[str, Tensor]]:
    texts = Texts.made_up()
    users: dict[str, list[int]] = {}
    for place, owner in enumerate(texts.owners):
        users.setdefault(owner, []).append(place)
    groups = [texts.batch(places[:3]) for places in users.values()]
    if bad:
        groups[4]["input_ids"][0, 0] = BAD
    else:
        for group in groups:
            group["input_ids"][group["input_ids"] == BAD] = BAD + 1
    return groups


def fails_on_bad(module: Any, args: Any, kwargs: Any) -> None:
    """The second block cannot run a row that begins with the bad token."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if bool((hidden[:, 0].abs().max(-1).values > 1e5).any()):
        raise RuntimeError("made to fail")


def clipped(
    model: Any, parameters: list[Any], groups: list[Any], *, locally: bool = False
) -> Tensor:
    if locally:
        plain = PlainClipping(model, parameters, record_loss=causal_lm_loss, update=LOCAL)
        local = LocalClipping(
            plain,
            model,
            parameters,
            LOCAL,
            record_loss=causal_lm_loss,
            settings=SMALL,
            sequence_length=LONGEST,
        )
        local.skip_failing = True
        return local.clipped_sum(groups, CLIP).total.values.clone()
    fast = FastClipping(
        model,
        parameters,
        CLIP,
        record_loss=causal_lm_loss,
        settings=SMALL,
        sequence_length=LONGEST,
        group_size=3,
    )
    fast.skip_failing = True
    return fast.clipped_sum(groups, CLIP).total.values.clone()


def leaves_the_order(module: Any, args: Any, kwargs: Any) -> None:
    """For such a row, the second block asks for its own weights once more, out of turn."""
    try:
        fails_on_bad(module, args, kwargs)
    except RuntimeError:
        module.reshard()
        module.unshard()


def sum_with_a_failing_user(unequal: bool, fault: Any, locally: bool) -> Tensor:
    """The sum over all ranks. One rank has a user whose pass meets a fault in the second block.

    If `unequal`, the first rank has all users.
    """
    from torch import distributed as dist

    model, passes, parameters = made(locally=locally)
    embedding, blocks = _parts(model)
    embedding.register_forward_hook(_blow_up)
    blocks[1].register_forward_pre_hook(fault, with_kwargs=True)
    rank, count = dist.get_rank(), dist.get_world_size()
    groups = groups_of_users(bad=True)
    own = (groups if rank == 0 else []) if unequal else groups[rank::count]
    total = clipped(model, parameters, own, locally=locally)
    passes.finish()
    dist.all_reduce(total)
    # The passes after the failure are those of a sound model.
    again = clipped(model, parameters, groups[:2] if rank else [], locally=locally)
    passes.finish()
    assert bool(torch.isfinite(again).all())
    return total


def _parts(model: Any) -> tuple[Any, Any]:
    inner = model.base_model.model.model
    return inner.embed_tokens, inner.layers


def _blow_up(module: Any, args: Any, output: Tensor) -> Tensor:
    (ids,) = args
    return torch.where(
        (ids == BAD)[..., None] & (torch.arange(ids.shape[1]) == 0)[:, None], 1e6, output
    )


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [True, False])
@pytest.mark.parametrize("fault", [fails_on_bad, leaves_the_order])
@pytest.mark.parametrize("locally", [True, False])
def test_a_user_whose_pass_fails_counts_as_zero_and_nobody_waits(
    unequal: bool, fault: Any, locally: bool
) -> None:
    model = make_model(lora=True)
    embedding, _ = _parts(model)
    embedding.register_forward_hook(_blow_up)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = groups_of_users(bad=True)
    readable = [g for g in groups if not bool((g["input_ids"][:, 0] == BAD).any())]
    assert len(readable) < len(groups)
    update = LOCAL if locally else None
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss, update=update)
    expected = plain.clipped_sum(readable, CLIP).total.values
    for found in run_ranks(2, sum_with_a_failing_user, unequal, fault, locally):
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def one_user_in_many_microbatches(rank_of_user: int) -> float:
    """How far a user with 64 rows moves the sum of all ranks, in clip norms (fault 6)."""
    from torch import distributed as dist

    model, passes, parameters = made()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (64, 8), generator=draw)
    user = {"input_ids": ids, "labels": ids}
    others = groups_of_users()
    rank, count = dist.get_rank(), dist.get_world_size()
    sums: list[Tensor] = []
    for takes_part in (True, False):
        own = others[rank::count]
        if takes_part and rank == rank_of_user:
            own = [*own, user]
        # 64 tokens a pass are 8 rows: 8 microbatches.
        total = clipped(model, parameters, own)
        passes.finish()
        dist.all_reduce(total)
        sums.append(total)
    return float((sums[0] - sums[1]).double().norm()) / CLIP.clip_norm


@pytest.mark.slow
def test_a_user_in_eight_microbatches_on_four_ranks_moves_the_sum_by_one_clip_norm() -> None:
    moved = run_ranks(4, one_user_in_many_microbatches, 2)
    assert max(moved) <= 1 + 1e-5
    # The user is clipped, so the test can fail.
    assert min(moved) > 0.99


def _shard_otherwise(model: Any, *, mp_policy: Any = None, split: bool = False) -> None:
    """Divide a model in a way that cannot be trained: rounded, or within the first rank alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(
        "cpu", (2, 1) if split else (2,), mesh_dim_names=("a", "b")[: 1 + split]
    )
    own = mesh["b"] if split else mesh
    for module in (*model.base_model.model.model.layers, model):
        fully_shard(module, mesh=own, mp_policy=mp_policy or MixedPrecisionPolicy())


def refusals() -> list[str]:
    """What a sharded model is refused for."""
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from userdp import Plan, PrivateStep, UserIndex
    from userdp.ranks import Ranks
    from userdp.sharding.shard import check_backend, passes_of, shard

    found: list[str] = []
    with pytest.raises(InputError) as error:
        shard(nn.Linear(4, 4))
    found.append(str(error.value))
    check_backend("cpu")
    with pytest.raises(InputError) as error:
        check_backend("cuda")
    found.append(str(error.value))
    faults: list[dict[str, Any]] = [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"split": True},
    ]
    for fault in faults:
        other = make_model(lora=True)
        _shard_otherwise(other, **fault)
        with pytest.raises(InputError) as error:
            passes_of(other, Ranks.found())
        found.append(str(error.value))
    model, _, parameters = made()
    plan = Plan.sample_users(
        num_users=4, expected_cohort_size=2, group_size=1, steps=2, epsilon=20.0, delta=1e-2
    )
    index = UserIndex.from_owners(["a", "b", "c", "d"])

    def step(optimizer: Any, plan: Plan = plan, **options: Any) -> None:
        with pytest.raises(InputError) as refused:
            PrivateStep(model, optimizer(parameters, lr=1e-2), plan, index, **options)
        found.append(str(refused.value))

    step(torch.optim.Adafactor)
    step(torch.optim.SGD, record_loss=lambda model, batch: causal_lm_loss(model, batch))
    step(torch.optim.SGD, settings=StepSettings(compile_blocks=True))
    step(torch.optim.SGD, replace(plan, clip=CLIP, update=FedAvg(local_learning_rate=0.1)))
    return found


@pytest.mark.slow
def test_what_ranks_cannot_do_together_is_refused() -> None:
    found = run_ranks(2, refusals)[0]
    for words, message in zip(
        [
            "proven by tests",
            "over gloo",
            "MixedPrecisionPolicy",
            "only rows over all ranks",
            "Adafactor",
            "causal_lm_loss alone",
            "compile_blocks",
            "shard(model, trained=False)",
        ],
        found,
        strict=True,
    ):
        assert words in message
