"""Compiles the CUDA kernels for a Hopper GPU, which takes none, and prints how many there were.

A program of its own: in a process where Triton interprets, it does not compile.
"""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch

HOPPER = ("cuda", 90, 32)
FLOATS = ("factors_pointer", "sums_pointer", "out_pointer", "gradients")
HALVES = ("inputs", "output_gradients")
KEPT = ("kept_pointer",)
SHORT_INTEGERS = ("starts", "first_tiles", "again")
NUMBERS = (
    "row_length",
    "num_users",
    "num_tile_pairs",
    "num_tiles",
    "all_tiles",
    "width",
    "vocabulary",
)


def type_of(name: str, constants: dict[str, Any]) -> str:
    """The type of a kernel's argument; what is no number is a table of 64-bit integers."""
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return "i32"
    tables = {"*fp32": FLOATS, "*bf16": HALVES, "*fp16": KEPT, "*i32": SHORT_INTEGERS}
    return next((kind for kind, names in tables.items() if name in names), "*i64")


def compiles(
    kernel: Any,
    constants: dict[str, Any],
    signature: dict[str, str] | None = None,
    **options: int,
) -> None:
    """Raise if the kernel does not compile with these constants."""
    compiler: Any = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(*HOPPER)
    names: list[str] = kernel.arg_names
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature or {name: type_of(name, constants) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    assert compiler.compile(source, target=target, options=options).asm["cubin"]


def all_kernels() -> int:
    """Every kernel in every variant that training uses."""
    from userdp.clipping.kernels import gram_kernels, inner, settle, stored

    count = 0
    for even, (tile, warps) in itertools.product((True, False), ((16, 4), (128, 8))):
        tiles = {"TILE": tile, "EVEN": even, "DTYPE": "bfloat16", "LEAST": 2.0**-80}
        tiles |= {"UNIT": 64 if even else 8, "SLICE": 64}
        for one_tile, stages in ((True, 7), (False, 5)):
            constants = tiles | {"ONE_TILE": one_tile, "FEW_TOKENS": 1.0, "CUT_OFF": 2.0**-27}
            compiles(gram_kernels.gram_kernel, constants, num_warps=warps, num_stages=stages)
        options = {"num_warps": warps, "num_stages": 5, "maxnreg": 128}
        errors = {"EPS": 2.0**-7, "KEPT_ERROR": 2.0**-11}
        compiles(gram_kernels.scale_kernel, tiles | errors, **options)
        count += 3
    for dtype in ("bfloat16", "float32"):
        blocks = {"BLOCK": 1024, "UNIT": 8, "DTYPE": dtype}
        for by_row, gaps in ((True, True), (False, True), (False, False)):
            flags = {"BLOCKS": 16, "BY_ROW": by_row, "HAS_GAPS": gaps, "ROUNDING": 2.4e-7}
            compiles(stored._stored_norms_kernel, blocks | flags)
            count += 1
        for gaps in (True, False):
            compiles(stored._stored_sums_kernel, blocks | {"HAS_GAPS": gaps})
            count += 1
    compiles(settle._settle_kernel, {"BLOCK": 4096, "UNIT": 8, "DTYPE": "bfloat16"})
    count += 1
    for tile, warps in ((16, 4), (128, 8)):
        for halves in (True, False):
            constants = {"TILE": tile, "SLICE": 64, "HALVES": halves, "ERROR": 2.0**-15}
            options = {"num_warps": warps, "num_stages": 2}
            compiles(inner._inner_kernel, constants, **options)
            count += 1
    return count + user_sums() + attention() + products()


def user_sums() -> int:
    """The sums over users' tokens, for two precisions."""
    import triton.language as tl

    from userdp.clipping.kernels import user_sums_kernel as kernels

    for kind, others in itertools.product(("*bf16", "*fp32"), (True, False)):
        constants = {"HAS_OTHERS": others, "WIDE": tl.float32, "TOKENS": 64, "COLUMNS": 64}
        kinds = {"values": kind, "others": kind, "ends": "*i32"}
        kinds |= dict.fromkeys(("sums", "products"), "*fp32") | dict.fromkeys(
            constants, "constexpr"
        )
        signature = {name: kinds.get(name, "i32") for name in kernels._user_sums_kernel.arg_names}
        compiles(kernels._user_sums_kernel, constants, signature, num_warps=4)
    return 4


def attention() -> int:
    """The three kernels of attention within records, for heads of three widths."""
    from userdp.clipping.kernels import record_attention as kernels

    names = (kernels._forward, kernels._backward_queries, kernels._backward_keys)
    for kernel, width in itertools.product(names, (64, 128, 256)):
        tile, warps = (64 if width <= 128 else 32), (4 if width <= 64 else 8)
        constants = {"GROUP": 3, "WIDTH": width, "PADDED": width, "TILE": tile, "STEP": 32}
        halves = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "d_out_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
        kinds = dict.fromkeys(halves, "*bf16")
        kinds |= dict.fromkeys(("position_ptr", "left_ptr"), "*i32")
        kinds |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
        kinds |= dict.fromkeys(("scale", "unit"), "fp32")
        kinds |= dict.fromkeys(constants, "constexpr")
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        compiles(kernel, constants, signature, num_warps=warps, num_stages=2)
    return 9


def products() -> int:
    """The kernel in Gluon, called as training calls it, up to its launch."""
    runtime: Any = importlib.import_module("triton.runtime")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(*HOPPER)
    runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    from userdp.clipping.kernels import hopper

    kernel: Any = hopper._products_kernel
    compiled: list[Any] = []

    class UpToLaunch:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: compiled.append(
                kernel.warmup(*args, grid=grid, **options)
            )

    hopper._products_kernel = UpToLaunch()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
    for dtype in (torch.bfloat16, torch.float16):
        a, b = torch.zeros(256, 384, dtype=dtype), torch.zeros(256, 136, dtype=dtype)
        for depth, ends in itertools.product((64, 32), (None, [128, 256])):
            places = None if ends is None else torch.tensor(ends, dtype=torch.int32)
            hopper.products_with_squares(a, b, 2, places, depth=depth)
    assert all(one.asm["cubin"] for one in compiled)
    return len(compiled)


if __name__ == "__main__":
    print(all_kernels())
