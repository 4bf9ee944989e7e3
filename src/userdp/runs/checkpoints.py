"""Checkpoints: everything that the next step needs, whole or not at all, and only as it was saved.

    RUN/checkpoints/initial/       before the first step, where no file of a model has these weights
    RUN/checkpoints/step-000050/   after 50 steps
        weights.safetensors        trained weights
        state.safetensors          tensors of the optimizer, the schedule, the clip rule, the noise
        state.json                 everything else of these
        manifest.json              step, ledger position, checksums, the owner's mark

Samplers and streams have no state, so nothing is replayed: resuming takes the same time at any
step. There is no pickle. The mark is made with the key of the run's ledger. Whoever lacks the key
cannot change a checkpoint unnoticed: other weights at a step that is repeated with its old noise
would show that step's data.

Saving runs beside the training: the tensors are copied, and a thread writes the copy.

Secret: a noise may remember its own numbers here. Other people must not see this directory.
"""

from __future__ import annotations

import hmac
import json
import platform
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from userdp.data.array_files import file_digest
from userdp.errors import InputError, LedgerError
from userdp.files.chain import canonical, read_key
from userdp.files.durable import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE, new_directory
from userdp.files.remembered import CHECKPOINTS, checkpoint_places, mark
from userdp.files.shards import load_shards

FORMAT = 1
# Each rank's rows are in a file of its own.
SHARDED_FORMAT = 2
FILES = ("weights.safetensors", "state.safetensors", "state.json")
INITIAL = "initial"
# What damaged files raise.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError)
UNREADABLE += (SafetensorError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A run between two steps: `step` steps are done, and the ledger's last row has hash `head`."""

    step: int
    head: str
    weights: Mapping[str, Tensor]
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When checkpoints are saved, and how many are kept.

    One is due every `every_steps` steps. If that is not given, one is due every `every_minutes`.
    If `asked` is given, it alone says after each step whether one is due.
    """

    every_steps: int | None = None
    every_minutes: float = 5.0
    keep: int = 2
    asked: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise InputError(f"checkpoint_every={self.every_steps}: save after 1 step or more.")
        if self.keep < 1:
            raise InputError(f"keep_checkpoints={self.keep}: keep at least one to go on from.")


class Checkpoints:
    """The checkpoints of one run. `key` is the key of the run's ledger."""

    def __init__(self, directory: Path, key: bytes, saving: Saving | None = None) -> None:
        self.directory = directory
        self._key = key
        self._saving = saving or Saving()
        # Not the clock on the wall, which may jump.
        self._last_save = time.monotonic()
        # The steps of the moment that was saved last by this object.
        self.last_step = -1
        # Not the thread's own `join`: if a signal interrupts that, it takes the thread for stopped.
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._failure: BaseException | None = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint should be saved after `step` steps."""
        if self._saving.asked is not None:
            return self._saving.asked()
        if self._saving.every_steps is not None:
            return step % self._saving.every_steps == 0
        return time.monotonic() - self._last_save >= 60 * self._saving.every_minutes

    def save(self, moment: Moment) -> None:
        """Copy the moment now and write it while the run goes on. A failed save is raised later."""
        self.wait()
        self._last_save = time.monotonic()
        tree, tensors = packed(moment.state)
        copied = Moment(
            step=moment.step,
            head=moment.head,
            weights={name: _copy(tensor) for name, tensor in moment.weights.items()},
        )
        copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._is_idle.clear()
        threading.Thread(
            target=self._write_quietly, args=(copied, tree, copies), name="userdp-checkpoint"
        ).start()

    def join(self) -> None:
        """Return when the last save has ended, well or not."""
        self._is_idle.wait()

    def wait(self) -> None:
        """Return when the last save is on disk; raise if it failed."""
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_quietly(self, moment: Moment, tree: Any, tensors: dict[str, Tensor]) -> None:
        try:
            self._write(_name(moment.step), moment, tree, tensors)
            self.after_saving(moment.step)
        except BaseException as error:
            self._failure = error
        finally:
            self._is_idle.set()

    @contextmanager
    def new_shards(self, step: int) -> Iterator[Path]:
        """A directory that all ranks write their rows into (`sharding.saved`)."""
        self.wait()
        self._last_save = time.monotonic()
        self.directory.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        with new_directory(self.directory / _name(step), mode=OWNER_ONLY_DIRECTORY) as partial:
            yield partial

    def end_shards(self, partial: Path, moment: Moment, tree: Any) -> None:
        """Write what belongs to the rows in the directory: all but the tensors."""
        (partial / FILES[2]).write_text(json.dumps(tree, sort_keys=True), encoding="utf-8")
        names = sorted(path.name for path in partial.iterdir())
        self._seal(partial, _name(moment.step), moment, names, SHARDED_FORMAT)

    def after_saving(self, step: int) -> None:
        """Note what was saved, and remove old checkpoints, also of saves that a kill ended."""
        self.last_step = step
        for old in (*self._saved()[self._saving.keep :], *self.directory.glob(".*.partial")):
            shutil.rmtree(old, ignore_errors=True)

    def save_initial(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Keep what the run begins with, where a new process could not make it again."""
        self._write(INITIAL, Moment(step=0, head="", weights=weights), *packed(state))

    def _write(self, name: str, moment: Moment, tree: Any, tensors: dict[str, Tensor]) -> None:
        self.directory.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        with new_directory(self.directory / name, mode=OWNER_ONLY_DIRECTORY) as partial:
            for file, values in zip(FILES[:2], (moment.weights, tensors), strict=True):
                save_file({key: _plain(value) for key, value in values.items()}, partial / file)
            (partial / FILES[2]).write_text(json.dumps(tree, sort_keys=True), encoding="utf-8")
            self._seal(partial, name, moment, FILES, FORMAT)

    def _seal(
        self, partial: Path, name: str, moment: Moment, files: Sequence[str], kind: int
    ) -> None:
        manifest = {
            "format": kind,
            "name": name,
            "step": moment.step,
            "head": moment.head,
            "sha256": {file: file_digest(partial / file) for file in files},
        }
        manifest["mark"] = self._mark(manifest)
        # The manifest comes last: a directory without one was never finished.
        (partial / "manifest.json").write_text(canonical(manifest) + "\n", encoding="utf-8")
        for path in partial.iterdir():
            path.chmod(OWNER_ONLY_FILE)

    def _mark(self, manifest: Mapping[str, Any]) -> str:
        return mark(self._key, manifest)

    def _saved(self) -> list[Path]:
        """The directories of steps, newest first."""
        return checkpoint_places(self.directory)

    def initial(self) -> Moment | None:
        """What the run began with, if it was kept."""
        found = self.directory / INITIAL
        return self._load(found) if found.is_dir() else None

    def newest(self, step: int | None = None) -> Moment | None:
        """The last sound checkpoint, or the one after just `step` steps.

        A damaged one is passed over with a warning; the one before it repeats a few more steps.
        None if there is none.
        """
        for path in self._saved():
            if step is not None and path.name != _name(step):
                continue
            try:
                return self._load(path)
            except LedgerError as error:
                warnings.warn(f"{error} The checkpoint before it is used.", stacklevel=2)
        return None

    def _load(self, path: Path) -> Moment:
        """A checkpoint that is exactly as it was saved; anything else is refused."""
        try:
            written = (path / "manifest.json").read_text(encoding="utf-8")
            manifest = cast("dict[str, Any]", json.loads(written))
            exact = canonical(manifest) + "\n" == written
            sound = exact and hmac.compare_digest(str(manifest["mark"]), self._mark(manifest))
            sound = sound and manifest["name"] == path.name
            sums: dict[str, str] = manifest["sha256"] if sound else {}
            sound = sound and _are_known(sums, manifest["format"], path)
            broken = [name for name in sums if file_digest(path / name) != sums[name]]
            if not sound or broken:
                named = broken[0] if broken else "manifest.json"
                raise LedgerError(f"{path / named}: damaged, or not written by this run.")
            tree = json.loads((path / FILES[2]).read_text(encoding="utf-8"))
            if manifest["format"] == SHARDED_FORMAT:
                weights, tensors = load_shards(path)
            else:
                weights, tensors = (load_file(path / file) for file in FILES[:2])
            return Moment(
                step=manifest["step"],
                head=manifest["head"],
                weights=weights,
                state=unpacked(tree, tensors),
            )
        except LedgerError:
            raise
        except UNREADABLE:
            raise LedgerError(f"{path}: this checkpoint cannot be read.") from None


def _are_known(sums: Mapping[str, str], kind: Any, path: Path) -> bool:
    """Whether a manifest has exactly the files that its kind has."""
    if kind == FORMAT:
        return sorted(sums) == sorted(FILES)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    return kind == SHARDED_FORMAT and sorted(sums) == sorted([*shards, FILES[2]])


def hardware_of(device: torch.device) -> str:
    """What sums and noise depend on: the chip, how work is split on it, and who draws numbers.

    A later numpy may draw other normal numbers from the same stream.
    """
    numbers = f"numpy {np.__version__}"
    if device.type == "cuda":
        chip = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            # The caller used only the newer setting. Then torch refuses to read the older one.
            precision = str(torch.backends.cuda.matmul.fp32_precision)
        return f"{chip}, {precision} precision of products, {numbers}"
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads"
    return f"{device.type} {_processor()} {capability}, {threads}, {numbers}"


def _processor() -> str:
    """The name of the processor: libraries choose by it in which order they add."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def check_saveable(state: Any) -> None:
    """Refuse, before the first step, a state that cannot be written without running code later."""
    packed(state)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def packed(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Nested plain data as JSON, in which tensors are named, and the tensors by name."""
    tensors: dict[str, Tensor] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"tensor{len(tensors)}"
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, float):
            # Hexadecimal keeps every bit, and infinities.
            return {"float": value.hex()}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {"items": [[pack(name), pack(entry)] for name, entry in items]}
        if isinstance(value, list | tuple):
            entries = [pack(entry) for entry in cast("list[Any]", value)]
            return {"tuple": entries} if isinstance(value, tuple) else entries
        raise InputError(
            f"the state of the optimizer, the schedule or a part holds a {type(value).__name__}, "
            "which cannot be saved in a checkpoint: only numbers, text, lists, tables and tensors "
            "can."
        )

    return pack(state), tensors


def unpacked(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` was given."""
    if isinstance(tree, list):
        return [unpacked(entry, tensors) for entry in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = cast("dict[str, Any]", tree).items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "tuple":
        return tuple(unpacked(entry, tensors) for entry in content)
    if kind == "items":
        return {unpacked(name, tensors): unpacked(entry, tensors) for name, entry in content}
    raise ValueError(kind)


def checkpoints_of(run: Path, saving: Saving | None = None) -> Checkpoints:
    """The checkpoints of the run in this directory."""
    key = read_key(run / "ledger.jsonl")
    if key is None:
        raise LedgerError(f"{run / 'secret'} lacks the run's key: no checkpoint can be trusted.")
    return Checkpoints(run / CHECKPOINTS, key, saving)
