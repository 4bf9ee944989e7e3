"""Users' gradients y_u^T x_u and their squared norms in one kernel, for GPUs of the Hopper kind.

After a library's batched product the gradients must be read again for their norms, which takes an
eighth of the time of both. Here the values are squared just before they are written, while they are
still in registers and while the tensor cores work on other values.

In each multiprocessor three groups of warps share the work. One group fetches tiles of both factors
into a ring of buffers. The other two take turns multiplying: while one rounds, squares and writes
its tile of a gradient, the other uses the tensor cores. The waiting group is woken a little early,
so that the tensor cores are never idle. Barriers in shared memory say which group may use which
buffer. A barrier has a phase, 0 or 1, which changes each time everything that it waits for has
arrived.

The kernel is written in Gluon, the lower level of Triton; in Triton itself the gain is half as
large. Gluon is young, so `products` tries the kernel out before using it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from userdp.clipping.kernels.products import TILE

# Releases of Triton differ in what they call the two copies.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Tokens in all buffers for tiles of both factors: as many as shared memory has room for.
_TOKENS_AHEAD = 320
# How many neighbouring tiles, across the longer side of a gradient, are computed at the same time:
# they then find their factors in the cache.
_NEIGHBOURS = gl.constexpr(8)
# A group wakes the other this many tokens before its own last one; those keep the tensor cores
# busy until the other is awake. 2 products of 64 tokens were the fastest of 0, 1, 2 and 4.
_AWAKE = gl.constexpr(128)
# Raises a tile's sum of squares by more than its 42 roundings can lose.
_RAISED = gl.constexpr(1 + 2.0**-18)
# Registers of a thread at the start. The fetching warp then gives most of its registers to the
# groups that multiply.
_REGISTERS = 168
_REGISTERS_TO_MULTIPLY = 232
_REGISTERS_TO_FETCH = 24


@gluon.jit
def _place(tile, tiles_a, tiles_b):
    """A tile's user, and its place along both factors."""
    of_user = tiles_a * tiles_b
    number = tile % of_user
    in_band = _NEIGHBOURS * max(tiles_a, tiles_b)
    first = number // in_band * _NEIGHBOURS
    height = min(min(tiles_a, tiles_b) - first, _NEIGHBOURS)
    across = first + number % in_band % height
    along = number % in_band // height
    is_tall = tiles_a > tiles_b
    return tile // of_user, gl.where(is_tall, along, across), gl.where(is_tall, across, along)


@gluon.jit
def _tokens(user, ends, length, EQUAL: gl.constexpr):
    """A user's first token and how many it has."""
    if EQUAL:
        first = user * length
        count = length
    else:
        first = gl.load(ends + user - 1, user > 0, 0)
        count = gl.load(ends + user) - first
    return first, count


@gluon.jit
def _num_tiles(sizes, ends, EQUAL: gl.constexpr):
    """The tiles of all places up to the last one with tokens.

    Batches have many places without tokens behind those of their users. A tile of such a place
    would still cost a turn.
    """
    tiles_a, tiles_b, num_users, _length = sizes
    used = num_users
    if not EQUAL:
        # The first place that ends where the last one does, by bisection.
        end = gl.load(ends + num_users - 1)
        low = num_users * 0
        high = num_users - 1
        while low < high:
            middle = (low + high) // 2
            is_end = gl.load(ends + middle) == end
            high = gl.where(is_end, middle, high)
            low = gl.where(is_end, low, middle + 1)
        used = high + 1
    return used * tiles_a * tiles_b


@gluon.jit
def _steps(tile, sizes, ends, EQUAL: gl.constexpr, DEPTH: gl.constexpr):
    """How many products of DEPTH tokens a tile needs; none behind the last tile."""
    tiles_a, tiles_b, num_users, length = sizes
    user = tile // (tiles_a * tiles_b)
    steps = 0
    if user < num_users:
        _, count = _tokens(user, ends, length, EQUAL)
        steps = count // DEPTH
    return steps


@gluon.jit
def _fetch(
    descriptors, buffers, barriers, sizes, squares, ends, WHICH: gl.constexpr, EQUAL: gl.constexpr
):
    """Fetch the factors of this program's tiles, in their order."""
    a, b = descriptors[0], descriptors[1]
    a_buffers, b_buffers = buffers[0], buffers[1]
    filled, emptied = barriers[0], barriers[1]
    tiles_a, tiles_b, _num_users, length = sizes
    DEPTH: gl.constexpr = a.block_type.shape[0]
    TILE: gl.constexpr = a.block_type.shape[1]
    STAGES: gl.constexpr = a_buffers.type.shape[0]
    step = 0
    for tile in range(gl.program_id(0), _num_tiles(sizes, ends, EQUAL), gl.num_programs(0)):
        user, row, column = _place(tile, tiles_a, tiles_b)
        first, count = _tokens(user, ends, length, EQUAL)
        for token in range(first, first + count // DEPTH * DEPTH, DEPTH):
            stage = step % STAGES
            # A new barrier counts as passed in the phase before its first.
            mbarrier.wait(emptied.index(stage), ((step // STAGES) & 1) ^ 1)
            barrier = filled.index(stage)
            mbarrier.expect(barrier, a.block_type.nbytes + b.block_type.nbytes)
            _load(a, [token, row * TILE], barrier, a_buffers.index(stage))
            _load(b, [token, column * TILE], barrier, b_buffers.index(stage))
            step += 1


@gluon.jit
def _multiply(
    descriptors, buffers, barriers, sizes, squares, ends, WHICH: gl.constexpr, EQUAL: gl.constexpr
):
    """Multiply, round, square and write every second tile of this program."""
    a, gradients = descriptors[0], descriptors[2]
    a_buffers, b_buffers, results = buffers
    filled, emptied, turns = barriers
    tiles_a, tiles_b, num_users, _length = sizes
    DEPTH: gl.constexpr = a.block_type.shape[0]
    TILE: gl.constexpr = a.block_type.shape[1]
    STAGES: gl.constexpr = a_buffers.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    AHEAD: gl.constexpr = _AWAKE // DEPTH
    # A group that is a whole ring ahead would mistake an old phase of a barrier for its own.
    gl.static_assert(AHEAD < STAGES)
    stride = gl.num_programs(0)
    result = results.index(WHICH)
    step = 0
    last = _num_tiles(sizes, ends, EQUAL)
    for tile in range(gl.program_id(0) + WHICH * stride, last, 2 * stride):
        user, row, column = _place(tile, tiles_a, tiles_b)
        steps = _steps(tile, sizes, ends, EQUAL, DEPTH)
        if WHICH == 1:
            step += _steps(tile - stride, sizes, ends, EQUAL, DEPTH)
        total = gl.zeros((TILE, TILE), dtype=gl.float32, layout=layout)
        # Wait until the other group has issued almost all products of its tile; group 0 begins.
        turn = tile // stride // 2
        mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (1 - WHICH))
        mbarrier.arrive(turns.index(1 - WHICH), pred=steps == 0)
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            total = warpgroup_mma(
                a_buffers.index(stage).permute((1, 0)),
                b_buffers.index(stage),
                total,
                use_acc=i > 0,
                is_async=True,
            )
            total = warpgroup_mma_wait(1, (total,))
            # All products but this one are done: the previous buffer may be overwritten.
            mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=i > 0)
            mbarrier.arrive(turns.index(1 - WHICH), pred=i == max(steps - AHEAD, 1) - 1)
            step += 1
        total = warpgroup_mma_wait(0, (total,))
        mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=steps > 0)
        rounded = total.to(gradients.dtype)
        tma.store_wait(pendings=0)
        result.reshape([TILE, TILE]).store(rounded)
        fence_async_shared()
        # Nothing is written for a user without tokens, and nobody reads its values.
        if steps > 0:
            place = [user, row * TILE, column * TILE]
            _store(gradients, place, result)
        # Square the values as they were written, after rounding.
        wide = rounded.to(gl.float32)
        number = tile % (tiles_a * tiles_b)
        gl.store(squares + number * num_users + user, gl.sum(gl.sum(wide * wide, 1), 0) * _RAISED)
        if WHICH == 0:
            step += _steps(tile + stride, sizes, ends, EQUAL, DEPTH)
    tma.store_wait(pendings=0)


@gluon.jit
def _products_kernel(
    a,
    b,
    gradients,
    squares,
    ends,
    tiles_a,
    tiles_b,
    num_users,
    length,
    EQUAL: gl.constexpr,
    STAGES: gl.constexpr,
    TO_MULTIPLY: gl.constexpr,
    TO_FETCH: gl.constexpr,
):
    DEPTH: gl.constexpr = a.block_type.shape[0]
    TILE: gl.constexpr = a.block_type.shape[1]
    a_buffers = gl.allocate_shared_memory(a.dtype, [STAGES, DEPTH, TILE], a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [STAGES, DEPTH, TILE], b.layout)
    results = gl.allocate_shared_memory(gradients.dtype, [2, 1, TILE, TILE], gradients.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=1)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    fence_async_shared()
    descriptors = (a, b, gradients)
    buffers = (a_buffers, b_buffers, results)
    barriers = (filled, emptied, turns)
    sizes = (tiles_a, tiles_b, num_users, length)
    # Gluon wants all three groups to take the same arguments, whether they need them or not.
    gl.warp_specialize(
        [
            (_multiply, (descriptors, buffers, barriers, sizes, squares, ends, 0, EQUAL)),
            (_multiply, (descriptors, buffers, barriers, sizes, squares, ends, 1, EQUAL)),
            (_fetch, (descriptors, buffers, barriers, sizes, squares, ends, 2, EQUAL)),
        ],
        [4, 1],
        [TO_MULTIPLY, TO_FETCH],
    )


def products_with_squares(
    a: Tensor,
    b: Tensor,
    users: int,
    ends: Tensor | None,
    *,
    depth: int,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `products.products_with_squares`, for users with a multiple of `depth` tokens.

    `programs` share the tiles; by default there is one for each multiprocessor.
    """
    a, b = (
        m if _is_readable(m) else m.clone(memory_format=torch.contiguous_format) for m in (a, b)
    )
    rows, columns = a.shape[1], b.shape[1]
    gradients = a.new_empty(users, rows, columns)
    tiles_a, tiles_b = -(-rows // TILE), -(-columns // TILE)
    # Zeros for the places behind the last user, which the kernel leaves out.
    squares = a.new_zeros(tiles_a * tiles_b, users, dtype=torch.float32)
    most = programs or torch.cuda.get_device_properties(a.device).multi_processor_count
    _products_kernel[(min(most, squares.numel()),)](
        _described(a, [depth, TILE]),
        _described(b, [depth, TILE]),
        _described(gradients, [1, TILE, TILE]),
        squares,
        squares if ends is None else ends,
        tiles_a,
        tiles_b,
        users,
        0 if ends is not None else len(a) // users,
        EQUAL=ends is None,
        STAGES=_TOKENS_AHEAD // depth,
        TO_MULTIPLY=_REGISTERS_TO_MULTIPLY,
        TO_FETCH=_REGISTERS_TO_FETCH,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
    return gradients, squares


def _is_readable(matrix: Tensor) -> bool:
    """Whether the copy engine can read it: rows in order, each of whole 16-byte vectors."""
    row, column = matrix.stride()
    in_order = column == 1 and row >= matrix.shape[1]
    return in_order and row % 8 == 0 and matrix.data_ptr() % 16 == 0


def _described(tensor: Tensor, block: list[int]) -> Any:
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    layout = gl.NVMMASharedLayout.get_default_for(block, kinds[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout)
