"""Compiles the kernels of local steps for a Hopper GPU, which takes none, and prints their number.

A program of its own, as `triton_compiled.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

from triton_compiled import compiles

from userdp.clipping.kernels import local_steps, word_rows, word_table
from userdp.clipping.stacked import triton_words

INTEGERS = {"words", "ids", "labels"}
NUMBERS = {"eta": "fp32", "penalty": "fp32"}
FLOATS = {"theta", "start", "factors", "outputs", "weights", "gradients", "log_sums", "pulls"}
FLOATS |= {"alongs", "rows", "of_inputs", "gates", "biases", "cells", "states", "of_states"}
FLOATS |= {"of_cells"}


def compile_one(kernel: Any, constants: dict[str, Any], **types: str) -> None:
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    known = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTEGERS, "*i64") | NUMBERS
    known |= {"slots": "*i32", "squared": "*fp64"} | types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    compiles(kernel, constants, signature, **options)


def tables() -> int:
    """Both passes over the tables, in both precisions, with and without the second block."""
    count = 0
    for precision, (width, positions) in itertools.product(
        ("tf32", "tf32x3"), ((96, 80), (64, 16), (24, 300))
    ):
        attention, step = triton_words.ATTENTION[precision], triton_words.STEP[precision]
        constants = triton_words._constants(attention, width, 1e-12) | {"PRECISION": precision}
        block = {"POSITIONS": attention.positions}
        compile_one(word_table.attention_kernel, constants | block)
        constants = triton_words._constants(step, width, 1e-12) | {"PRECISION": precision}
        compile_one(word_table.step_kernel, constants | triton_words._blocks(step, positions))
        count += 2
    return count


def rows() -> int:
    plain = {"WIDTH": 96, "PADDED": 128, "SMALLEST": 1e-12, "num_warps": 1, "num_stages": 2}
    compile_one(word_rows._rows_kernel, dict(plain))
    compile_one(word_rows._pulls_kernel, plain | {"PLACES": 16})
    return 2


def others() -> int:
    plain = {"BLOCK": 1024, "num_warps": 4, "num_stages": 2}
    compile_one(local_steps._settle_kernel, dict(plain))
    compile_one(local_steps._squared_kernel, dict(plain), out="*fp64")
    compile_one(local_steps._sum_kernel, dict(plain), out="*fp32", weights="*fp64")
    for kernel in (local_steps._cell_kernel, local_steps._cell_gradient_kernel):
        compile_one(kernel, plain | {"SIZE": 256})
    return 5


if __name__ == "__main__":
    print(tables() + rows() + others())
