"""How the kernels are run: compiled on CUDA, and in full precision whatever the caller chose."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# torch compiles a function once for each shape; its default would give up at 8.
RECOMPILATIONS = 256
T = TypeVar("T")
_FUSES = ContextVar("userdp_fuses", default=True)


def fused(function: Callable[..., T], *tensors: Tensor, any_rows: bool = False) -> T:
    """The function's value; on CUDA by a compiled version that fuses its operations."""
    fuses = tensors[0].is_cuda and _FUSES.get()
    return (_fused(function, any_rows) if fuses else function)(*tensors)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """`fused` compiles nothing inside the `with` block: for batches that come once."""
    token = _FUSES.set(False)
    try:
        yield
    finally:
        _FUSES.reset(token)


@cache
def _fused(function: Callable[..., Any], any_rows: bool) -> Callable[..., Any]:
    allow_recompilations()
    return compiled(function, any_rows=any_rows)


def compiled(function: Callable[..., Any], *, any_rows: bool) -> Callable[..., Any]:
    """The function compiled for each shape alone or, with `any_rows`, once for any number of rows.

    What is compiled for one shape may be a little faster. Compiling takes many seconds.
    """
    # Only the sizes that are noted may be any: if torch chose others by what it has seen before,
    # the next process, which sees the shapes in another order, would not find its code on disk.
    for_any = torch.compile(function, dynamic=False)
    if not any_rows:
        return for_any

    def call(*args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim():
                any_size(leaf, 0)
        return for_any(*args, **kwargs)

    return call


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """No search for garbage inside: compiling makes many objects, and most of them stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def any_size(tensor: Tensor, dimension: int) -> Tensor:
    """The tensor, noted: what is compiled with it takes any size of this dimension."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    return tensor


def allow_recompilations() -> None:
    """Let torch compile one function for many shapes."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)
    config.accumulated_recompile_limit = max(
        config.accumulated_recompile_limit, 16 * RECOMPILATIONS
    )


@contextlib.contextmanager
def same_every_time(wanted: bool) -> Iterator[None]:
    """Inside, equal inputs give equal sums to the last bit, if that is wanted.

    On CUDA some sums are otherwise added up in the order in which threads happen to finish. torch
    warns where it knows no such way.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not only_warns):
        yield
        return
    # cuBLAS reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


@contextlib.contextmanager
def wide_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast, no TF32 inside the `with` block."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), without_tf32():
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products on CUDA in full float32: in TF32 a norm could come out too small."""
    setting: Any = torch.backends.cuda.matmul
    if setting.fp32_precision != "tf32":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The caller used only the newer setting. Then torch refuses to read the older one.
        before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is None:
            setting.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """Attention without cuDNN inside the `with` block: for passes over shapes that come once.

    cuDNN makes a plan for every new shape, which takes longer than such a pass.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def half_on_cuda(tensor: Tensor) -> bool:
    """Whether products of the tensor go through the CUDA kernels."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)
