"""Whole weights stand in for shards while users train: they are gathered, then freed again."""

from __future__ import annotations

import torch
from torch import Tensor

from sharded_runs import make_model, run_ranks


def seen_of_copies() -> dict[str, object]:
    """What a rank sees of its model before, while and after the copies are in place."""
    from userdp.ranks import Ranks
    from userdp.sharded_tensors import is_divided, is_shard, local_of
    from userdp.sharding.copies import copies_of
    from userdp.sharding.shard import shard

    ids = torch.arange(6)[None]
    model = make_model(lora=False)
    expected = model(input_ids=ids).logits.detach()
    shard(model, ranks=Ranks.found())
    shards = [local_of(p.detach()).clone() for p in model.parameters()]
    copies = copies_of(model)
    assert copies is not None
    parameters: list[Tensor] = list(model.parameters())
    whole = copies.of(parameters)
    with copies.in_place():
        found = model(input_ids=ids).logits.detach()
        inside = [a is b for a, b in zip(model.parameters(), whole, strict=True)]
        is_noted = is_divided(model)
        # As local training would leave them, if it broke off.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    return {
        "logits": torch.equal(found, expected),
        "whole inside": all(inside),
        "noted": is_noted,
        "shards again": all(map(is_shard, model.parameters())),
        "unchanged": all(
            torch.equal(local_of(p.detach()), before)
            for p, before in zip(model.parameters(), shards, strict=True)
        ),
        "freed": all(copy.untyped_storage().nbytes() == 0 for copy in whole),
    }


def test_whole_weights_are_those_of_one_process_and_leave_nothing_behind() -> None:
    for seen in run_ranks(2, seen_of_copies):
        assert seen == dict.fromkeys(seen, True)
