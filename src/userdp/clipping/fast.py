"""The clipped sum of a cohort, fast: batches of users in one backward pass each, large ones alone.

Everything adds up in one flat float32 buffer (float64 for float64 models) that the noise is added
to; of a cohort of one batch, that sets it, which saves clearing and reading it. On CUDA the model's
blocks are compiled and each batch shape is captured as a graph, so that no step waits for the host.

Before the first batch of a shape counts, a batch of made-up values in that shape is compared with
the plain loop. Every new shape is, unless the model's architecture is proven by tests and nothing
is compiled. Ragged cohorts bring new shapes at every step, and the same code runs them all: there
the 1st, 2nd, 4th, 8th, ... new shape is compared, and each that has more rows or longer ones than
all that were compared before.

What one user's data decides concerns that user alone: whether its own records are joined into fewer
rows, or that it counts as zero because the model cannot read it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.any_layer import AnyLayer
from userdp.clipping.checkpointed import blocks_of
from userdp.clipping.compiled import Execution, Graph, has_aligned_head, most_positions, padded_rows
from userdp.clipping.computed import refuse_computed_weights
from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.clipping.joined import USUAL_ROW, can_join, is_joined, joined, worth_joining
from userdp.clipping.made_up import disguised, own_groups
from userdp.clipping.mixed import Sizes, pack_runs
from userdp.clipping.module_state import ModuleState
from userdp.clipping.one_pass import OnePass, look_at
from userdp.clipping.one_user import OneUser
from userdp.clipping.pack import Users, has_tokens, pack, power_of_two, size_of
from userdp.clipping.plain import Failures, PlainClipping
from userdp.clipping.recurrent import Lstm
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.clipping.survey import Survey, find_layers
from userdp.clipping.verify import NothingFiniteError, compare_with_plain, refuse_dropout
from userdp.errors import InputError, MixedExamplesError
from userdp.losses import Batch, RecordLoss, Update, joined_lm_loss

Step = Callable[[Users], Any]
_LOG = logging.getLogger(__name__)

# Padded tokens in one backward pass: enough to fill the device, few enough to fit.
CUDA_TOKENS = 16_384
CPU_TOKENS = 2_048
# The longest records that may share a row where nobody declared how long records are.
USUAL_LENGTH = 1_024
# Sets of made-up values to try until one has a finite gradient.
DISGUISES = 8
# Batch shapes remembered where remembering saves little.
EAGER_STEPS = 64
# Stored per-user gradients in one backward pass: bytes on the CPU, a share of the memory on CUDA.
CPU_STORED_BYTES = 1 << 29
CUDA_STORED_SHARE = 0.3
# Parameters of layers without a cheaper form, up to which users of unlike size share batches: their
# gradients are then stored for every row.
MOST_BY_ROW = 2**21


class FastClipping:
    """Clipped sums of cohorts, as the plain loop would give them.

    `sequence_length` is how long records may be, a public number; `skip_failing` as in
    `PlainClipping`; `every_shape` compares every new shape of batch with the plain loop. `differs`
    says that the two were seen to differ: from then on the plain loop does the work.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        rule: ClipRule,
        *,
        record_loss: RecordLoss,
        settings: StepSettings | None = None,
        sequence_length: int | None = None,
        every_shape: bool = True,
    ) -> None:
        settings = settings or StepSettings()
        refuse_computed_weights(model)
        self.skip_failing = False
        self.differs = False
        self._model = model
        self._state = ModuleState(model)
        self._parameters = list(parameters)
        self._rule = rule
        self._record_loss = record_loss
        self._device = self._parameters[0].device
        on_cuda = self._device.type == "cuda"
        self._compile = on_cuda if settings.compile_blocks is None else settings.compile_blocks
        self._graphs = self._compile and on_cuda
        self._dtype = settings.compute_dtype
        self._merge_lora = settings.merge_lora
        self._checkpoint = settings.checkpoint_blocks
        if self._checkpoint:
            blocks_of(model)  # Raises now, not at the first step, if there are none.
        self._check = settings.check
        self._every_shape = every_shape
        self._num_shapes = 0
        # The most rows and the longest ones that were compared, and in which shapes.
        self._largest = (0, 0)
        self._compared: set[Any] = set()
        self._max_tokens = settings.microbatch_tokens or (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        self._max_users = None if on_cuda else self._stored_users()
        half = (self._dtype or self._parameters[0].dtype) == torch.bfloat16
        mixes = self._graphs and half and has_aligned_head(model, record_loss)
        mixes = mixes and _stores_little_by_row(model)
        self._mix = mixes if settings.mix_sizes is None else settings.mix_sizes
        self._mix_anything = settings.mix_sizes is True
        self._max_length = most_positions(model)
        self._sizes = Sizes(
            max_tokens=self._max_tokens,
            max_users=self._stored_users(),
            max_short_users=None if on_cuda else self._stored_users(),
            max_length=self._max_length,
        )
        self._sequence_length = sequence_length
        self._join_all = settings.join_records is True
        # None: not tried yet.
        self._can_join = False if settings.join_records is False else None
        if self._join_all:
            refuse_dropout(model)
            self._refuse_if_it_cannot_join()
        self._total = FlatBuffer(self._parameters, padded_rows(model) if self._compile else None)
        # Whether the cohort is one batch, which then sets the total, whatever lies there.
        self._sets = False
        # On the device, where captured steps read and write them.
        self._clip_norm = torch.tensor(1.0, dtype=self._total.values.dtype, device=self._device)
        self._num_within = torch.zeros((), dtype=torch.int64, device=self._device)
        # Made when a user larger than a batch comes.
        self._large_total: FlatBuffer | None = None
        self._large = OneUser(model, parameters, rule)
        self._surveys: dict[Any, Survey] = {}
        self._steps: dict[Any, Step] = {}
        self._pool: Any = None

    def _stored_users(self) -> int:
        """Users whose stored gradients fit the device's allowance."""
        count = sum(p.numel() for p in self._parameters)
        if self._device.type != "cuda":
            return max(1, CPU_STORED_BYTES // (count * self._parameters[0].element_size()))
        _, memory = torch.cuda.mem_get_info(self._device)
        size = (self._dtype or self._parameters[0].dtype).itemsize
        return max(2, int(CUDA_STORED_SHARE * memory) // (count * size))

    def clipped_sum(self, groups: Iterable[Batch], rule: ClipRule) -> ClippedSum:
        """The sum over the groups; overwritten by the next call. Secret.

        `rule` is the one given at first, or that with another clip norm.
        """
        assert type(rule) is type(self._rule)
        self._clip_norm.fill_(rule.clip_norm)
        self._num_within.zero_()
        # A group without a record adds nothing, neither to the sum nor to the counts.
        listed = [group for group in groups if size_of(group).rows]
        failures = Failures(self.skip_failing)
        if self.differs:
            return self._plain().clipped_sum(listed, rule)
        try:
            self._add_all(listed, rule, failures)
        except MixedExamplesError as error:
            if not self.skip_failing:
                raise
            # Made-up values in a new shape of batch have shown that the paths differ. The fast path
            # is not used again, and what it has added up of this cohort does not count.
            self.differs = True
            _LOG.warning("from here on users run one at a time: %s", error)
            return self._plain().clipped_sum(listed, rule)
        failures.warn_if_all_failed(len(listed))
        return ClippedSum(total=self._total, num_within=self._num_within, num_updates=len(listed))

    def _add_all(self, listed: Sequence[Batch], rule: ClipRule, failures: Failures) -> None:
        """Set or add to the total, batch by batch, users larger than a batch alone."""
        large: list[Batch] = []
        packed: list[Iterable[Users]] = []
        kinds = _by_names(self._joined_where_worth_it(group) for group in listed)
        for kind in kinds:
            self._sizes.see(kind)
        for kind in kinds:
            mix = self._mix and (self._mix_anything or has_tokens(kind))
            large += [group for group in kind if not self._fits(group, mix)]
            packed.append(self._packed([group for group in kind if self._fits(group, mix)], mix))
        batches = itertools.chain.from_iterable(packed)
        ahead = list(itertools.islice(batches, 2))
        # Batches of a larger cohort are added to zeros: one captured step serves all of a shape.
        self._sets = len(ahead) == 1 and not large
        if not self._sets:
            self._total.zero_()
        for users in itertools.chain(ahead, batches):
            self._add_batch(users, rule, failures)
        for group in large:
            with failures.of_one_group():
                self._add_large(group)

    def _add_batch(self, users: Users, rule: ClipRule, failures: Failures) -> None:
        """Add a batch of users; if it cannot be run, each of them alone."""
        try:
            self._run(self._sent(users), self._alone if users.count == 1 else self._together)
        except (torch.OutOfMemoryError, MemoryError, MixedExamplesError):
            raise
        except Exception:
            if not self.skip_failing:
                raise
            self._add_one_by_one(users, rule, failures)

    def _add_one_by_one(self, users: Users, rule: ClipRule, failures: Failures) -> None:
        """Add those users of a batch that the model can read; the others count as zero."""
        if self._sets:
            self._total.zero_()
            self._sets = False
        own = own_groups(users, range(users.count))
        found = self._plain().clipped_sum(own, rule, failures=failures)
        for running, tensor in zip(self._total.views, found.total.views, strict=True):
            running += tensor
        self._num_within += found.num_within.to(self._device)

    def _plain(self) -> PlainClipping:
        plain = PlainClipping(
            self._model,
            self._parameters,
            record_loss=self._record_loss,
            compute_dtype=self._dtype,
        )
        plain.skip_failing = self.skip_failing
        return plain

    def _joined_where_worth_it(self, group: Batch) -> Batch:
        """The group with several records to a row, if that is asked for or saves it much.

        Decided by the group's own records and by public numbers: nobody's rounding depends on
        whether others have short records.
        """
        if self._can_join is False or not (
            self._join_all or worth_joining([group], self._device.type)
        ):
            return group
        if self._can_join is None:
            self._can_join = can_join(self._model, self._record_loss, self._join_length)
        longest = size_of(group).length
        if not self._can_join or longest > self._join_length:
            return group
        row = max(longest, min(USUAL_ROW, self._max_tokens, self._max_length or USUAL_ROW))
        if self._sequence_length is not None:
            row = max(row, min(self._sequence_length, self._max_tokens))
        return joined(group, row, ladder=self._graphs or self._mix)

    @property
    def _join_length(self) -> int:
        """How long records may be that share a row: windows of attention may be shorter."""
        limit = self._sequence_length or min(self._max_length or USUAL_LENGTH, USUAL_LENGTH)
        return max(limit, min(power_of_two(limit), self._max_length or power_of_two(limit)))

    def _refuse_if_it_cannot_join(self) -> None:
        self._can_join = can_join(self._model, self._record_loss, self._join_length)
        if not self._can_join:
            raise InputError(
                "join_records: this model does not keep records apart in one row (records of "
                f"length {self._join_length} were tried). It takes a decoder of the transformers "
                "library with SDPA attention, position_ids, and no window shorter than a record."
            )

    def _fits(self, group: Batch, mix: bool) -> bool:
        """Whether the group is no larger than a batch."""
        if mix:
            return self._sizes.holds(group)
        return size_of(group).tokens <= self._max_tokens

    def _packed(self, groups: Sequence[Batch], mix: bool) -> Iterable[Users]:
        if mix:
            return pack_runs(groups, self._sizes)
        return pack(
            groups,
            max_tokens=self._max_tokens,
            ladder=self._graphs,
            max_users=self._max_users,
            max_length=self._max_length,
        )

    def _sent(self, users: Users) -> Users:
        def send(tensor: Tensor) -> Tensor:
            if self._device.type == "cuda" and not tensor.is_cuda:
                return tensor.pin_memory().to(self._device, non_blocking=True)
            return tensor.to(self._device)

        return users.with_tensors([send(tensor) for tensor in users.tensors])

    def _pieces(self, group: Batch) -> list[Users]:
        """The rows of one large user in batches; each row weighs 1 / (all of the user's rows)."""
        size = size_of(group)
        step = max(1, self._max_tokens // size.length)
        pieces: list[Users] = []
        for start in range(0, size.rows, step):
            part = {name: tensor[start : start + step] for name, tensor in group.items()}
            (piece,) = pack([part], max_tokens=1, ladder=self._graphs, max_length=self._max_length)
            share = len(next(iter(part.values()))) / size.rows
            pieces.append(Users(batch=piece.batch, weights=piece.weights * share, count=1))
        return pieces

    def _add_large(self, group: Batch) -> None:
        """A user larger than a batch: its pieces add up before the one clipping."""
        if self._large_total is None:
            self._large_total = FlatBuffer(self._parameters)
        self._large_total.zero_()
        for piece in self._pieces(group):
            self._run(self._sent(piece), self._piece)
        norm = self._large.add_clipped(self._large_total.views, self._total.views, self._clip_norm)
        self._num_within += norm <= self._clip_norm

    def _execution(self, users: Users) -> Execution:
        ids = users.batch.get("input_ids")
        return Execution.choose(
            self._model,
            joined_lm_loss if is_joined(users.batch) else self._record_loss,
            length=ids.shape[1] if ids is not None and ids.dim() > 1 else 1,
            compute_dtype=self._dtype,
            compile_blocks=self._compile,
            merge_lora=self._merge_lora,
            checkpoint_blocks=self._checkpoint,
        )

    def _together(self, example: Users) -> Step:
        execution = self._execution(example)
        rows = tuple((name, tensor.shape[1:]) for name, tensor in example.batch.items())
        if rows not in self._surveys:
            self._surveys[rows] = look_at(self._model, example.batch, execution)
        one_pass = OnePass(
            self._model,
            self._parameters,
            self._rule,
            example,
            execution=execution,
            survey=self._surveys[rows],
        )

        def step(users: Users) -> None:
            norms = one_pass(users, self._total.roomy, self._clip_norm, fresh=self._sets)
            self._num_within += ((norms <= self._clip_norm) & users.taking_part).sum()

        return step

    def _alone(self, example: Users) -> Step:
        execution = self._execution(example)
        one_user = OneUser(self._model, self._parameters, self._rule)

        def step(rows: Users) -> None:
            gradient = one_user.gradient(rows, execution)
            norm = one_user.add_clipped(
                gradient, self._total.views, self._clip_norm, fresh=self._sets
            )
            self._num_within += norm <= self._clip_norm

        return step

    def _piece(self, example: Users) -> Step:
        execution = self._execution(example)
        assert self._large_total is not None
        whole = self._large_total.views

        def step(rows: Users) -> None:
            gradient = self._large.gradient(rows, execution)
            for running, part in zip(whole, gradient, strict=True):
                running += part

        return step

    def _run(self, users: Users, make: Callable[[Users], Step]) -> None:
        # A captured step sets or adds as it did when it was captured.
        key = (make.__name__, users.shape, self._graphs and self._sets)
        is_new = key not in self._steps
        try:
            if is_new:
                step = make(users)
                if self._graphs:
                    step = self._captured(step, users)
                if self._check and users.count > 1 and self._is_to_compare(users, key):
                    self._compare(step, users)
                if not self._graphs and len(self._steps) >= EAGER_STEPS:
                    self._steps.clear()
                self._steps[key] = step
            self._steps[key](users)
        finally:
            # What the model keeps of these users must not reach the next. A captured step runs no
            # Python, so it keeps nothing.
            if is_new or not self._graphs:
                self._state.restore()

    def _is_to_compare(self, users: Users, key: Any) -> bool:
        """Whether the new shape is one of those that are compared; notes that it is."""
        self._num_shapes += 1
        lengths = (t.shape[1] for t in users.batch.values() if t.dim() > 1)
        size = len(users.weights), max(lengths, default=1)
        is_larger = any(new > most for new, most in zip(size, self._largest, strict=True))
        is_new = self._every_shape and key not in self._compared
        if not (self._compile or is_new or is_larger or _is_power_of_two(self._num_shapes)):
            return False
        self._largest = max(size[0], self._largest[0]), max(size[1], self._largest[1])
        self._compared.add(key)
        return True

    def _captured(self, step: Step, users: Users) -> Step:
        """The step as a CUDA graph; what its trial runs changed is put back."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

        def flat(inputs: list[Tensor]) -> Any:
            return step(users.with_tensors(inputs))

        large = [] if self._large_total is None else [self._large_total.values]
        with put_back(self._total.values, self._num_within, *large):
            graph = Graph(flat, users.tensors, pool=self._pool)
        return lambda given: graph(given.tensors)

    def _compare(self, step: Step, users: Users) -> None:
        """Raise if the step and the plain loop differ on made-up users in a batch of this shape."""

        def run(few: Users, rule: ClipRule) -> Update:
            self._state.restore()
            # A step that sets the sum must set every value.
            self._total.values.fill_(torch.nan if self._sets else 0.0)
            self._clip_norm.fill_(rule.clip_norm)
            step(few)
            return [view.clone() for view in self._total.views]

        with put_back(self._total.values, self._num_within, self._clip_norm):
            for seed in range(DISGUISES):
                # What the model kept of looking at the batch must not reach the oracle.
                self._state.restore()
                try:
                    compare_with_plain(
                        self._model,
                        self._parameters,
                        self._rule,
                        disguised(users, seed=seed),
                        run,
                        record_loss=self._record_loss,
                        compute_dtype=self._dtype,
                    )
                    return
                except NothingFiniteError:
                    # Updates that are not finite count as zero: there is nothing to get wrong.
                    continue


@contextlib.contextmanager
def put_back(*tensors: Tensor) -> Iterator[None]:
    """Whatever happens to them inside, afterwards they are as before."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def _stores_little_by_row(model: nn.Module) -> bool:
    """Whether layers that have only stored gradients are small enough to store them by row."""
    layers = [layer for layer in find_layers(model) if layer.rule in (AnyLayer, Lstm)]
    return sum(p.numel() for layer in layers for p in layer.parameters.values()) <= MOST_BY_ROW


def _by_names(groups: Iterable[Batch]) -> list[list[Batch]]:
    """The groups by the names of their tensors: only those with the same ones share a batch."""
    found: dict[frozenset[str], list[Batch]] = {}
    for group in groups:
        found.setdefault(frozenset(group), []).append(group)
    return list(found.values())


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
