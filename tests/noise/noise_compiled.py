"""Compiles the noise kernels for a Hopper GPU, which takes none, and prints how many there were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clipping"))

from triton_compiled import compiles

from userdp.noise import banded_kernels, kernels

STREAMS = ("philox", "chacha20")
TYPES = {"values": "*fp32", "keys": "*i32", "stddev": "fp32"}


def constants_of(randomness: str) -> tuple[dict[str, Any], int]:
    constants: dict[str, Any] = {"UNIT": 4, **kernels.lanes_of(randomness)}
    return constants, constants.pop("num_warps")


def signature(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, str]:
    known = TYPES | types | dict.fromkeys(constants, "constexpr")
    return {name: known.get(name, "i32") for name in kernel.arg_names}


def gaussian() -> int:
    for randomness in STREAMS:
        constants, warps = constants_of(randomness)
        kernel = kernels.gaussian_kernel
        compiles(kernel, constants, signature(kernel, constants), num_warps=warps)
    return len(STREAMS)


def banded() -> int:
    for randomness in STREAMS:
        constants, warps = constants_of(randomness)
        for ahead in (1, 5):
            kernel, both = (
                banded_kernels.advance_kernel,
                constants | {"KEPT": 3 * ahead, "AHEAD": ahead},
            )
            types = signature(kernel, both, past="*fp32", row="*fp64")
            compiles(kernel, both, types, num_warps=warps)
    kernel, constants = (
        banded_kernels.redrawn_kernel,
        {"UNIT": 4, "LANES": 1024, "NUM_KEYS": 16, "KEY_WORDS": 8},
    )
    compiles(kernel, constants, signature(kernel, constants, coefficients="*fp32"), num_warps=8)
    return 5


if __name__ == "__main__":
    print(gaussian() + banded())
