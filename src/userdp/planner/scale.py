"""What a step takes on 1 to 1,024 GPUs: seconds and memory, from measured rates and public numbers.

The model, in seconds of one step on n GPUs:

    compute        most tokens of a rank x arithmetic of a token / (matrix rate x share reached)
    communication  all-reduce of the clipped sum in a ring: 2 (n - 1) / n x 4 bytes x trained
                   weights / bandwidth. Sharded weights are gathered in every pass, forwards and
                   backwards, while the layer before is computed: the longer of the two counts. The
                   sum is then reduced into shards, half of an all-reduce.
    update         noise, optimizer, dividing and clearing, for every trained weight of a rank

What is assumed:

- A rank takes whole users, all with the group size and length of the plan. So the rank with most
  users decides, ceil(M / n) of them, and more GPUs than users help nobody.
- Arithmetic of a token: 4 a weight that is used (forwards, and backwards to the layer below), 2
  more if it is trained, 6 x layers x width x length for attention. Checkpointed blocks run forwards
  once more. The share of the matrix rate is the same for all batches; small ones reach less.
- The reduction waits for the last user of a step, and hides behind nothing.
- Bandwidth is that of a node up to `node_size` GPUs, and that between nodes beyond.
- Memory of a GPU: weights; for every trained weight the sum, Adam's two moments, and the stored
  gradients of the users in a batch; activations by token, layer and width.
- Records are read, tokenised and packed meanwhile.

Rates and bytes of an H200 were measured here (docs/measurements.md). Bandwidths were not: those
below are what vendors state, less a fifth. Public: everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from userdp.errors import InputError

MOST_GPUS = 1_024
ABOUT_AS_FAST = 1.02
# Share of the memory that stored gradients may take (`clipping.batches.limits`).
STORED_SHARE = 0.3
Layout = Literal["replicated", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and what connects it. Rates a second; `share` of the matrix rate is what steps reach.

    `activation_bytes` are kept for a token in each unit of a layer's width, with weights of 2 and
    of 4 bytes.
    """

    name: str = "NVIDIA H200"
    matrix_flops: float = 773e12
    share: float = 0.67
    memory_bytes: float = 139 * 2**30
    node_size: int = 8
    node_bandwidth: float = 360e9
    network_bandwidth: float = 40e9
    latency: float = 2e-5
    batch_tokens: int = 16_384
    activation_bytes: tuple[float, float] = (37.5, 40.0)
    update_seconds: float = 2.4e-11
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            numbers = value if isinstance(value, tuple | list) else [value]
            if any(isinstance(one, float | int) and not one > 0 for one in numbers):
                raise InputError(f"machine: {name}={value}: give a number above 0.")

    def bandwidth(self, gpus: int) -> float:
        """Bytes a second that each GPU sends in a ring of this many."""
        return self.node_bandwidth if gpus <= self.node_size else self.network_bandwidth


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a language model, and what of it is trained; `rank` 0 trains all weights."""

    name: str
    layers: int
    width: int
    inner: int
    words: int
    key_width: int
    tied: bool
    rank: int = 16

    @property
    def matrices(self) -> int:
        """Weights in the products of all layers."""
        attention = 2 * self.width * self.width + 2 * self.width * self.key_width
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def weights(self) -> int:
        """All weights, adapters aside."""
        return self.matrices + self.words * self.width * (1 if self.tied else 2)

    @property
    def trained(self) -> int:
        """The weights that are trained."""
        if not self.rank:
            return self.weights
        square, key, mlp = self.width + self.width, self.width + self.key_width, 3 * self.inner
        return self.layers * self.rank * (2 * square + 2 * key + mlp + 3 * self.width)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight: half precision where it is frozen."""
        return 2 if self.rank else 4

    def flops_a_token(self, length: int, *, checkpointed: bool = False) -> float:
        """Arithmetic of a token in a record of this length."""
        # The embedding's rows are looked up, which costs nothing; the output layer is a product.
        used = self.matrices + self.words * self.width + (self.trained if self.rank else 0)
        trained = self.trained if self.rank else used
        again = 2 * used if checkpointed else 0
        return 4.0 * used + 2.0 * trained + again + 6.0 * self.layers * self.width * length


MODELS = {
    "gpt2": Model(
        name="gpt2", layers=12, width=768, inner=2048, words=50_257, key_width=768, tied=True
    ),
    "llama-1b": Model(
        name="llama-1b", layers=16, width=2048, inner=8192, words=128_256, key_width=512, tied=True
    ),
    "llama-3b": Model(
        name="llama-3b", layers=28, width=3072, inner=8192, words=128_256, key_width=1024, tied=True
    ),
    "llama-8b": Model(
        name="llama-8b",
        layers=32,
        width=4096,
        inner=14_336,
        words=128_256,
        key_width=1024,
        tied=False,
    ),
    "llama-70b": Model(
        name="llama-70b",
        layers=80,
        width=8192,
        inner=28_672,
        words=128_256,
        key_width=1024,
        tied=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes: so many users, each with so many records of so many tokens."""

    cohort_size: int
    group_size: int
    length: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One number of GPUs: the layout that fits and is fastest, its seconds and its memory."""

    gpus: int
    layout: Layout
    checkpointed: bool
    fits: bool
    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    memory_bytes: float
    tokens_a_second: float
    hours: float
    efficiency: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.compute_seconds + self.communication_seconds + self.update_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {
            "step_seconds": self.step_seconds,
            "gpu_hours": self.gpus * self.hours,
            "memory_gib": self.memory_bytes / 2**30,
        }


def all_reduce_seconds(machine: Machine, gpus: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring: each part passes every GPU twice."""
    if gpus == 1:
        return 0.0
    around = 2 * (gpus - 1)
    return around / gpus * size / machine.bandwidth(gpus) + around * machine.latency


def gpu_counts(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which is always there.

    >>> gpu_counts(12)
    [1, 2, 4, 8, 12]
    """
    if not 1 <= most <= MOST_GPUS:
        raise InputError(f"--gpus {most}: the model of scale knows 1 to {MOST_GPUS:,} GPUs.")
    return sorted({2**power for power in range(most.bit_length())} | {most})


def predict(machine: Machine, model: Model, work: Work, gpus: int) -> Prediction:
    """The fastest way that fits; if none does, the one that needs least memory.

    Of ways that are about as fast, the simplest: replicated before sharded, without checkpoints.
    """
    ways: list[tuple[Layout, bool]] = [
        (layout, checkpointed)
        for layout in ("replicated", "sharded")
        if layout == "replicated" or gpus > 1
        for checkpointed in (False, True)
    ]
    found = [_of_way(machine, model, work, gpus, *way) for way in ways]
    fitting = [one for one in found if one.fits]
    if fitting:
        fastest = min(one.step_seconds for one in fitting)
        return next(one for one in fitting if one.step_seconds <= ABOUT_AS_FAST * fastest)
    return min(found, key=lambda one: one.memory_bytes)


def _of_way(
    machine: Machine, model: Model, work: Work, gpus: int, layout: Layout, checkpointed: bool
) -> Prediction:
    tokens = work.cohort_size * work.group_size * work.length
    # Whole users: the rank with most of them decides.
    own_users = math.ceil(work.cohort_size / gpus)
    own_tokens = own_users * work.group_size * work.length
    shards = gpus if layout == "sharded" else 1
    flops = model.flops_a_token(work.length, checkpointed=checkpointed)
    compute = own_tokens * flops / (machine.matrix_flops * machine.share)
    reduced = all_reduce_seconds(machine, gpus, 4.0 * model.trained)
    if shards > 1:
        passes = math.ceil(own_tokens / machine.batch_tokens) * (3 if checkpointed else 2)
        # Products are computed in half precision, so that is what is sent.
        gathered = passes * all_reduce_seconds(machine, gpus, 2.0 * model.weights) / 2
        compute = max(compute, gathered)
        reduced /= 2
    update = machine.update_seconds * model.trained / shards
    memory = _memory(machine, model, work, own_users, shards, checkpointed)
    step = compute + reduced + update
    # On one GPU that had the memory.
    alone = tokens * model.flops_a_token(work.length) / (machine.matrix_flops * machine.share)
    alone += machine.update_seconds * model.trained
    return Prediction(
        gpus=gpus,
        layout=layout,
        checkpointed=checkpointed,
        fits=memory <= machine.memory_bytes,
        compute_seconds=compute,
        communication_seconds=reduced,
        update_seconds=update,
        memory_bytes=memory,
        tokens_a_second=tokens / step,
        hours=(work.steps * step + machine.start_seconds) / 3600,
        efficiency=alone / (gpus * step),
    )


def _memory(
    machine: Machine, model: Model, work: Work, own_users: int, shards: int, checkpointed: bool
) -> float:
    """Bytes of a GPU."""
    user_tokens = work.group_size * work.length
    # A user larger than a batch runs in pieces, alone.
    in_batch = max(1, min(own_users, machine.batch_tokens // user_tokens))
    tokens = min(machine.batch_tokens, in_batch * user_tokens)
    # Many users' gradients are not all stored at once; those of short users not at all.
    in_batch = min(in_batch, max(2, int(STORED_SHARE * machine.memory_bytes / 2 / model.trained)))
    whole = model.weights * model.weight_bytes / shards
    adapters = 4.0 * model.trained / shards if model.rank else 0.0
    state = (4 + 8) * model.trained / shards
    stored = 2.0 * model.trained * in_batch
    bytes_kept = machine.activation_bytes[0 if model.rank else 1]
    layers = 1 + 2 * model.layers / bytes_kept if checkpointed else model.layers
    activations = tokens * model.width * bytes_kept * layers
    # While a layer is computed its weights are whole, and so are the next one's.
    gathered = 2 * 2.0 * model.matrices / model.layers if shards > 1 else 0.0
    return whole + adapters + state + stored + activations + gathered


def predictions(machine: Machine, model: Model, work: Work, most: int) -> Sequence[Prediction]:
    """A prediction for each number of GPUs up to `most`."""
    return [predict(machine, model, work, gpus) for gpus in gpu_counts(most)]
