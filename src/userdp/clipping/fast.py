"""The clipped sum of a cohort, fast: batches of users in one backward pass each.

Everything adds up in one flat float32 buffer (float64 for float64 models); the noise is added to
it later. A user larger than a batch runs alone, in pieces. On CUDA the model's blocks are compiled
and each batch shape is captured as a graph, so that no step waits for the host.

Before the first batch of a new shape counts, a batch of made-up values in that shape is compared
with the plain loop (`compared_shapes` says which shapes are).

What one user's data decides concerns that user alone: whether its own records are joined into fewer
rows, or that it counts as zero because the model cannot read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from userdp.clipping.batches.cohort import Packing
from userdp.clipping.batches.joined_records import is_joined
from userdp.clipping.batches.limits import CUDA_TOKENS, stored_users, usual_tokens
from userdp.clipping.batches.ragged import Sizes
from userdp.clipping.batches.users import Users, size_of
from userdp.clipping.checks.compared_shapes import ComparedShapes
from userdp.clipping.checks.computed import refuse_computed_weights
from userdp.clipping.checks.made_up import disguised, own_groups
from userdp.clipping.checks.verify import NothingFiniteError, compare_with_plain, refuse_dropout
from userdp.clipping.execute.capture import Graph, put_back
from userdp.clipping.execute.checkpoint import blocks_of
from userdp.clipping.execute.execution import CompiledCalls, Execution
from userdp.clipping.execute.models import has_aligned_head, most_positions, padded_rows
from userdp.clipping.flat import ClippedSum, FlatBuffer, HalfAddedError
from userdp.clipping.gradients.chunk_choice import chunks_logits, keeps_logits
from userdp.clipping.gradients.following import can_follow_records
from userdp.clipping.gradients.many_users import ManyUsers, look_at
from userdp.clipping.gradients.one_user import OneUser
from userdp.clipping.gradients.survey import Survey, stores_little_by_row
from userdp.clipping.gradients.word_lstm import dictionary_size
from userdp.clipping.plain import Failures, PlainClipping
from userdp.clipping.rules import ClipRule
from userdp.clipping.settings import StepSettings
from userdp.errors import MixedExamplesError
from userdp.losses import Batch, RecordLoss, Update, joined_lm_loss
from userdp.module_state import ModuleState
from userdp.sharded_tensors import at_rest, is_shard
from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import MEAN_GRADIENT

# Adds what one batch of users contributes.
AddBatch = Callable[[Users], Any]
_LOG = logging.getLogger(__name__)

# Sets of made-up values that are tried until one has a finite gradient.
DISGUISES = 8
# Batch shapes remembered where nothing is captured and remembering saves little.
EAGER_SHAPES = 64


class FastClipping:
    """Clipped sums of cohorts, as the plain loop would give them.

    `sequence_length` and `group_size` bound a record's tokens and a group's rows; they are public.
    `skip_failing` is as in `PlainClipping`. `every_shape` compares every new shape of batch with
    the plain loop. `differs` says that the two were seen to differ. At most `most_stored_users`
    users have stored gradients at a time. `update` is the mean gradient or a scaled one.
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
        group_size: int | None = None,
        every_shape: bool = True,
        most_stored_users: int | None = None,
        update: UpdateRule = MEAN_GRADIENT,
    ) -> None:
        settings = settings or StepSettings()
        refuse_computed_weights(model)
        self.skip_failing = False
        self.differs = False  # From then on the plain loop does the work.
        self._model = model
        self._state = ModuleState(model)
        self._parameters = list(parameters)
        self._rule = rule
        self._record_loss = record_loss
        self._device = self._parameters[0].device
        on_cuda = self._device.type == "cuda"
        # Weights of a sharded model are gathered while it runs, which cannot be captured.
        may_compile = on_cuda and not any(map(is_shard, model.parameters()))
        self._compile = may_compile if settings.compile_blocks is None else settings.compile_blocks
        self._graphs = self._compile and on_cuda
        self._settings, self._dtype = settings, settings.compute_dtype
        if settings.checkpoint_blocks:
            blocks_of(model)  # Raises now, not at the first step, if there are none.
        self._compared = ComparedShapes(every_shape=every_shape, compiles=self._compile)
        is_asked = settings.join_records is True
        if is_asked:
            refuse_dropout(model)
        self._can_follow_records = can_follow_records(
            model, self._product_dtype, captured=self._graphs, is_asked=is_asked
        )
        self._batch_tokens = settings.microbatch_tokens or usual_tokens(
            model, self._device, captured=self._graphs, words=dictionary_size(model)
        )
        most = stored_users(self._parameters, self._product_dtype, most=most_stored_users)
        self._packing = self._choose_packing(sequence_length, group_size, most)
        self._chunks = chunks_logits(
            model,
            record_loss,
            settings.chunk_logits,
            # Large batches are for devices with room for their logits.
            tokens=settings.microbatch_tokens or min(self._batch_tokens, CUDA_TOKENS),
            itemsize=self._product_dtype.itemsize,
        )
        self._total = FlatBuffer(self._parameters, padded_rows(model) if self._compile else None)
        # On the device, where captured steps read and write them.
        self._clip_norm = torch.tensor(1.0, dtype=self._total.values.dtype, device=self._device)
        self._num_within = torch.zeros((), dtype=torch.int64, device=self._device)
        # Made when the first user larger than a batch comes.
        self._large_total: FlatBuffer | None = None
        self._update = update
        self._one_user = partial(OneUser, model, parameters, rule, scales=update.scales)
        self._large = self._one_user()
        self._surveys: dict[Any, Survey] = {}
        self._compiled_calls: CompiledCalls = {}
        self._add_by_shape: dict[Any, AddBatch] = {}
        self._pool: Any = None

    def _choose_packing(self, length: int | None, group_size: int | None, users: int) -> Packing:
        settings, on_cuda = self._settings, self._device.type == "cuda"
        half = self._product_dtype == torch.bfloat16
        ragged = self._graphs and half and has_aligned_head(self._model, self._record_loss)
        ragged = ragged and stores_little_by_row(self._model)
        sizes = Sizes(
            max_tokens=self._batch_tokens,
            max_users=users,
            max_short_users=None if on_cuda else users,
            max_length=most_positions(self._model),
        )
        if self._graphs and length is not None:
            # Public. Without it every longer row that is seen would bring new batch shapes.
            sizes.see_length(length)
        return Packing(
            self._model,
            self._record_loss,
            device=self._device.type,
            sizes=sizes,
            max_equal_users=None if on_cuda else users,
            ladder=self._graphs,
            ragged=ragged if settings.mix_sizes is None else settings.mix_sizes,
            ragged_always=settings.mix_sizes is True,
            sequence_length=length,
            group_size=group_size,
            join_records=settings.join_records if self._can_follow_records else False,
        )

    @property
    def _product_dtype(self) -> torch.dtype:
        return self._dtype or self._parameters[0].dtype

    def clipped_sum(self, groups: Iterable[Batch], rule: ClipRule) -> ClippedSum:
        """The sum over the groups; overwritten by the next call. Secret.

        `rule` is the rule given to `__init__`, perhaps with another clip norm.
        """
        assert type(rule) is type(self._rule)
        self._clip_norm.fill_(rule.clip_norm)
        # A group without a record adds nothing, neither to the sum nor to the counts.
        listed = [group for group in groups if size_of(group).rows]
        if self.differs:
            return self._plain().clipped_sum(listed, rule)
        try:
            failures = self._add_all(listed, rule)
        except MixedExamplesError as error:
            if not self.skip_failing:
                raise
            # In a new batch shape the two paths differ. The fast path is not used again, and what
            # it has added up of this cohort does not count.
            self.differs = True
            _LOG.warning("from here on users run one at a time: %s", error)
            return self._plain().clipped_sum(listed, rule)
        failures.warn_if_all_failed(len(listed))
        return ClippedSum(total=self._total, num_within=self._num_within, num_updates=len(listed))

    def _add_all(self, listed: Sequence[Batch], rule: ClipRule) -> Failures:
        """Add up the cohort, batch by batch; a user larger than a batch runs alone.

        If the memory does not suffice, the cohort is added up again in batches of half the size.
        """
        while True:
            self._total.zero_()
            self._num_within.zero_()
            failures = Failures(self.skip_failing)
            try:
                large, batches = self._packing.split(listed)
                for users in batches:
                    self._add_batch(users, rule, failures)
                for group in large:
                    with failures.of_one_group():
                        self._add_large(group)
                return failures
            except torch.OutOfMemoryError:
                if not self._packing.halve():
                    raise
            _LOG.warning("out of memory: from here on batches have half as many tokens.")
            self._add_by_shape.clear()  # What was captured for larger batches holds memory.
            self._pool = None
            if self._graphs:
                torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        """What the next sum depends on beside its groups and the weights. Secret."""
        return {"differs": self.differs, "packing": self._packing.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.differs = state["differs"]
        self._packing.load_state_dict(state["packing"])

    def _add_batch(self, users: Users, rule: ClipRule, failures: Failures) -> None:
        """Add a batch of users; if it cannot be run, each of them alone."""
        try:
            self._add_users(
                users.sent_to(self._device), self._alone if users.count == 1 else self._together
            )
        except (torch.OutOfMemoryError, MemoryError, MixedExamplesError, HalfAddedError):
            raise
        except Exception:
            if not self.skip_failing:
                raise
            at_rest(self._model)
            self._add_one_by_one(users, rule, failures)

    def _add_one_by_one(self, users: Users, rule: ClipRule, failures: Failures) -> None:
        """Add those users of a batch that the model can read; the others count as zero."""
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
            update=self._update,
            compute_dtype=self._dtype,
        )
        plain.skip_failing = self.skip_failing
        return plain

    def _add_large(self, group: Batch) -> None:
        """Add a user larger than a batch: its pieces add up before the one clipping."""
        if self._large_total is None:
            self._large_total = FlatBuffer(self._parameters)
        self._large_total.zero_()
        for piece in self._packing.pieces(group):
            self._add_users(piece.sent_to(self._device), self._piece)
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
            any_rows=users.ranges is not None,
            merge_lora=self._settings.merge_lora,
            checkpoint_blocks=self._settings.checkpoint_blocks,
            chunk_logits=self._chunks and not keeps_logits(self._model, users),
            calls=self._compiled_calls,
        )

    def _together(self, example: Users) -> AddBatch:
        execution = self._execution(example)
        rows = tuple((name, tensor.shape[1:]) for name, tensor in example.batch.items())
        if rows not in self._surveys:
            self._surveys[rows] = look_at(self._model, example.batch, execution)
        many_users = ManyUsers(
            self._model,
            self._parameters,
            self._rule,
            example,
            execution=execution,
            survey=self._surveys[rows],
            scales=self._update.scales,
        )

        def add(users: Users) -> None:
            norms = many_users(users, self._total.roomy, self._clip_norm)
            self._num_within += ((norms <= self._clip_norm) & users.taking_part).sum()

        return add

    def _alone(self, example: Users) -> AddBatch:
        execution = self._execution(example)
        one_user = self._one_user()

        def add(rows: Users) -> None:
            gradient = one_user.gradient(rows, execution)
            norm = one_user.add_clipped(gradient, self._total.views, self._clip_norm)
            self._num_within += norm <= self._clip_norm

        return add

    def _piece(self, example: Users) -> AddBatch:
        execution = self._execution(example)
        assert self._large_total is not None
        whole = self._large_total.views

        def add(rows: Users) -> None:
            gradient = self._large.gradient(rows, execution)
            for running, part in zip(whole, gradient, strict=True):
                running += part

        return add

    def _add_users(self, users: Users, make: Callable[[Users], AddBatch]) -> None:
        """Add the batch; a batch of a new shape is captured and compared first."""
        key = (make.__name__, users.shape)
        is_new = key not in self._add_by_shape
        try:
            if is_new:
                add = make(users)
                if self._graphs:
                    add = self._captured(add, users)
                is_checked = self._settings.check and users.count > 1
                if is_checked and self._compared.compare_next(users, key):
                    self._compare(add, users)
                if not self._graphs and len(self._add_by_shape) >= EAGER_SHAPES:
                    self._add_by_shape.clear()
                self._add_by_shape[key] = add
            self._add_by_shape[key](users)
        finally:
            # What the model remembers of these users must not reach the next ones. A captured graph
            # runs no Python, so after it there is nothing to put back.
            if is_new or not self._graphs:
                self._state.restore()

    def _captured(self, add: AddBatch, users: Users) -> AddBatch:
        """The function as a CUDA graph; what its trial runs changed is put back."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

        def on_tensors(inputs: list[Tensor]) -> Any:
            return add(users.with_tensors(inputs))

        large = [] if self._large_total is None else [self._large_total.values]
        with put_back(self._total.values, self._num_within, *large):
            graph = Graph(on_tensors, users.tensors, pool=self._pool)
        return lambda given: graph(given.tensors)

    def _compare(self, add: AddBatch, users: Users) -> None:
        """Raise if the fast path and the plain loop differ on made-up users in this batch shape."""

        def fast(few: Users, rule: ClipRule) -> Update:
            self._state.restore()
            self._total.zero_()
            self._clip_norm.fill_(rule.clip_norm)
            add(few)
            return self._total.views

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
                        fast,
                        record_loss=self._record_loss,
                        compute_dtype=self._dtype,
                        update=self._update,
                    )
                    break
                except NothingFiniteError:
                    # These made-up updates all count as zero, so they show nothing: try others.
                    continue
        if self._graphs:  # The plain loop's memory is not needed again.
            torch.cuda.empty_cache()
