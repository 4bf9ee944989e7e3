"""Local training of many users at once: each has a copy of the weights, and all train together.

The users of a microbatch stand side by side in stacked tensors (user, ...). One vectorised program
takes a local step for all of them, each on its own copy and its own records. Users of fewer records
have fewer local steps, and their copies rest while others go on. Users of similar size share a
microbatch, so that little is computed for nobody.

`updates.fedavg` trains one user at a time. It is the oracle: both must give the same updates, up to
rounding. Where a model cannot be vectorised, the oracle takes over.

Shapes: U users, B records of a local batch. Everything is secret until noise is added.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.batches.users import kind_of
from userdp.clipping.execute.execution import Execution
from userdp.clipping.execute.models import most_positions
from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.clipping.plain import Failures, PlainClipping
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.clipping.stacked.clip import StackedClip
from userdp.clipping.stacked.lora import StackedAdapters, stacked_adapters
from userdp.clipping.stacked.lstm import StackedLSTM, stacked_lstm
from userdp.clipping.stacked.records import StackedRecords, lengths_of
from userdp.clipping.stacked.vectorised import Vectorised
from userdp.clipping.stacked.workers import in_order, num_workers
from userdp.losses import Batch, RecordLoss, at_least_float32, records_in
from userdp.sharded_tensors import is_divided
from userdp.updates.contract import LocalTraining

_LOG = logging.getLogger(__name__)

# At most this many numbers stand side by side in the copies of a microbatch. A local step holds
# about four tensors of this size: weights, gradients, and both while they are clipped.
_MOST_STACKED = {"cpu": 2**26, "cuda": 2**31}
_MOST_USERS = 1024
# On a processor, copies of larger models leave the cache, and users train faster one by one
# (docs/fedavg.md).
_LARGEST_ON_CPU = 2**18
# At most this many numbers of one tensor stand side by side in the records of a microbatch. A user
# with more records is stacked in parts, so that the memory of a step follows from public numbers.
_MOST_CELLS = 2**25
# At most this many tokens go through a model with adapters at once, on a processor and on CUDA. On
# a processor more would gain nothing.
_MOST_TOKENS = (2**12, 2**15)
# The length of records if nobody says it, as in the probe.
_USUAL_LENGTH = 128


class LocalClipping:
    """Computes the clipped sum of a cohort whose users train locally."""

    def __init__(
        self,
        plain: PlainClipping,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        update: LocalTraining,
        *,
        record_loss: RecordLoss,
        settings: StepSettings,
        sequence_length: int | None = None,
    ) -> None:
        self._plain = plain
        self._parameters = list(parameters)
        self._update = update
        self._compute_dtype = settings.compute_dtype
        self._clip = StackedClip(model, self._parameters)
        device = self._parameters[0].device.type
        # Gathering weights cannot be compiled, and copies of shards move in memory.
        may_compile = device == "cuda" and not is_divided(model)
        self._compiles = may_compile if settings.compile_blocks is None else settings.compile_blocks
        copies = sum(parameter.numel() for parameter in self._parameters)
        stacked = _MOST_STACKED.get(device, _MOST_STACKED["cpu"])
        self._most_users = max(1, min(_MOST_USERS, stacked // copies))
        self._vectorised = Vectorised(
            model,
            self._parameters,
            update,
            self._clip,
            record_loss=record_loss,
            compute_dtype=settings.compute_dtype,
            compiles=self._compiles,
        )
        self.skip_failing = False
        self.differs = False
        # The word LSTM has a program of its own, which is faster than the vectorised model.
        self._lstm: StackedLSTM | None = None
        if update.descent is not None and settings.compute_dtype is None:
            self._lstm = stacked_lstm(model, self._parameters, record_loss, update.descent)
        # On a CPU each worker has its own copy of the program.
        self._lstms = [self._lstm]
        # Adapters on a frozen model have their own program, too: the base runs once for all users.
        self._adapters: StackedAdapters | None = None
        if update.descent is not None and self._lstm is None:
            self._adapters = stacked_adapters(model, self._parameters, update.descent)
        # torch's recurrent layers keep a list of their weights outside of their parameters, which
        # cannot be exchanged.
        self._has_copies = not any(isinstance(m, nn.RNNBase) for m in model.modules())
        if self._lstm is None and self._adapters is None:
            self._has_copies &= device != "cpu" or copies <= _LARGEST_ON_CPU
        # The kinds of rows on which the model cannot be vectorised. One user's odd rows must not
        # decide how those of others are computed.
        self._alone: set[str] = set()
        self._longest = sequence_length or most_positions(model) or _USUAL_LENGTH
        if self._lstm is not None:
            self._most_users = self._lstm.most_users(self._longest * update.local_batch_size)
        if self._adapters is not None:
            tokens = settings.microbatch_tokens or _MOST_TOKENS[device == "cuda"]
            at_once = tokens // (self._longest * update.local_batch_size)
            self._most_users = max(1, min(self._most_users, at_once))
        self._record_loss, self._model = record_loss, model

    @property
    def trains_many_at_once(self) -> bool:
        """Whether users of every kind of rows seen so far trained side by side."""
        return self._has_copies and not self._alone

    def state_dict(self) -> dict[str, Any]:
        """Whose rows train one user at a time. A step that is repeated must round as it did."""
        return {"alone": sorted(self._alone)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._alone = set(state.get("alone", ()))

    def clipped_sum(self, groups: Iterable[Batch], rule: ClipRule) -> ClippedSum:
        """The weighted sum of the users' clipped updates. Secret."""
        listed = [group for group in groups if records_in(group)]
        total = FlatBuffer(self._parameters)
        within, weight = 0, 0.0
        failures = Failures(self.skip_failing)
        self._clip.use(rule)
        left: list[Batch] = []
        for users, found in self._found(listed, rule):
            if found is None:
                left += users
                continue
            for view, tensor in zip(total.views, found.sums, strict=True):
                view += tensor
            within, weight = within + found.num_within, weight + found.weight
        if left:
            # After the others: a user who trains alone does so in the model itself, which workers
            # read.
            self._plain.skip_failing = self.skip_failing
            alone = self._plain.clipped_sum(left, rule, failures=failures)
            total.values += alone.total.values
            within, weight = within + int(alone.num_within), weight + alone.total_weight
        failures.warn_if_all_failed(len(listed))
        return ClippedSum(
            total=total, num_within=torch.tensor(within), num_updates=len(listed), weight=weight
        )

    def _microbatches(self, groups: Sequence[Batch]) -> Iterator[list[Batch]]:
        """Users of the same kind and similar size together, as many as their copies have room.

        Nobody's names, dtypes or shapes change the rows of others.
        """
        kinds: dict[str, list[Batch]] = {}
        for group in groups:
            kinds.setdefault(kind_of(group), []).append(group)
        for alike in kinds.values():
            ordered = sorted(alike, key=records_in)
            for first in range(0, len(ordered), self._most_users):
                yield ordered[first : first + self._most_users]

    def _found(
        self, groups: Sequence[Batch], rule: ClipRule
    ) -> Iterator[tuple[list[Batch], _Trained | None]]:
        """Each microbatch and what is found of it; None if its users must train one at a time."""
        microbatches = list(self._microbatches(groups))
        if not self._has_copies:
            yield from ((users, None) for users in microbatches)
            return
        alone = self._alone
        if self._lstm is not None and self._parameters[0].device.type == "cpu":
            self._lstms += [self._lstm.another() for _ in range(num_workers() - len(self._lstms))]
            # Who trains alone must not depend on which worker is the first.
            alone = frozenset(alone)
        programs = self._lstms[: num_workers()]

        def job(users: list[Batch], lstm: StackedLSTM | None) -> _Trained | None:
            return None if kind_of(users[0]) in alone else self._trained(users, rule, lstm)

        yield from zip(microbatches, in_order(job, microbatches, programs), strict=True)

    def _trained(
        self, users: list[Batch], rule: ClipRule, lstm: StackedLSTM | None
    ) -> _Trained | None:
        """The users' clipped and weighted updates, added up; None if they cannot be stacked."""
        try:
            way = self._ways(users, rule, lstm)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # What cannot be vectorised fails for all such rows, so it is not tried again. Users
            # whose own data fails are found when they run alone.
            if not self._is_data_fault(users, rule, lstm):
                self._alone.add(kind_of(users[0]))
                _LOG.warning(
                    "users train one at a time: this model cannot be vectorised (%s).",
                    type(error).__name__,
                )
            return None
        weights = [self._update.weight(records_in(group)) for group in users]
        sums, squared = self._summed(way, rule, weights, lstm)
        return _Trained(
            sums=sums,
            num_within=int((squared.sum(0).sqrt() <= rule.clip_norm).sum()),
            weight=sum(weights),
        )

    def _summed(
        self,
        way: list[Tensor] | None,
        rule: ClipRule,
        weights: list[float],
        lstm: StackedLSTM | None,
    ) -> tuple[list[Tensor], Tensor]:
        """The users' updates -way, weighted and added up, and the squared norms (layers, users).

        They are clipped once more, as those of every other path are.
        """
        if way is None:
            assert lstm is not None
            eps = torch.finfo(self._parameters[0].dtype).eps
            factors, squared = self._clip.factors(lstm.squared_ways(), rule, eps)
            return lstm.summed_ways(-factors * factors.new_tensor(weights)), squared
        clipped, squared = self._clip.clipped([-tensor for tensor in way], rule)
        factors = torch.tensor(weights, dtype=clipped[0].dtype, device=clipped[0].device)
        return [torch.tensordot(factors, tensor, dims=1) for tensor in clipped], squared

    def _is_data_fault(self, users: list[Batch], rule: ClipRule, lstm: StackedLSTM | None) -> bool:
        """Whether made-up records of the same shapes pass: then these users' data is at fault."""
        made_up = [{name: torch.zeros_like(t) for name, t in group.items()} for group in users]
        try:
            self._ways(made_up, rule, lstm)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:
            return False
        return True

    def _ways(
        self, users: Sequence[Batch], rule: ClipRule, lstm: StackedLSTM | None
    ) -> list[Tensor] | None:
        """theta - theta^0 of every user after its local training (Alg. 1, UserUpdateFedAvg).

        None if the LSTM's program keeps them, to add them up itself.
        """
        if lstm is not None:
            self._train_lstm(lstm, users, rule)
            return None
        if self._adapters is not None:
            return self._adapter_ways(self._adapters, users, rule)
        device = self._parameters[0].device
        # Compiled code is for one number of users, so places without a user fill up the last
        # microbatch.
        places = self._most_users if self._compiles else len(users)
        lengths = self._lengths(users)
        start = [at_least_float32(parameter.detach()) for parameter in self._parameters]
        way = [tensor.new_zeros((places, *tensor.shape)) for tensor in start]
        clip_norm = torch.tensor(rule.clip_norm, dtype=torch.float64, device=device)
        step = self._vectorised.step_of(rule)
        for stacked, number in self._local_batches(users, places, lengths):
            with warnings.catch_warnings():
                # Some operations are computed user by user, and torch says so each time.
                warnings.filterwarnings("ignore", "There is a performance drop")
                way = step(way, start, *stacked.local_batch(number), clip_norm)
        return [tensor[: len(users)] for tensor in way]

    def _train_lstm(self, lstm: StackedLSTM, users: Sequence[Batch], rule: ClipRule) -> None:
        """Train the users by the LSTM's own program, which keeps their ways."""
        eps = torch.finfo(self._parameters[0].dtype).eps
        lstm.start(len(users))
        for stacked, number in self._local_batches(users, len(users), lengths_of(users, None)):
            batch, mask_UB, _ = stacked.local_batch(number)
            lstm.step(
                batch["input_ids"],
                batch["labels"],
                mask_UB,
                resting=stacked.resting(number),
                factors=lambda squares: self._clip.factors(squares, rule, eps)[0],
            )

    def _adapter_ways(
        self, adapters: StackedAdapters, users: Sequence[Batch], rule: ClipRule
    ) -> list[Tensor]:
        """The users' ways, by one model that holds all users' adapters."""
        eps = torch.finfo(at_least_float32(self._parameters[0]).dtype).eps
        places = self._most_users if self._compiles else len(users)
        lengths = self._lengths(users)
        execution = Execution.choose(
            self._model,
            self._record_loss,
            length=max(lengths.values(), default=1),
            compute_dtype=self._compute_dtype,
            compile_blocks=self._compiles,
        )
        with adapters.started(places, execution):
            for stacked, number in self._local_batches(users, places, lengths):
                adapters.step(
                    *stacked.local_batch(number),
                    execution=execution,
                    by_parameter=rule.by_layer,
                    factors=lambda squares: self._clip.factors(squares, rule, eps)[0],
                )
        return [tensor[: len(users)] for tensor in adapters.ways()]

    def _lengths(self, users: Sequence[Batch]) -> dict[str, int]:
        """How long records are made: as they are, or few lengths where code is compiled."""
        return lengths_of(users, self._longest if self._compiles else None)

    def _local_batches(
        self, users: Sequence[Batch], places: int, lengths: dict[str, int]
    ) -> Iterator[tuple[StackedRecords, int]]:
        """The local batches of all epochs: the records they are in, and their number there."""
        size = self._update.local_batch_size
        cells = places * size * max(lengths.values(), default=1)
        rows = size * max(1, _MOST_CELLS // cells)
        most = max(map(records_in, users))
        parts = [slice(first, first + rows) for first in range(0, most, rows)]
        stacked: StackedRecords | None = None
        for _ in range(self._update.local_epochs):
            for part in parts:
                if stacked is None or len(parts) > 1:
                    device = self._parameters[0].device
                    stacked = StackedRecords.of(users, part, size, places, device, lengths)
                for number in range(stacked.most_batches):
                    yield stacked, number


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The weighted sum of a microbatch's updates, and what is counted about them."""

    sums: list[Tensor]
    num_within: int
    weight: float
