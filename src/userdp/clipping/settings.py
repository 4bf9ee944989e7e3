"""How a clipped sum is computed: all settings in one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from userdp.errors import InputError

PathName = Literal["fast", "plain"]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step computes its clipped sum. Every choice gives the same sum, up to rounding.

    None leaves the choice to the device.

    `path`: "fast" computes many users in one backward pass; "plain" computes one user at a time.
    `microbatch_tokens`: padded tokens in one backward pass (fast).
    `microbatch_records`: records in one backward pass (plain).
    `compute_dtype`: the dtype that products are computed in; the weights keep their own.
    `compile_blocks`: compile the model's blocks; on CUDA also capture each batch shape (fast).
    `merge_lora`: form W + s B A first and compute with it: faster, but rounded differently (fast).
    `checkpoint_blocks`: keep only the input of every block and run the block again in the backward
    pass: less memory, more time (fast).
    `chunk_logits`: compute logits piece by piece, so that memory does not grow with the vocabulary;
    None does so where they are large (fast).
    `mix_sizes`: users of different sizes share batches, so that there are few batch shapes, which
    captured steps need; otherwise users of similar size share a batch (fast).
    `join_records`: put several records of a user into one row; None does so only for users for whom
    it saves much (fast).
    `deterministic`: on CUDA, sums that come out the same every time, to the last bit; slower.
    `shard`: divide the model over the ranks (`train` alone; docs/sharding.md). Not in the words of
    the settings, which noise is bound to: the noise is the same with and without.
    `check`: compare the fast path with the plain loop on made-up values before its sums count.
    """

    path: PathName = "fast"
    microbatch_tokens: int | None = None
    microbatch_records: int | None = None
    compute_dtype: torch.dtype | None = None
    compile_blocks: bool | None = None
    merge_lora: bool = False
    checkpoint_blocks: bool = False
    chunk_logits: bool | None = None
    mix_sizes: bool | None = None
    join_records: bool | None = None
    deterministic: bool = False
    check: bool = True
    shard: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("microbatch_tokens", "microbatch_records"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InputError(
                    f"{name}={size}: use 1 or more, or None for a size that is chosen here."
                )

    @property
    def checks_model(self) -> bool:
        """Whether the model is probed before its first step."""
        return self.path == "plain" or self.check
