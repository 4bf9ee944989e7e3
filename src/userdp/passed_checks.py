"""Checks that passed before on this machine, so that a later run need not repeat them.

In an architecture that is proven by tests, the probe and the comparisons with the plain loop look
for what tests cannot see: a device, a driver or a compiler that computes wrongly. Their outcome
depends on the code, the versions, the device, the weights and the shapes, and not on anybody's
data. On a GPU they take much of the time until a run is at full speed. So a check that passed is
remembered under a digest of all that it depends on. If any of that changes, the check runs again.
Of the weights, those that a run begins with count: shapes that come later are compared with the
weights of their step, and those differ from run to run.

A model that is not proven, a loss or an update of one's own, and a run on several ranks are checked
every time. So is newly compiled code (`ComparedShapes`). `userdp verify` remembers nothing.

The files are empty: only their names count. Batch shapes are secret, so only their digests are
kept, where nobody else can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.digests import code_version, model_digest, weights_digest
from userdp.losses import RecordLoss, causal_lm_loss
from userdp.models.proven import is_proven
from userdp.updates.contract import UpdateRule


class PassedChecks:
    """The checks that passed under one digest."""

    def __init__(self, digest: str, folder: Path | None = None) -> None:
        self._digest = digest
        self._folder = usual_folder() if folder is None else folder

    def has(self, what: str) -> bool:
        """Whether this check has passed."""
        return self._place(what).is_file()

    def note(self, what: str) -> None:
        """Remember that this check has passed. Where nothing can be written, nothing is."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place(what).touch(mode=0o600)

    def _place(self, what: str) -> Path:
        return self._folder / hashlib.sha256(f"{self._digest}\n{what}".encode()).hexdigest()


def usual_folder() -> Path:
    """Where programs of this user keep what they can make again."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "userdp" / "passed"


def read_once(model: nn.Module) -> Callable[[], str]:
    """Gives the digest of the weights as they are when it is first asked for."""
    return functools.cache(functools.partial(weights_digest, model))


def passed_checks_of(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    *,
    update: UpdateRule,
    rule: ClipRule,
    record_loss: RecordLoss,
    settings: StepSettings,
    sizes: Sequence[int | None],
    weights: Callable[[], str],
) -> PassedChecks | None:
    """The checks of this model as it is now; None where every run repeats them.

    `sizes` are the public numbers that made-up rows depend on. `weights` gives the digest of the
    weights that the run begins with.
    """
    device = parameters[0].device
    if not (_saves_time(device) and settings.check and settings.path == "fast"):
        return None
    if not update.is_mean_gradient or record_loss is not causal_lm_loss or not is_proven(model):
        return None
    words = _words_of(device)
    if words is None:
        return None
    trained = {id(parameter) for parameter in parameters}
    described = [
        code_version(),
        _triton_version(),
        words,
        model_digest(model),
        # An infinite clip norm is another kind of rule: it clips nothing.
        f"{type(rule).__qualname__} {rule.bounds_updates}",
        repr(settings),
        repr([*sizes]),
        repr([m.training for m in model.modules()]),
        weights(),
        repr([(n, p.shape, p.dtype, id(p) in trained) for n, p in model.named_parameters()]),
        repr([(n, b.shape, b.dtype) for n, b in model.named_buffers()]),
    ]
    return PassedChecks(hashlib.sha256("\n".join(described).encode()).hexdigest())


def _saves_time(device: torch.device) -> bool:
    """Elsewhere the checks take little time beside a step."""
    return device.type == "cuda"


def _words_of(device: torch.device) -> str | None:
    """The device, its driver, and the switches of torch that decide how it computes.

    None if the driver's version cannot be read: then nothing is remembered.
    """
    switches = [
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    ]
    if device.type != "cuda":
        return f"{device.type} {switches}"
    driver = _driver_version()
    if driver is None:
        return None
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} {found.major}.{found.minor} {driver} {torch.version.cuda} {switches}"


def _driver_version() -> str | None:
    """The version of NVIDIA's driver, as its own library tells it."""
    length = 96
    found = ctypes.create_string_buffer(length)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(found, length)
    except (OSError, AttributeError):
        return None
    return None if failed else found.value.decode()


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"
