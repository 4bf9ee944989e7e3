"""The private training loop over a store; it reads like Charles et al. 2024, Alg. 1 and 2.

`train` is the loop. `train_from_config` is what the command calls. It makes everything that the
configuration names, runs the loop, and leaves the run in a directory:

    config.toml  run.json  ledger.jsonl  statement.json
    model/     the weights and their card; `userdp report` adds report.html and MODEL_CARD.md
    secret/    for the owner alone, never to be published

Nothing else leaves a run: no loss on its training users, no norm, no cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.bounding.selection import Selection
from userdp.clipping.kernels.running import same_every_time
from userdp.clipping.settings import StepSettings
from userdp.data.store import UserStore
from userdp.digests.of_runs import code_digest
from userdp.errors import FORK, RESUME, InputError, StoppedRunError
from userdp.files.interrupts import signals_wait_for_the_step
from userdp.ledger.book import Ledger
from userdp.losses import RecordLoss
from userdp.models.checks import refuse_mixing
from userdp.optimizers.averaging import WeightAverage
from userdp.optimizers.choice import optimizer_and_schedule
from userdp.optimizers.public_gradient import PublicData, check_use, mixed_in
from userdp.plan import Plan
from userdp.prices.paid import Paid
from userdp.ranks import Ranks
from userdp.ranks.wishes import Wishes
from userdp.ranks_launched import is_restarted
from userdp.runs.checkpoints import Saving
from userdp.runs.early_end import EarlyEnd, charge_all
from userdp.runs.opening import Given
from userdp.runs.opening_together import made_alike, open_together
from userdp.runs.record import OnStep, RunRecord
from userdp.runs.shared_record import finish_together, ledger_of_first
from userdp.runs.state import Checkpoint, restore
from userdp.runs.validation_curve import Point
from userdp.sharding.dividing import divide, refuse_with_shards
from userdp.sharding.shard import first_runs
from userdp.sharding.whole import as_one_process
from userdp.statement import Statement
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import OwnLoss, Task, TaskName, cohort_batches
from userdp.training.configured import named_task
from userdp.training.progress import NoProgress, training_progress
from userdp.training.trackers import check_trackers, open_trackers
from userdp.training.validation import Validation
from userdp.training.watching import Watch
from userdp.updates.contract import refuse_public


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training run."""

    model: nn.Module
    ledger: Ledger
    path: Path | None
    validation: tuple[Point, ...] = ()
    # How many steps the runs that it goes on from took on the way to its first weights.
    before: int = 0

    @property
    def statement(self) -> Statement:
        """What may be said about the model."""
        return self.ledger.statement()


def train(
    model: nn.Module,
    tokenizer: Any,
    store: UserStore,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    schedule: str | None = None,
    warmup_steps: int | None = None,
    schedule_hold: float | None = None,
    ema: float | None = None,
    public: PublicData | None = None,
    sequence_length: int = 128,
    task: Task | TaskName | None = None,
    record_loss: RecordLoss | None = None,
    selection: Selection | None = None,
    select: str = "random",
    resample: bool = False,
    tokens_per_user: int | None = None,
    settings: StepSettings | None = None,
    out: str | Path | None = None,
    config: Path | None = None,
    paid: Sequence[Paid] = (),
    validation: Validation | None = None,
    trackers: Sequence[str] = (),
    other_people: bool = False,
    secret: RunSecret | None = None,
    saving: Saving | None = None,
    resume: bool = False,
    fork: bool = False,
    fork_step: int | None = None,
    dry_run: bool = False,
    on_step: OnStep | None = None,
    stop_early: Callable[[], bool] | None = None,
) -> Run:
    """Train `model` on the store's users as `plan` says. The model is changed in place.

    `task` says what is learned from a record: "causal", "chat", "masked", "classification", or a
    task of one's own. By default it is the next token, of chats in the assistant's turns only. With
    `record_loss`, a task's batches have a loss of one's own: one number per record.

    `optimizer` and `schedule` are names, with `learning_rate` and the other words of [training] in
    a configuration; or `optimizer` and `scheduler` are objects of torch. Without any, AdamW trains
    under a linear schedule, at the rate of `defaults.py`.

    Records of several owners need a `selection` that bounds what each owner contributes. A long
    record is then cut to one row, so the bound on records is also a bound on rows.

    `select` says which of a user's rows take part, and `resample` whether a user of few rows gives
    as many as others (`data.choose`). The perplexity criteria score records by `model` as it is
    given, which must be public. With `tokens_per_user`, users of fewer tokens give nothing, and the
    others their first so many (`data.same_size`).

    With `ema`, the released weights are an average over the steps (`WeightAverage`). With `public`,
    gradients of public records are mixed in after the noise; those records are not protected.

    `settings` say how sums are computed: in batches of many users, or one user at a time. The sums
    are the same.

    With `out`, the ledger is written to that directory, row by row, before each step's weights
    exist. The model and the statement follow at the end. `config` is the configuration file of the
    run. Looks at the data that were `paid` for are charged before the first step. `on_step` is told
    how many steps are done, and nothing else: losses, norms and cohorts are secret. Without it,
    stderr shows how far the run is: a bar on a terminal, a line now and then elsewhere.

    `validation` measures the model on other people's records. `trackers` log public numbers.

    A model that was trained privately before carries what was spent on it, and that is composed
    with this run. `other_people` declares that nobody in this store was in those earlier runs. Then
    each person is in one run only, and the statement gives the largest epsilon. If the runs' lists
    of users are available, they are compared. If not, the statement says so.

    Checkpoints are saved into `out` as `saving` says. With `resume`, the run in `out` goes on where
    it was stopped; give the model, the optimizer and everything else as at its beginning. A
    finished run goes on if the plan has more steps, and its cost is composed. With `fork`, a new
    run begins with the last checkpoint in `out`, or that after `fork_step` steps, under whatever
    has changed. What its parent was charged for is composed with it. A `dry_run` charges for every
    step and trains nothing.

    `stop_early` is asked after each step. If it says so, the run ends there, and every planned step
    is charged all the same: when to stop may depend on the weights.

    Where the process is one of several ranks (`torchrun`), all of them call this with the same
    arguments and take each step together (docs/distributed.md). The first rank alone writes `out`.
    """
    ranks = Ranks.found()
    refuse_mixing(model)
    if public is not None:
        refuse_public(plan.update)
    if settings is not None and settings.shard:
        refuse_with_shards(
            public=public is not None, average=ema is not None and validation is not None
        )
    if ranks.is_first and is_restarted() and fork:
        raise InputError(
            "the launcher restarted a fork, which would fork again at a new charge: start again "
            f"with {RESUME} instead of {FORK}."
        )
    settings = settings or StepSettings()
    own_task = None if task is None or isinstance(task, str) else task
    if task is None or isinstance(task, str):
        task = named_task(task, model, tokenizer, store, record_loss=record_loss)
    if record_loss is not None:
        digest = code_digest(record_loss)
        task = OwnLoss(task=task, record_loss=record_loss, digest=digest)
    with ranks.together():
        optimizer, scheduler = optimizer_and_schedule(
            model,
            plan.steps,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            optimizer_options=optimizer_options,
            scheduler=scheduler,
            schedule=schedule,
            warmup_steps=warmup_steps,
            schedule_hold=schedule_hold,
        )
    check_use(public, optimizer)
    check_trackers(trackers, None if out is None else Path(out))
    if dry_run and (resume or fork):
        raise InputError("dry_run begins a run of its own: leave out resume and fork.")
    average = None if ema is None else WeightAverage(model, decay=ema)
    given = Given(
        model=model,
        tokenizer=tokenizer,
        store=store,
        plan=plan,
        optimizer=optimizer,
        scheduler=scheduler,
        average=average,
        public=public,
        sequence_length=sequence_length,
        task=task,
        own_task=own_task,
        selection=selection,
        select=select,
        resample=resample,
        tokens_per_user=tokens_per_user,
        settings=settings,
        path=Path(out) if out is not None else None,
        config=config,
        paid=paid,
        validation=validation,
        other_people=other_people,
        secret=secret,
        saving=saving,
        # A launcher that restarts its processes starts them with the same command.
        resume=resume or (is_restarted() and out is not None and not fork and not dry_run),
        fork=fork,
        fork_step=fork_step,
        dry_run=dry_run,
        on_step=on_step,
        ranks=ranks,
    )
    opened = open_together(given)
    if opened.finished is not None:
        points = opened.validator.points
        return Run(
            model=model,
            ledger=opened.finished,
            path=given.path,
            validation=points,
            before=opened.beginning.before,
        )
    assert opened.record is not None
    record = opened.record
    with (
        record.closing(),
        _machine_may_fail(record),
        ExitStack() as files,
        same_every_time(settings.deterministic),
        signals_wait_for_the_step() as stop,
        ExitStack() as during,
    ):
        opened = made_alike(given, opened)
        # The first rank alone has files, budgets and trackers.
        ranks.on_first(lambda: files.enter_context(opened.counting(record.ledger)))
        tracked = ranks.on_first(lambda: files.enter_context(open_trackers(trackers, record.path)))
        if not opened.goes_on:
            ranks.on_first(lambda: opened.begin_files(record))
        if dry_run:
            ranks.on_first(lambda: charge_all(record, opened.released(record.ledger)))
            return Run(model=model, ledger=ledger_of_first(record), path=given.path)
        # Dropout is off: the noise regularises enough, and a group's update then depends only on
        # its rows.
        model.eval()
        if settings.shard:
            divide(model, optimizer, average, ranks, record.ledger.plan)
        row_choice = opened.rows
        chosen = row_choice.contributions(record.streams("choose rows"))
        step = PrivateStep(
            model,
            optimizer,
            record.ledger.plan,
            chosen.index(),
            record_loss=task.record_loss,
            settings=settings,
            sequence_length=sequence_length,
            record=record,
            row_lengths=row_choice.row_lengths,
        )
        example = task.example(tokenizer)
        before = opened.beginning.before
        # Whoever gives `on_step` shows progress in a way of their own.
        progress = NoProgress()
        if on_step is None and ranks.is_first:
            progress = during.enter_context(
                training_progress(
                    plan,
                    paid=record.ledger.paid,
                    earlier=record.ledger.earlier,
                    is_composed=fork or before > 0,
                )
            )
        if opened.moment is not None:
            restore(opened.moment, model, optimizer, scheduler, step, example, average)
        with ranks.together():
            step.check_model(example)
        progress.on_begin(before, record.steps)
        checkpoint = Checkpoint(record, model, optimizer, scheduler, step, before, average)
        during.enter_context(mixed_in(public, step, tokenizer, task, sequence_length))
        watch = Watch(
            record, step, model, optimizer, opened.validator, tracked or [], progress, average
        )
        # Measuring takes the first rank a while, and the others wait for it there.
        measure = _call if validation is None else partial(first_runs, model, ranks)
        measure(watch.begin)
        early_end = EarlyEnd(record, stop_early)
        if early_end.was_asked:
            early_end.charge_rest()
        is_settled = False
        for cohort in step.cohorts():
            step.apply(
                cohort_batches(
                    chosen, cohort, task, step=record.steps, streams=record.streams("rows")
                )
            )
            if not is_settled:
                # Before anybody sees the weights: a copy without steps may be given up later.
                ranks.on_first(lambda: opened.settle(record.ledger))
                is_settled = True
            # A run that is halted leaves the weights as they were.
            if scheduler is not None and not record.is_halted:
                scheduler.step()
            if average is not None and not record.is_halted:
                average.update()
            record.step_done()
            progress.on_step(record.steps)
            # Before the checkpoint: a run that goes on from it has this step's point.
            measure(watch.after_step)
            wishes = Wishes(
                save=checkpoint.is_due,
                stop=stop.number if step.steps_left else 0,
                end=early_end.is_asked,
            ).of_all(ranks)
            if wishes.save:
                checkpoint.begin_saving()
            if wishes.stop:
                checkpoint.save_and_stop(wishes.stop)
            if wishes.end:
                early_end.charge_rest()
        checkpoint.save()
        step.check_ranks()
        if average is not None:
            # The last checkpoint has the weights themselves: a longer run goes on from those.
            average.put_into_model()
        with as_one_process(model, ranks):
            finish_together(
                record,
                model,
                tokenizer,
                people=lambda: early_end.told(opened.released(record.ledger)),
            )
    points = opened.validator.points
    return Run(
        model=model,
        ledger=record.ledger,
        path=given.path,
        validation=points,
        before=opened.beginning.before,
    )


def _call(make: Callable[[], object]) -> object:
    return make()


@contextmanager
def _machine_may_fail(record: RunRecord) -> Iterator[None]:
    """Say in one line what stopped a run, and how it goes on: a full disk must lose nothing."""
    try:
        yield
    except OSError as error:
        if record.path is None:
            raise
        where = error.filename or record.path
        raise StoppedRunError(
            f"{where}: {error.strerror or error}. {record.steps:,} steps are charged, and what was "
            f"saved is in {record.path / 'checkpoints'}. Mend that, then go on with the same "
            f"command and {RESUME}."
        ) from error
