"""How a sum becomes the gradients of the weights that this rank holds: all of them, or its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.clipping.rules import ClipRule
from userdp.noise.contract import Noise
from userdp.noise.draw import PIECE
from userdp.parts import is_our_own
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.runs.repeated_sums import AnySums, NoSums, SumOfStep, settled_together
from userdp.sharded_tensors import is_shard
from userdp.sharding.pieces import Pieces
from userdp.streams import Streams


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one step does to its sum: times `scale`, plus noise, over the `divisor`."""

    scale: float
    noise_stddev: float
    divisor: float
    step: int
    streams: Streams
    # They see the sum before its noise, where a run may be resumed.
    sums: AnySums = field(default_factory=NoSums)
    seen: SumOfStep | None = None
    # Whether the step was charged before.
    is_repeated: bool = False

    def see(self, values: Tensor) -> None:
        """Show a piece of the sum, scaled and without noise."""
        if self.seen is not None:
            self.seen.see(values)

    def settle_at_once(self, ranks: Ranks, values: Tensor) -> None:
        """Show and settle a sum that every rank has, before a test says whether it is released.

        A test that was failed is not asked once more with new noise, so its step is kept, too.
        """
        if ranks.is_first:
            self.see(values)
        self.settle(ranks, in_parts=False)

    def settle(self, ranks: Ranks, *, in_parts: bool) -> None:
        """Raise before anything is released, if the step was taken before with another sum."""
        settled_together(
            self.sums, self.seen, ranks, in_parts=in_parts, is_repeated=self.is_repeated
        )


def release_of(
    plan: Plan,
    clip: ClipRule,
    total: ClippedSum,
    *,
    step: int,
    streams: Streams,
    sums: AnySums,
    is_repeated: bool,
) -> Release:
    """The release of a step's sum, as the plan says."""
    scale, noise_stddev = plan.averaging.scale(total.total_weight), plan.noise_stddev_of(clip)
    # Divide by E|U|, not |U|: the realised cohort size is secret (C24 Alg. 2).
    numbers = [scale, noise_stddev, plan.divisor]
    if clip.count_stddev is not None:
        # The count gets noise of its own, which is repeated too.
        numbers += [clip.count_stddev, total.num_updates, int(total.num_within)]
    if total.concentration is not None:
        # So does the score of a test.
        numbers.append(total.concentration)
    bound, device = plan.averaging.sensitivity(clip.bound), total.total.values.device.type
    return Release(
        scale=scale,
        noise_stddev=noise_stddev,
        divisor=plan.divisor,
        step=step,
        streams=streams,
        sums=sums,
        is_repeated=is_repeated,
        seen=sums.of_step(step, numbers, bound=bound, device=device),
    )


class Holding(Protocol):
    """The trained weights that this rank holds, and the noise on their sums."""

    def set_gradients(self, total: ClippedSum, release: Release) -> None:
        """Add up the ranks' sums, noise and divide them, and set `.grad`. All ranks together.

        Where a test decides, the step has been settled before it.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the noise remembers. Secret."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...


class WholeWeights:
    """Every rank holds all weights, adds up the same sum and adds the same noise to it."""

    def __init__(self, parameters: Sequence[Tensor], noise: Noise, ranks: Ranks) -> None:
        self._parameters = list(parameters)
        self._noise = noise.started()
        # Our own noises that remember nothing draw by position. Whether one of another package does
        # is not known here: if it drew the same numbers for every part, their difference would be
        # without noise.
        self._takes_parts = is_our_own(noise) and self._noise is noise
        self._ranks = ranks

    def set_gradients(self, total: ClippedSum, release: Release) -> None:
        """Add up, noise and divide the one flat buffer."""
        values = total.total.values
        if total.concentration is None:
            summed = self._ranks.added_up(values, self._part_of(values))
        else:
            # Where a test decides, every rank has the sum of all of them. It must not use it before
            # the first rank has come here, after its charge.
            self._ranks.numbers([release.step])
            summed = iter([slice(0, len(values))])
        # The next parts of the sum are on their way while one gets its noise.
        for part in summed:
            own = values[part]
            if release.scale != 1:
                own *= release.scale
            # All ranks have the same sum.
            if self._ranks.is_first and total.concentration is None:
                release.see(own)
            # Every rank adds the same noise to the same sum, so it is in the weights once.
            self._noise.add_(
                own,
                offset=part.start,
                size=len(values),
                noise_stddev=release.noise_stddev,
                step=release.step,
                streams=release.streams,
            )
            own /= release.divisor
        if total.concentration is None:
            release.settle(self._ranks, in_parts=False)
        for parameter, value in zip(self._parameters, total.total.views, strict=True):
            parameter.grad = value.to(parameter.dtype)

    def _part_of(self, values: Tensor) -> int:
        """How many values get their noise at a time, where ranks wait for each other's."""
        # Whole pieces of noise, so that none is drawn twice. A noise that remembers something does
        # so for the whole buffer.
        return PIECE if self._takes_parts else len(values)

    def state_dict(self) -> dict[str, Any]:
        """What the noise remembers. Secret."""
        return self._noise.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, here or of sharded weights."""
        self._noise.load_state_dict(joined(state, FlatBuffer(self._parameters, on="meta")))


class ShardedWeights:
    """Each rank holds some rows of the weights; it gets their sums and adds their noise alone."""

    def __init__(self, parameters: Sequence[Tensor], noise: Noise, ranks: Ranks) -> None:
        self._pieces = Pieces(parameters, noise, ranks=ranks)
        self._ranks = ranks
        self._layout = FlatBuffer(parameters, on="meta")

    def set_gradients(self, total: ClippedSum, release: Release) -> None:
        """Divide the sum over the ranks; noise this rank's rows."""
        assert total.concentration is None
        values = self._pieces.summed(total.total)
        for own in values:
            if release.scale != 1:
                own *= release.scale
            release.see(own)
        release.settle(self._ranks, in_parts=True)
        self._pieces.add_noise_(
            values,
            total.total,
            noise_stddev=release.noise_stddev,
            step=release.step,
            streams=release.streams,
        )
        for piece, own in zip(self._pieces.pieces, values, strict=True):
            own /= release.divisor
            piece.parameter.grad = piece.gradient(own)

    def state_dict(self) -> dict[str, Any]:
        """What the noise remembers, of all ranks. Secret."""
        return self._pieces.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of ranks, or of whole weights."""
        own = apart(state, self._layout)
        self._pieces.load_state_dict(own, self._layout.views)


def holding_of(parameters: Sequence[Tensor], noise: Noise, ranks: Ranks) -> Holding:
    """The holding of these parameters."""
    kind = ShardedWeights if any(map(is_shard, parameters)) else WholeWeights
    return kind(parameters, noise, ranks)


def joined(state: dict[str, Any], layout: FlatBuffer) -> dict[str, Any]:
    """The state of a noise on the whole buffer, from one that has each parameter's vectors."""
    memory = state.get("memory")
    if not isinstance(memory, list):
        return state
    vectors: list[Tensor | None] = memory
    size = len(layout.values)
    whole: Tensor | None = None
    for view, own in zip(layout.views, vectors, strict=True):
        if own is None:
            continue
        if whole is None:
            # Gaps between parameters belong to no weight, so their noise may be anything.
            whole = own.new_zeros((len(own), size))
        start = int(view.storage_offset())
        whole[:, start : start + view.numel()] = own.reshape(len(own), -1)
    begun = state["step"] > 0
    return {
        **state,
        "memory": whole,
        "offset": 0 if begun else None,
        "held": size if begun else None,
    }


def apart(state: dict[str, Any], layout: FlatBuffer) -> dict[str, Any]:
    """The reverse of `joined`: cuts the whole buffer's vectors into each parameter's."""
    memory = state.get("memory")
    if not state or isinstance(memory, list):
        return state
    vectors: list[Tensor | None] = [None] * len(layout.views)
    if isinstance(memory, Tensor):
        for place, view in enumerate(layout.views):
            start = int(view.storage_offset())
            own = memory[:, start : start + view.numel()]
            vectors[place] = own.reshape(len(memory), *view.shape)
    common = {name: value for name, value in state.items() if name not in ("offset", "held")}
    return {**common, "memory": vectors}
