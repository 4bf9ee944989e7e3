"""Digests of everything that changes what a run releases: weights, optimizer, schedule, code.

Noise is bound to these digests. Two runs that share a secret and differ in any of them draw
different noise. With the same noise, the difference of the two models would show the data without
noise.

Public: a digest of weights, settings or code. The digest of an index is secret, like the index.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import userdp
from userdp.digests.code import COMPARED
from userdp.digests.described import (
    described,
    described_model,
    described_optimizer,
)
from userdp.digests.values import tensor_digest
from userdp.index import UserIndex
from userdp.models.checks import extra_state_bytes
from userdp.models.quantised import quantisation_of
from userdp.parts import Part, is_our_own

# Hashing releases the interpreter's lock, so threads use several cores.
THREADS = 4


def weights_digest(model: nn.Module) -> str:
    """A digest of every parameter, buffer and other saved tensor: name, dtype, shape and all bytes.

    The scales of quantised weights are such others.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> weights_digest(first) == weights_digest(second)
    False
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    known = {id(tensor) for _, tensor in named}
    saved = model.state_dict(keep_vars=True).items()
    others = [(n, t) for n, t in saved if isinstance(t, Tensor) and id(t) not in known]
    return _named_digest(named + others)


def trained_digest(model: nn.Module) -> str:
    """A digest of the trainable parameters alone: all that a run can have changed."""
    return _named_digest((n, p) for n, p in model.named_parameters() if p.requires_grad)


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """A digest of each saved tensor that a run must leave as it is, and of extra state, by name.

    These are parameters that are not trained, and buffers that are saved.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    found: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            found[name] = hashlib.sha256(extra_state_bytes(value)).hexdigest()
        elif id(value) not in trained:
            tensors[name] = value
    with ThreadPoolExecutor(THREADS) as pool:
        found.update(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))
    return found


def base_digest(model: nn.Module, published: Collection[str], *, precision: str = "") -> str:
    """A digest of the saved tensors of an adapted model that its adapter's files do not hold.

    `published` are the adapter's tensor names, as `peft` writes them. All numbers are converted to
    one `precision`, by default the narrowest one in the model. The digest begins with its name. So
    a base has the same digest whether it is loaded in bfloat16 for training or in float32 later.
    """
    own = {_base_name(name) for name in published}
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and _base_name(name) not in own
    }
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    # Wider numbers than float32 may be read back as float32.
    narrowest = min([torch.float32, *floats], key=lambda dtype: dtype.itemsize)
    precision = precision or str(narrowest).removeprefix("torch.")
    named = ((_base_name(name), tensor) for name, tensor in tensors.items())
    return f"{precision} {_named_digest(named, getattr(torch, precision))}"


def digest_precision(digest: str) -> str:
    """The precision in which the digest of a base was computed."""
    return digest.partition(" ")[0]


def _base_name(name: str) -> str:
    """The name of a tensor without the parts that `peft` adds when it wraps a layer."""
    name = name.removeprefix("base_model.model.")
    for part in (".base_layer", ".original_module", ".modules_to_save", ".default"):
        name = name.replace(f"{part}.", ".")
    return name.removesuffix(".default")


def _named_digest(named: Iterable[tuple[str, Tensor]], precision: torch.dtype | None = None) -> str:
    pairs = sorted(named, key=lambda pair: pair[0])

    def digest_of(tensor: Tensor) -> str:
        # Tensors are converted one at a time, so a second copy of all weights need not fit.
        convert = precision is not None and tensor.is_floating_point()
        return tensor_digest(tensor.to(precision) if convert else tensor)

    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(digest_of, [tensor for _, tensor in pairs]))
    whole = hashlib.sha256()
    for (name, _), digest in zip(pairs, digests, strict=True):
        whole.update(f"{name}|{digest}\n".encode())
    return whole.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """A digest of the optimizer's class, hyper-parameters, state, hooks and all attributes."""
    return _digest(described_optimizer(optimizer))


def code_digest(value: Any) -> str:
    """A digest of a function, a schedule or another object: all its code, and all that it holds."""
    return _digest(described(value))


def task_digest(task: Any) -> str:
    """A digest of a task's code, of its loss and of all that they hold."""
    return code_digest([task, task.record_loss, task.batch, task.encoding, task.encoding.encode])


def model_digest(model: nn.Module) -> str:
    """A digest of how a model computes, but not of where it was read from.

    It covers the configuration, and of every module the class, the plain attributes (such as the
    scaling of an adapter) and the hooks. Code outside torch, transformers and peft counts as such.
    """
    quantised = _version("bitsandbytes") if quantisation_of(model) is not None else ""
    return _digest([described_model(model), quantised])


def index_digest(index: UserIndex) -> str:
    """A digest of who owns which row. It is secret."""
    hashed = hashlib.sha256()
    arrays = [index.indptr, index.rows]
    # The fixed order of an index with one.
    arrays += [] if index.batches is None else [np.asarray(index.batches.shape), index.batches]
    for array in arrays:
        hashed.update(np.ascontiguousarray(array, "<i8").data)
    return hashed.hexdigest()


@functools.cache
def code_version() -> str:
    """The versions of what computes, and a digest of this package's source."""
    root = Path(userdp.__file__).parent
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    others = [f"{name} {_version(name)}" for name in COMPARED]
    return ", ".join([f"userdp {userdp.__version__} {hashed.hexdigest()[:16]}", *others])


def _version(name: str) -> str:
    try:
        return torch.__version__ if name == "torch" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def parts_version(parts: Iterable[Part]) -> str:
    """A digest of the code of every part from another package; empty if there is none."""
    kinds = [type(part) for part in parts if not is_our_own(part)]
    return code_digest([[kind, sys.modules[kind.__module__]] for kind in kinds]) if kinds else ""


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
