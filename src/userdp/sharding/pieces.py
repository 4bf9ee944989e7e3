"""The clipped sum of a sharded model: each rank gets its own rows of it, and noises these alone.

A sharded parameter lies on the ranks by rows: rank r holds rows [r c, (r + 1) c), c = ceil(rows /
ranks), and the last ranks fewer or none. In the flat buffer of the whole model, which defines what
"position" means for the noise, these rows are one contiguous range. So

    each rank sums the clipped updates of its own users, for the whole model (float32 at least)
    -> the sums of all ranks are added up, and each rank receives its own rows (reduce-scatter)
    -> each rank adds the noise of exactly the positions it holds
    -> the optimizer acts on its rows.

Why no norm crosses ranks. A user's clip factor is a function of the norm of that user's whole
update. Each user is on one rank only, and that rank runs the whole model for it: weights are
gathered layer by layer, so all layers' gradients of the user arise on this rank. Its norm over all
layers is therefore complete there, the user is clipped once, and what the user adds to the sum of
all ranks has norm at most C. Dividing that sum by rows moves no value, so the parts that one user
moves on all ranks together have norm at most C as well.

Why the noise is right. Positions of different ranks are disjoint and together they are all
positions of all trained parameters. Each is drawn from the keyed stream of its position, so the
ranks' numbers are independent, and are bit for bit those of one process. What pads uneven shards
belongs to no position: it is cut off before noise is added, and never reaches a weight. Parameters
that every rank holds whole (not sharded) get the same sum and the same noise on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from userdp.clipping.flat import FlatBuffer
from userdp.errors import InputError
from userdp.noise.contract import Noise
from userdp.noise.draw import pieces_drawn_once
from userdp.ranks import Ranks
from userdp.sharded_tensors import is_shard, local_of
from userdp.streams import RunSecret, Streams

# Values that are divided over the ranks at a time. The copy for it needs this much memory.
BUCKET = 2**24


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What this rank holds of one parameter: rows `first` to `last`; all of them if not sharded."""

    parameter: Tensor
    first: int
    last: int
    # Rows of a full shard: how many every rank but the last ones holds.
    full: int

    @staticmethod
    def of(parameter: Tensor, rank: int, count: int) -> Piece:
        """This rank's rows. Refuses parameters that are divided in any other way."""
        rows = len(parameter) if parameter.dim() else 1
        if not is_shard(parameter):
            return Piece(parameter=parameter, first=0, last=rows, full=rows)
        sharded: Any = parameter
        placed = [getattr(placement, "dim", None) for placement in sharded.placements]
        if placed != [0] or sharded.device_mesh.size() != count:
            raise InputError(
                f"a parameter of shape {tuple(parameter.shape)} is divided as {sharded.placements} "
                f"over {sharded.device_mesh.size()} of {count} ranks: only rows over all ranks are "
                "known here. Use fully_shard with one mesh of all ranks and no other parallelism."
            )
        full = -(-rows // count)
        first = min(rank * full, rows)
        last = min(first + full, rows)
        assert len(local_of(parameter)) == last - first
        return Piece(parameter=parameter, first=first, last=last, full=full)

    @property
    def is_shared(self) -> bool:
        """Whether the other ranks hold other rows."""
        return is_shard(self.parameter)

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.parameter.numel() // max(1, len(self.parameter)) if self.parameter.dim() else 1

    @property
    def size(self) -> int:
        """How many values this rank holds."""
        return (self.last - self.first) * self.width

    def placed(self, view: Tensor) -> int:
        """Where in the flat buffer the piece begins, if `view` is the parameter's place there."""
        return int(view.storage_offset()) + self.first * self.width

    def gradient(self, values: Tensor) -> Tensor:
        """The values as the gradient of the parameter."""
        return self.as_shard(values.to(self.parameter.dtype))

    def as_shard(self, values: Tensor, *, more: tuple[int, ...] = ()) -> Tensor:
        """Flat values, or `more` rows of them, as this rank's part of a tensor like the parameter.

        With `more` the tensor has further dimensions in front of the parameter's.
        """
        parameter: Any = self.parameter
        shape = (self.last - self.first, *parameter.shape[1:]) if parameter.dim() else ()
        own = values.reshape(*more, *shape)
        if not self.is_shared:
            return own
        from torch.distributed.tensor import DTensor, Shard

        whole = torch.Size((*more, *parameter.shape))
        return DTensor.from_local(
            own,
            parameter.device_mesh,
            (Shard(len(more)),),
            run_check=False,
            shape=whole,
            stride=torch.empty(whole, device="meta").stride(),
        )

    def own_rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of vectors like the parameter, one a row; flat. Copied."""
        rows: Tensor = local_of(tensor)
        if not is_shard(tensor) and self.parameter.dim():
            rows = rows[:, self.first : self.last]
        return rows.reshape(len(rows), -1).clone()


class Pieces:
    """The pieces of all trained parameters on one rank, with the noise of each.

    A noise with a memory has one for each piece: the vectors are sharded like the weights.
    """

    def __init__(self, parameters: Sequence[Tensor], noise: Noise, *, ranks: Ranks) -> None:
        check_drawn_by_position(noise)
        self._ranks, self._count = ranks, ranks.count
        self.pieces = [Piece.of(p, ranks.rank, ranks.count) for p in parameters]
        self.noises = [noise.started() for _ in self.pieces]
        self.bytes_sent = 0

    def summed(self, total: FlatBuffer) -> list[Tensor]:
        """Each piece's values of the sum over all ranks, flat. All ranks ask together. Secret."""
        found: dict[int, Tensor] = {}
        for bucket in self._buckets():
            shared = [piece for piece in bucket if piece.is_shared]
            places = {id(piece): view for piece, view in self._with_views(total)}
            if not shared:
                (piece,) = bucket
                values = places[id(piece)].reshape(-1).clone()
                dist.all_reduce(values)
                found[id(piece)] = values
                continue
            columns = [piece.full * piece.width for piece in shared]
            given = total.values.new_zeros((self._count, sum(columns)))
            for piece, part in zip(shared, given.split(columns, 1), strict=True):
                for rank, rows in enumerate(places[id(piece)].split(piece.full)):
                    part[rank, : rows.numel()] = rows.reshape(-1)
            own = given.new_empty(sum(columns))
            self.bytes_sent += given.numel() * given.element_size()
            dist.reduce_scatter_single(own, given.view(-1))
            for piece, values in zip(shared, own.split(columns), strict=True):
                # What follows pads an uneven shard.
                found[id(piece)] = values[: piece.size]
        return [found[id(piece)] for piece in self.pieces]

    def _with_views(self, total: FlatBuffer) -> Iterator[tuple[Piece, Tensor]]:
        return zip(self.pieces, total.views, strict=True)

    def _buckets(self) -> Iterator[list[Piece]]:
        """The sharded pieces by few at a time; each that is not sharded by itself."""
        bucket: list[Piece] = []
        for piece in self.pieces:
            if not piece.is_shared:
                yield [piece]
                continue
            if bucket and sum(p.parameter.numel() for p in [*bucket, piece]) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(piece)
        if bucket:
            yield bucket

    def add_noise_(
        self,
        values: Sequence[Tensor],
        total: FlatBuffer,
        *,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        """Add to each piece the noise of its own positions in the whole model's buffer."""
        with pieces_drawn_once():
            for piece, noise, view, own in zip(
                self.pieces, self.noises, total.views, values, strict=True
            ):
                if piece.size:
                    noise.add_(
                        own,
                        offset=piece.placed(view),
                        size=len(total.values),
                        noise_stddev=noise_stddev,
                        step=step,
                        streams=streams,
                    )

    def state_dict(self) -> dict[str, Any]:
        """What the noise remembers: of all pieces the same, and each piece's vectors. Secret."""
        own = [
            noise.state_dict() if piece.size else None
            for piece, noise in zip(self.pieces, self.noises, strict=True)
        ]
        # A rank may hold no row at all of a small model. The first rank holds some.
        common = self._ranks.by_first(lambda: _common(own))
        if not common:
            return {}
        vectors_of_none: Tensor | None = common.pop("vectors of no row")
        memory: list[Tensor | None] = [None] * len(own)
        if vectors_of_none is not None:
            for place, (piece, state) in enumerate(zip(self.pieces, own, strict=True)):
                vectors = vectors_of_none if state is None else state["memory"]
                memory[place] = piece.as_shard(
                    vectors.to(piece.parameter.device), more=(len(vectors),)
                )
        return {**common, "memory": memory}

    def load_state_dict(self, state: dict[str, Any], views: Sequence[Tensor]) -> None:
        """Go on from what `state_dict` gave, on this or another number of ranks.

        `views` are the parameters' places in the flat buffer.
        """
        for piece, noise, view, vectors in zip(
            self.pieces, self.noises, views, state.get("memory", self.pieces), strict=True
        ):
            if not state:
                noise.load_state_dict({})
            elif piece.size:
                begun = state["step"] > 0
                own = {
                    **state,
                    "memory": None if vectors is None else piece.own_rows(vectors),
                    "offset": piece.placed(view) if begun else None,
                    "held": piece.size if begun else None,
                }
                noise.load_state_dict(own)


def check_drawn_by_position(noise: Noise) -> None:
    """Refuse a noise that draws other numbers for a part of a buffer than for the whole, by trial.

    If every piece got the same numbers, their difference would be without noise.
    """
    streams, size = RunSecret.from_system().streams("trial"), 12

    def added(*parts: slice) -> Tensor:
        values = torch.zeros(size)
        for part in parts:
            noise.started().add_(
                values[part],
                offset=part.start,
                size=size,
                noise_stddev=noise.noise_stddev(1.0),
                step=0,
                streams=streams,
            )
        return values

    if not torch.equal(added(slice(0, size)), added(slice(0, 5), slice(5, size))):
        raise InputError(
            f"{type(noise).__name__} draws other numbers for a part of the sum than for the whole, "
            "and with shards each rank noises its own part. Draw by position (`offset`), or train "
            "without shards."
        )


def _common(states: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """What the states of all pieces have in common, and the vectors of a piece without rows."""
    state = next((dict(state) for state in states if state), None)
    if state is None:
        return {}
    memory = state.pop("memory")
    for own in ("offset", "held"):
        state.pop(own)
    # Vectors of the same number and dtype as on other ranks, but without elements.
    return {**state, "vectors of no row": None if memory is None else memory[:, :0].cpu()}
