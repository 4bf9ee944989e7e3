"""The only place where a run has side effects: ledger rows, files, progress and the secret.

The step and the loop only compute. Whatever leaves them goes through here. A step's row is on disk
before anyone can see a weight of the step.

A run that was stopped goes on from a checkpoint. The ledger may be ahead of it: then the steps in
between are taken again, with the same cohorts and the same noise, from the same weights. The result
is what was charged already, so these steps are not charged again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.digests.of_runs import base_digest, frozen_digests, trained_digest
from userdp.errors import InputError, LedgerError, MixedExamplesError
from userdp.files.chain import write_private
from userdp.files.durable import new_directory, write_file
from userdp.history import ATTRIBUTE, carry, history_of, write_history
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.ledger.lineage import begin_run, check_current, past_cautions
from userdp.models.checks import trainable_parameters
from userdp.models.load import adapter_tensors, save_model
from userdp.models.proven import model_check
from userdp.optimizers.scaled_momentum import learnt_before
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.report.closing import unfinished_card, write_words
from userdp.runs.checkpoints import Moment, Saving, checkpoints_of
from userdp.runs.continuation import Continuation
from userdp.runs.files import NOISE_KEY, RecordedRun, discard, model_files
from userdp.runs.repeated_sums import AnySums, NoSums, RepeatedSums
from userdp.runs.same import (
    check_hardware,
    check_noise,
    check_ranks,
    check_same,
    digests_of,
    key_name,
    stored_secret,
    unnamed_digests,
)
from userdp.sharded_tensors import device_of
from userdp.statement import Statement
from userdp.streams import RunSecret, Streams

OnStep = Callable[[int], None]


class RunRecord:
    """The record of one run. `on_step` is told how many steps are done; all the rest is secret."""

    def __init__(
        self,
        ledger: Ledger,
        secret: RunSecret | None = None,
        *,
        path: Path | None = None,
        saving: Saving | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.ledger = ledger
        self.path = path
        # The ranks that take each step together. Only the first has the rows on disk.
        self.ranks = Ranks.alone()
        self._process = os.getpid()
        # The model that a new record was made for; None for a ledger that was opened again.
        self._model: nn.Module | None = None
        self._secret = secret or RunSecret.from_system()
        self._on_step = on_step
        # How many steps the weights in memory have taken, and how many were charged before.
        self._position = self._charged_before = ledger.steps
        self._is_own_secret = False  # whether it was made for this very run
        self.checkpoints = None if path is None else checkpoints_of(path, saving)
        # The sums that repeated steps are compared with. With several ranks, the first one
        # compares.
        self.sums: AnySums = NoSums()
        self._continuation = Continuation()
        # The digests of what must not change, by name; None before the run begins.
        self._frozen: dict[str, str] | None = None

    @staticmethod
    def create(
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        settings: StepSettings,
        secret: RunSecret | None = None,
        path: Path | None = None,
        bound_to: Mapping[str, str] | None = None,
        config: Path | None = None,
        cautions: Sequence[str] = (),
        saving: Saving | None = None,
        on_step: OnStep | None = None,
    ) -> RunRecord:
        """A new record. It is on disk if `path`, the run's directory, is given.

        `bound_to` names what the run depends on beside the weights, the optimizer and the code. The
        ledger names the file `config`, too, and the file is copied into the run. `cautions` are
        those of the data.
        """
        secret = secret or RunSecret.from_system()
        bound = digests_of(plan, model, optimizer, bound_to or {})
        content = None if config is None else config.read_bytes()
        if content is not None:
            bound["config"] = hashlib.sha256(content).hexdigest()
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "ledger.jsonl").exists():
                raise LedgerError(f"{path} already holds a run: choose another output directory.")
            if not secret.fixed_seed:
                # The secret is on disk before the ledger: no charged step is without it. The ledger
                # names it: under another one, repeated steps would have other noise.
                bound["noise_key"] = key_name(secret)
                write_private(path / NOISE_KEY, secret.key.hex().encode() + b"\n")
        ledger = Ledger.create(
            plan,
            path=path / "ledger.jsonl" if path is not None else None,
            bound_to=bound,
            fixed_seed=secret.fixed_seed,
            data_cautions=(*cautions, *past_cautions(model), *learnt_before(optimizer)),
            # Under a fixed seed the whole record repeats; otherwise no two runs share a key.
            key=secret.ledger_key() if secret.fixed_seed else None,
            model_check=model_check(model, checked=settings.checks_model),
        )
        if path is not None and content is not None:
            write_file(path / "config.toml", content)
        record = RunRecord(ledger, secret, path=path, saving=saving, on_step=on_step)
        record._model = model
        record._is_own_secret = True
        if path is not None and not secret.fixed_seed:
            record.sums = RepeatedSums.begun(path, secret.key)
        return record

    @staticmethod
    def resume(
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        path: Path,
        moment: Moment | None,
        bound_to: Mapping[str, str],
        secret: RunSecret | None = None,
        config: Path | None = None,
        saving: Saving | None = None,
        on_step: OnStep | None = None,
        num_ranks: int = 1,
        sharded: bool = False,
    ) -> RunRecord:
        """The record of the unfinished run in `path`, to go on with.

        The model and the optimizer are as they were before the first step. `moment` is the
        checkpoint to go on from, or None for the beginning. Whatever changes what is released must
        be as before: the same noise on other values shows their difference. `secret`: a fixed one.
        """
        remembered = None if moment is None else (moment.step, moment.head)
        ledger = Ledger.open(path / "ledger.jsonl", remembered=remembered)
        try:
            check_same(ledger, plan, digests_of(plan, model, optimizer, bound_to), config, path)
            if secret is None or not secret.fixed_seed:
                secret = stored_secret(path, ledger.bound_to.get("noise_key"))
            if secret.fixed_seed != ledger.fixed_seed:
                raise InputError(f"{path} was begun with another kind of seed: put it back.")
            check_hardware(ledger, moment, device_of(model, sharded=sharded))
            check_ranks(ledger, moment, path, num_ranks, sharded=sharded)
            check_noise(ledger, moment, plan)
            after = 0 if moment is None else moment.step
            sums: AnySums = NoSums()
            if not secret.fixed_seed and not ledger.is_finished:
                device = device_of(model, sharded=sharded).type
                # A halt, and the rest of a run that ended early, come after the last sum.
                is_settled = ledger.is_halted or ledger.steps_begun < ledger.steps
                steps = (after, ledger.steps_begun)
                sums = RepeatedSums.opened(path, secret.key, steps, device, is_settled=is_settled)
        except BaseException:
            ledger.close()
            raise
        record = RunRecord(ledger, secret, path=path, saving=saving, on_step=on_step)
        record._model = model
        record._is_own_secret = True
        record._position = 0 if moment is None else moment.step
        record.sums = sums
        record._continuation = Continuation.of(ledger, sums)
        return record

    def keep_beginning(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        before: int,
        average: Mapping[str, Any] | None = None,
    ) -> None:
        """Save what the run begins with, if a new process could not make it again.

        Adapters are drawn at random. A fork begins with a checkpoint, after `before` steps.
        """
        weights = trainable_parameters(model)
        is_adapted = len(weights) < sum(1 for _ in model.parameters())
        if self.checkpoints is not None and (is_adapted or before):
            values = {"kind": type(optimizer).__name__, "values": optimizer.state_dict()}
            state = {"before": before, "optimizer": values, "average": average}
            self.checkpoints.save_initial(weights, state)

    def moment(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Moment:
        """The run as it is now, for a checkpoint."""
        self.sums.flush()
        return Moment(
            step=self._position,
            head=self.ledger.head,
            weights=weights,
            state=state,
        )

    @property
    def is_repeating(self) -> bool:
        """Whether the next step was charged before the run was stopped."""
        return self._position < self._charged_before

    def begin(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, index: UserIndex
    ) -> None:
        """Compose what was spent on these weights before, and bind the noise to this very run."""
        if self.ledger.plan != plan or self.ledger.fixed_seed != self._secret.fixed_seed:
            raise InputError("the ledger was opened for another plan or another kind of seed.")
        if self._model not in (None, model):
            raise InputError("the record was made for another model: make one for each run.")
        self._check_drawn_once(plan)
        begin_run(model, self.ledger)
        secret = self._secret.bound_to(self.ledger.run_digest)
        if not secret.fixed_seed and not self._is_own_secret:
            # Somebody may copy a ledger and continue both copies with one secret. If the noise
            # depended only on the run's name, both would get the same noise, and the difference of
            # the two models would have none.
            secret = secret.bound_to(secrets.token_hex(32))
        for unnamed in unnamed_digests(self.ledger, model, optimizer, index):
            secret = secret.bound_to(unnamed)
        self._secret = secret
        self._frozen = frozen_digests(model)

    def _check_drawn_once(self, plan: Plan) -> None:
        """Refuse a second `PrivateStep` where users are dealt out once: it would deal again."""
        once = plan.drawn_once
        if once and self._frozen is not None:
            raise InputError(f"{once}: make one PrivateStep of it.")
        if once and self.ledger.steps and not self._is_own_secret:
            raise InputError(f"{once}: only `train(resume=True)` goes on with its ledger.")

    def streams(self, purpose: str) -> Streams:
        """The run's randomness for one purpose, which may change where a new process went on."""
        changes = self._continuation.changes(self.ledger, purpose)
        return self._secret.streams(purpose, self.ledger.plan.randomness, changes=changes)

    @property
    def steps(self) -> int:
        """How many steps the weights in memory have taken."""
        return self._position

    def check_current(self, model: nn.Module) -> None:
        """Refuse a step if another run has begun on the same model since."""
        check_current(model, self.ledger)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number` is taken inside, by nobody else and once.

        Two steps of one number would share their cohort and their noise.
        """
        if os.getpid() != self._process:
            raise InputError(
                "this process was forked from the one that began the run, and would draw the same "
                "noise as that one. Begin a run of its own in each process."
            )
        if not self.ledger.turn.acquire(blocking=False):
            raise InputError("another step of this run is being taken: take one after the other.")
        try:
            charged = max(self._position, self._charged_before)
            if number != self._position or charged != self.ledger.steps:
                raise InputError(
                    f"the cohort was drawn for step {number}, and {self.ledger.steps} steps are "
                    "charged by now: another step of this run was taken in between. Draw and apply "
                    "one cohort after the other, and use one record for one model."
                )
            yield
        finally:
            self.ledger.turn.release()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("the record of a run cannot be copied: both would draw the same noise.")

    def charge_step(self, *, of_rest: bool = False) -> None:
        """Record the next step, or one of the rest that is not taken. Repeated ones have rows."""
        # The steps before were seen, so none of them may lack its sum from here on.
        self.sums.flush()
        self._continuation.record_if_due(self.ledger, self._position)
        if not self.is_repeating:
            self.ledger.charge_step(of_rest=of_rest)
        self._position += 1

    @property
    def is_halted(self) -> bool:
        """Whether a test ended the run, and no step of it has to be taken again."""
        return self.ledger.is_halted and not self.is_repeating

    def halt(self) -> None:
        """Record that the last step failed its test: the run ends. Returns once on disk."""
        self.sums.flush()
        if not self.ledger.is_halted:
            self.ledger.halt()

    def doubt(self, reason: str) -> None:
        """Record why nothing is promised from here on; returns once it is on disk."""
        if reason not in self.ledger.doubts:
            self.ledger.doubt(reason)

    def step_done(self) -> None:
        """Tell `on_step` how many steps are done."""
        if self._on_step is not None:
            self._on_step(self._position)

    def finish(
        self, model: nn.Module, tokenizer: Any = None, *, people: dict[str, Any] | None = None
    ) -> None:
        """Write the closing row. A run with a directory also writes its model, card and statement.

        `people` says what else was released about the same people.

        Refused if anything but the trained weights has changed since the beginning, because that
        part has no noise. The ledger then stays open, and nothing is promised from it.
        """
        self._check_frozen(model)
        files: dict[str, str] = {}
        digests = {"final_weights": trained_digest(model)}
        if self.path is not None:
            saved = self.path / "model"
            history = vars(model)[ATTRIBUTE]
            with new_directory(saved) as partial:
                save_model(model, tokenizer, partial, card=unfinished_card(self.ledger.plan))
                write_history(partial, history)
            homes = (*history_of(model).homes, self.path.resolve())
            carry(model, dataclasses.replace(history, homes=homes))
            files = model_files(saved)
            published = adapter_tensors(saved)
            if published is not None:
                # The adapter's files lack the base model, without which they are useless.
                digests["base_weights"] = base_digest(model, published)
        self.ledger.finish(digests, model_files=files, people=people)
        if self.path is not None:
            write_words(RecordedRun(run=self.path, ledger=self.ledger))

    def _check_frozen(self, model: nn.Module) -> None:
        if self._frozen is None:
            return
        now = frozen_digests(model)
        changed = sorted(n for n in now.keys() | self._frozen if now.get(n) != self._frozen.get(n))
        if changed:
            self.doubt(f"{changed[0]!r} is saved with the model and was written without noise")
            raise MixedExamplesError(
                f"{changed[0]!r} is saved with the model, is not trained, and changed during the "
                "run: it may hold records without noise, so the run is not closed. Put it back as "
                "it was, keep it outside the model, or register its buffer with persistent=False."
            )

    def statement(self) -> Statement:
        """What may be said about the model after what is recorded so far."""
        return self.ledger.statement()

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close the ledger at the end, whatever happens.

        A run that is refused before its first step has released nothing. Its files are deleted.
        """
        try:
            with contextlib.closing(self.ledger), contextlib.closing(self.sums):
                try:
                    yield
                except BaseException as error:
                    # The lock is held until the last save has ended, unless a signal says "now".
                    if self.checkpoints is not None and not isinstance(error, KeyboardInterrupt):
                        self.checkpoints.join()
                    raise
        except InputError:
            if not self.ledger.steps and self.path is not None:
                discard(self.path)
            raise
