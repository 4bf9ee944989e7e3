"""The processes of a run: their number, and the few things that they tell each other.

Two ways of talking. Tensors of the model go through the process group that the caller or the
launcher made (NCCL on GPUs, gloo otherwise). Numbers, texts and the run's secret go through a gloo
group of our own, in memory and over the network between the ranks, which must be private. Nothing
of it is written or logged.

A rank that ends or hangs is named by the others. Before each exchange every rank writes to the
launcher's key-value store how many exchanges it has come to; whoever is behind is the one that is
missed.

With one process there is no group, and every method here does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from userdp.errors import InputError, StoppedRunError
from userdp.files.lock import Owner
from userdp.ranks.joining import begin_group, timeout_seconds
from userdp.ranks.telling import Told, retold
from userdp.ranks_launched import launched_ranks

Value = TypeVar("Value")

# How long the others wait while the first rank alone reads data or writes files.
PATIENCE = 86_400.0
# How often they look whether it is done, in seconds.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.25


class Ranks:
    """This process among those that train together. `rank` counts from 0; rank 0 is the first.

    Every method that talks is called by all ranks, in the same order. `bytes_added_up` counts what
    this rank handed to `added_up`, which is all that goes over the wire at a step but for a few
    numbers.
    """

    def __init__(self, *, rank: int = 0, count: int = 1, control: Any = None) -> None:
        self.rank = rank
        self.count = count
        self.bytes_added_up = 0
        self._control = control
        self._turn = 0
        self._store: Any = None
        if count > 1:
            named = "userdp ranks " + getattr(control, "group_name", "")
            default = dist.distributed_c10d._get_default_store()
            self._store = dist.distributed_c10d.PrefixStore(named, default)
            self._store.set(f"owner {rank}", json.dumps(asdict(Owner.me())))

    @staticmethod
    def alone() -> Ranks:
        """The only process."""
        return Ranks()

    @staticmethod
    def found() -> Ranks:
        """The ranks that this process belongs to, if it was launched as one of several.

        Under torchrun, accelerate, SLURM or Kubernetes, the environment says so (RANK, WORLD_SIZE,
        MASTER_ADDR, MASTER_PORT). A process group that is there already is used.
        """
        global _found, _is_ours
        if not dist.is_available():
            return Ranks.alone()
        if not dist.is_initialized():
            if launched_ranks() < 2:
                return Ranks.alone()
            begin_group()
            _is_ours = True
        if dist.get_world_size() == 1:
            return Ranks.alone()
        world = dist.group.WORLD
        if _found is None or _found[0] is not world:
            timeout = timedelta(seconds=timeout_seconds())
            control = dist.new_group(backend="gloo", timeout=timeout)
            ranks = Ranks(rank=dist.get_rank(), count=dist.get_world_size(), control=control)
            _found = (world, ranks)
            # Handlers can be given twice: only the last one finds something to do.
            atexit.register(_leave_at_exit)
            log = logging.getLogger("userdp")
            if not ranks.is_first and log.level == logging.NOTSET:
                # What all ranks would say, the first says.
                log.setLevel(logging.ERROR)
        return _found[1]

    @staticmethod
    def leave() -> None:
        """End the process group, if there is one. All ranks are done.

        A group ends when nothing refers to it any more; then its threads have ended, too. So these
        `Ranks` cannot talk any more, whoever still holds them.
        """
        global _found, _is_ours
        _let_go()
        _found, _is_ours = None, False
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def control(self) -> Any:
        """The process group for everything that lies in main memory."""
        return self._control

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and prints."""
        return self.rank == 0

    # What all ranks know afterwards.

    def by_first(self, make: Callable[[], Value]) -> Value:
        """What `make` returns on the first rank, which alone calls it. What it raises, all raise.

        The value must be one that can be pickled. It is not written anywhere. The others wait as
        long as it takes: the first may read a whole store meanwhile.
        """
        if self.count == 1:
            return make()
        told: list[Any] = [None]
        error: BaseException | None = None
        if self.is_first:
            try:
                told = [Told(value=make())]
            except BaseException as raised:
                error = raised
                told = [Told.of_error(raised, self.rank)]
        with self._exchange():
            self._wait_for_first()
            dist.broadcast_object_list(told, src=0, group=self._control)
        if error is not None:
            raise error
        if told[0].error is not None:
            raise retold(told[0])
        return told[0].value

    def on_first(self, make: Callable[[], Value]) -> Value | None:
        """Like `by_first`, but the other ranks do not get the value: they get None."""
        made: list[Value] = []
        self.by_first(lambda: made.append(make()))
        return made[0] if made else None

    def gathered(self, value: Value) -> list[Value]:
        """The value of every rank, in the order of the ranks."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        with self._exchange():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def numbers(self, own: Sequence[float]) -> NDArray[np.float64]:
        """The numbers of every rank, one row a rank. All ranks give equally many."""
        row = torch.tensor(list(own), dtype=torch.float64)
        if self.count == 1:
            return row[None].numpy()
        found = [torch.empty_like(row) for _ in range(self.count)]
        with self._exchange():
            dist.all_gather(found, row, group=self._control)
        return torch.stack(found).numpy()

    def tensors(self, own: Tensor) -> list[Tensor]:
        """The tensor of every rank, on the CPU. They may differ in their first dimension."""
        own = own.detach().cpu().contiguous()
        if self.count == 1:
            return [own]
        lengths = self.numbers([len(own)])[:, 0].astype(int).tolist()
        found = [own.new_empty((length, *own.shape[1:])) for length in lengths]
        found[self.rank] = own
        with self._exchange():
            for rank, tensor in enumerate(found):
                if len(tensor):
                    dist.broadcast(tensor, src=rank, group=self._control)
        return found

    # What fails or differs.

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What raises inside on one rank raises on all of them, at the end of the block.

        Inside, ranks do not talk to each other.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_together(error)

    def attempt(self, make: Callable[[], Value]) -> Callable[[], Value]:
        """Call `make` now. What it returns or raises comes when the result is asked for.

        So a rank that fails can say so where the others listen. A single process raises at once.
        """
        if self.count == 1:
            value = make()
            return lambda: value
        try:
            found = make()
        except Exception as raised:
            error = raised

            def fail() -> Value:
                raise error

            return fail
        return lambda: found

    def raise_together(self, error: Exception | None) -> None:
        """Raise the error of this rank, or else the error of the lowest rank that has one."""
        if self.count == 1:
            if error is not None:
                raise error
            return
        told = self.gathered(None if error is None else Told.of_error(error, self.rank))
        if error is not None:
            raise error
        for item in told:
            if item is not None:
                raise retold(item)

    def check_same(self, named: Mapping[str, str]) -> None:
        """Refuse to go on if a rank has another value than the first. All ranks raise."""
        found = self.gathered(dict(named))
        for rank, other in enumerate(found):
            # Also what one of the two does not have at all.
            names = {**found[0], **other}
            changed = [name for name in names if other.get(name) != found[0].get(name)]
            if changed:
                raise InputError(
                    f"rank {rank} has another {changed[0]} than rank 0: all ranks must be started "
                    "with the same command, files and versions. Make them alike and start again."
                )

    # What is computed together.

    def added_up(self, values: Tensor, size: int) -> Iterator[slice]:
        """Replace flat values by their sum over all ranks, `size` of them at a time.

        Gives each part as soon as its sum is there. The following ones are on their way meanwhile.
        The sums have the same bits on every rank. Their order, and so their rounding, depends on
        how many ranks there are.
        """
        if self.count == 1:
            yield slice(0, len(values))
            return
        parts = [slice(first, first + size) for first in range(0, len(values), max(1, size))]
        self.bytes_added_up += values.numel() * values.element_size()
        with self._exchange():
            group = self._for(values)
            sent = [dist.all_reduce(values[part], group=group, async_op=True) for part in parts]
            for part, work in zip(parts, sent, strict=True):
                assert work is not None
                work.wait()
                yield part

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by the first rank's."""
        if self.count == 1:
            return
        with torch.no_grad(), self._exchange():
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, src=0, group=self._for(dense))
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)

    def _for(self, tensor: Tensor) -> Any:
        """The group that moves this tensor."""
        if tensor.device.type == "cpu":
            return self._control
        try:
            dist.group.WORLD._get_backend(tensor.device)  # pyright: ignore
        except RuntimeError:
            raise InputError(
                f"the process group has no way to move tensors on {tensor.device.type}: make it "
                "with init_process_group('cpu:gloo,cuda:nccl'), or leave that to userdp."
            ) from None
        return dist.group.WORLD

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Say that this rank has come; if the exchange fails, say who has not."""
        self._turn += 1
        began = time.monotonic()
        try:
            self._store.set(f"turn {self.rank}", str(self._turn))
            yield
        except RuntimeError as error:
            raise StoppedRunError(self._missed(time.monotonic() - began)) from error

    def _wait_for_first(self) -> None:
        """Return when the first rank has come to this exchange, however long its work takes."""
        key = f"first at {self._turn}"
        if self.is_first:
            self._store.set(key, "")
            return
        began, pause = time.monotonic(), SHORTEST_PAUSE
        while not self._store.check([key]):
            is_over = time.monotonic() - began > PATIENCE
            if is_over or (pause >= LONGEST_PAUSE and self._owner(0).is_gone):
                raise RuntimeError("the first rank has ended or hangs")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _owner(self, rank: int) -> Owner:
        """Which process a rank is. Raises if it never came."""
        return Owner(**json.loads(self._read(f"owner {rank}")))

    def _read(self, key: str) -> str:
        """What a rank wrote. Never waits: what is not there by now, was not written."""
        if not self._store.check([key]):
            raise RuntimeError(f"{key} is not there")
        return self._store.get(key).decode()

    def _missed(self, waited: float) -> str:
        """Who did not come to this exchange, in words."""
        behind: list[str] = []
        for rank in range(self.count):
            try:
                owner, turn = self._owner(rank), int(self._read(f"turn {rank}"))
                is_behind = turn < self._turn or owner.is_gone
                name = f"process {owner.pid} on host {owner.host}"
            except RuntimeError:
                is_behind, name = True, "which never came"
            if is_behind:
                behind.append(f"rank {rank} ({name})")
        who = " and ".join(behind) or "another rank"
        has = "have" if len(behind) > 1 else "has"
        return (
            f"rank {self.rank} waited {waited:,.0f} s: {who} {has} ended or hangs. What is charged "
            "is in the ledger. Mend that, then go on with the same command and --resume."
        )


_found: tuple[Any, Ranks] | None = None
# Whether the process group was made here, not by the caller.
_is_ours = False


def _let_go() -> None:
    """End the group for numbers and texts."""
    if _found is None:
        return
    ranks = _found[1]
    control, ranks._control = ranks._control, None
    if control is not None and dist.is_initialized() and dist.group.WORLD is _found[0]:
        dist.destroy_process_group(control)


def _leave_at_exit() -> None:
    """End gloo's threads while Python still runs.

    They hold the tensors of the last exchange for a moment after it. A thread that lets go of a
    tensor while the interpreter ends aborts the whole process, and a run that went well would count
    as failed. Groups over NCCL are left alone: ending one may wait for a rank that is lost.
    """
    _let_go()
    if _is_ours and dist.is_initialized() and dist.get_backend() == "gloo":
        Ranks.leave()
