"""The private training loop over a store; it reads like Charles et al. 2024, Alg. 1 and 2.

`train` is the loop. `train_from_config` is what the command calls. It makes everything that the
configuration names, runs the loop, and leaves the run in a directory:

    config.toml  run.json  ledger.jsonl  statement.json  model/  report.html  MODEL_CARD.md
    secret/    for the owner alone, never to be published

Nothing else leaves a run: no loss on its training users, no norm, no cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp import defaults
from userdp.averaging import WeightAverage
from userdp.bounding.selection import Selection
from userdp.checkpoints import Moment, Saving, hardware_of
from userdp.clipping.kernels.running import same_every_time
from userdp.clipping.settings import StepSettings
from userdp.configured import named_task
from userdp.continuing import move_parent, start
from userdp.data.choose import Choice
from userdp.data.store import UserStore
from userdp.data.tokens import rows_digest, tokenizer_digest
from userdp.debits import check_budget, counted, released_about, settle, settle_parent
from userdp.digests import model_digest, scheduler_digest, task_digest
from userdp.earlier import Earlier
from userdp.early_end import EarlyEnd
from userdp.errors import InputError, StoppedRunError
from userdp.history import history_of
from userdp.interrupts import signals_wait_for_the_step
from userdp.ledger import Ledger
from userdp.lineage import earlier_runs
from userdp.losses import RecordLoss
from userdp.marked_price import check_selection
from userdp.optimizers import make_optimizer, make_schedule
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.population import Population
from userdp.probe import check_positions
from userdp.public_gradient import PublicData, mixed_in
from userdp.run_facts import of_parts, write_facts
from userdp.run_files import overlap, write_training_users
from userdp.run_record import OnStep, RunRecord, checkpoints_of
from userdp.run_state import Checkpoint, restore, restore_beginning, restore_finished
from userdp.same_run import check_same_config
from userdp.statement import Statement
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import OwnLoss, Task, TaskName, cohort_batches
from userdp.trackers import check_trackers, open_trackers
from userdp.training_choice import RowChoice
from userdp.training_rows import batches_of, rows_of, selection_name
from userdp.validation import Validation, validator_of
from userdp.validation_curve import Point
from userdp.watching import Watch


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training run."""

    model: nn.Module
    ledger: Ledger
    path: Path | None
    validation: tuple[Point, ...] = ()

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
    optimizer: torch.optim.Optimizer | None = None,
    learning_rate: float | None = None,
    scheduler: Any = None,
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

    Without an `optimizer`, AdamW trains under a linear schedule, at the rate of `defaults.py`.

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
    how many steps are done, and nothing else: losses, norms and cohorts are secret.

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
    """
    path = Path(out) if out is not None else None
    settings = settings or StepSettings()
    own_task = None if task is None or isinstance(task, str) else task
    if task is None or isinstance(task, str):
        task = named_task(task, model, tokenizer, store)
    if record_loss is not None:
        digest = scheduler_digest(record_loss)
        task = OwnLoss(task=task, record_loss=record_loss, digest=digest)
    if optimizer is None:
        optimizer = make_optimizer(model, "adamw", learning_rate)
        scheduler = scheduler or make_schedule(optimizer, defaults.SCHEDULE, plan.steps)
    check_trackers(trackers, path)
    if dry_run and (resume or fork):
        raise InputError("dry_run begins a run of its own: leave out resume and fork.")
    dtype = settings.compute_dtype
    make_validator = partial(
        validator_of, validation, tokenizer, store, path, sequence_length, task, dtype
    )
    started = start(
        path, model, plan, resume=resume, fork_of_it=fork, fork_step=fork_step, paid=paid
    )
    if path is not None and started.finished is not None:
        check_same_config(started.finished, config, path)
        restore_finished(path, started.finished, model)
        validator = make_validator(started.finished.earlier, (path,), goes_on=True)
        points = validator.after_last(model, started.finished.steps)
        return Run(model=model, ledger=started.finished, path=path, validation=points)
    plan, beginning = started.plan, started.beginning
    average = None if ema is None else WeightAverage(model, decay=ema)
    restore_beginning(beginning, model, optimizer, scheduler, average)

    # The ledger will name this data, so make sure that the data has not changed.
    store.verify()
    before = earlier_runs(model, other_people=other_people, data=store.fingerprint)
    plan.check_paid(paid, earlier=before)
    if selection is not None or select != "random" or resample or tokens_per_user:
        check_selection(plan)
    parents = () if beginning.parent is None else (beginning.parent,)
    homes = history_of(model).homes
    cautions = (*store.cautions, *_check_declared((*homes, *parents), store, before))
    cautions += () if public is None else tuple(public.cautions(store, before, (*homes, *parents)))
    check_positions(model, sequence_length)
    validator = make_validator(before, (*homes, *parents), goes_on=started.goes_on)
    people = Population.of(store)
    # What the runs before this one did not use is free for it.
    if started.given_up is not None and people.counts(started.given_up):
        people.settle(started.given_up, 0, None)
    if beginning.parent is not None:
        settle_parent(people, beginning.parent)
    if not started.goes_on:
        check_budget(people, plan, paid, before)
    rows = rows_of(store, tokenizer, plan, selection, sequence_length, encoding=task.encoding)
    row_choice = RowChoice.of(
        rows,
        Choice.of(select, resample=resample, tokens_per_user=tokens_per_user),
        plan,
        model,
        tokenizer,
        task=task.name,
        is_selected=selection is not None,
        batches=batches_of(rows, plan, selection),
        sequence_length=sequence_length,
        dry_run=dry_run,
    )
    device = next(model.parameters()).device
    name_rows = partial(
        rows_digest, tokenizer=tokenizer, sequence_length=sequence_length, encoding=task.encoding
    )
    bound_to = {
        "data": store.fingerprint,
        "selection": selection_name(store, selection),
        "select": row_choice.name(store),
        "sequence_length": str(sequence_length),
        "task": task.name,
        "tokenizer": tokenizer_digest(tokenizer),
        "rows": name_rows(store),
        "model": model_digest(model),
        "schedule": scheduler_digest(scheduler),
        "settings": str(settings),
        "device": device.type,
        "hardware": hardware_of(device),
    }
    bound_to |= {} if own_task is None else {"task_code": task_digest(own_task)}
    bound_to |= {} if ema is None else {"ema": str(ema)}
    bound_to |= {} if public is None else {"public": f"{public.digest} {name_rows(public.store)}"}
    moment: Moment | None = None
    if path is not None and started.goes_on:
        moment = checkpoints_of(path).newest()
        record = RunRecord.resume(
            plan,
            model,
            optimizer,
            path=path,
            moment=moment,
            bound_to=bound_to,
            secret=secret,
            config=config,
            saving=saving,
            on_step=on_step,
        )
    else:
        if path is not None and beginning.parent is not None:
            parent = move_parent(path, beginning.parent)
            homes = (*homes, parent)
        record = RunRecord.create(
            plan,
            model,
            optimizer,
            settings=settings,
            secret=secret,
            path=path,
            bound_to=bound_to,
            config=config,
            cautions=cautions,
            saving=saving,
            on_step=on_step,
        )
    with (
        record.closing(),
        _machine_may_fail(record),
        counted(people, record.ledger, path, paid=paid, earlier=before),
        same_every_time(settings.deterministic),
        open_trackers(trackers, record.path) as opened,
        signals_wait_for_the_step() as stop,
        ExitStack() as during,
    ):
        if not started.goes_on:
            record.ledger.inherit(before)
            for item in paid:
                record.ledger.charge(item.event, what=item.what)
            if record.path is not None:
                write_training_users(record.path, record.ledger.run_digest, store, homes)
                facts = of_parts(model, optimizer, scheduler, store, task.name, sequence_length)
                write_facts(record.path, facts)
            averaged = None if average is None else average.state_dict()
            record.keep_beginning(model, optimizer, before=beginning.before, average=averaged)
        if dry_run:
            record.charge_all(released_about(people, record.ledger))
            return Run(model=model, ledger=record.ledger, path=record.path)
        # Dropout is off: the noise regularises enough, and a group's update then depends only on
        # its rows.
        model.eval()
        chosen = row_choice.contributions(record.streams("choose rows"))
        step = PrivateStep(
            model,
            optimizer,
            plan,
            chosen.index(),
            record_loss=task.record_loss,
            settings=settings,
            sequence_length=sequence_length,
            record=record,
        )
        example = task.example(tokenizer)
        if moment is not None:
            restore(moment, model, optimizer, scheduler, step, example, average)
        step.check_model(example)
        checkpoint = Checkpoint(
            record, model, optimizer, scheduler, step, beginning.before, average
        )
        during.enter_context(mixed_in(public, step, tokenizer, task, sequence_length))
        watch = Watch(record, step, model, optimizer, validator, opened, average)
        watch.begin()
        early_end = EarlyEnd(record, stop_early)
        is_settled = False
        for cohort in step.cohorts():
            step.apply(
                cohort_batches(
                    chosen, cohort, task, step=record.steps, streams=record.streams("rows")
                )
            )
            if not is_settled:
                # Before anybody sees the weights: a copy without steps may be given up later.
                settle(people, record.ledger)
                is_settled = True
            # A run that is halted leaves the weights as they were.
            if scheduler is not None and not record.is_halted:
                scheduler.step()
            if average is not None and not record.is_halted:
                average.update()
            record.step_done()
            # Before the checkpoint: a run that goes on from it has this step's point.
            watch.after_step()
            checkpoint.save_if_due()
            if stop and step.steps_left:
                checkpoint.save_and_stop(stop.number)
            early_end.charge_rest_if_asked()
        checkpoint.save()
        if average is not None:
            # The last checkpoint has the weights themselves: a longer run goes on from those.
            average.put_into_model()
        told = early_end.told(released_about(people, record.ledger))
        record.finish(model, tokenizer, people=told)
    return Run(model=model, ledger=record.ledger, path=record.path, validation=validator.points)


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
            "command and --resume."
        ) from error


UNCHECKED_PEOPLE = (
    "that the people of the earlier runs are others was declared and could not be checked: a list "
    "of their users is not there, or hides ids under another key, or compares ids by another rule; "
    "whoever is in several runs has spent more than is stated"
)


def _check_declared(
    homes: Sequence[Path], store: UserStore, before: Sequence[Earlier]
) -> list[str]:
    """Refuse a wrong declaration of other people. Gives a caution if it cannot be checked."""
    people = {item.run: item.people for item in before}
    if not any(people.values()):
        return []
    found = overlap(store, people, homes)
    if found.shared:
        raise InputError(
            f"other_people is declared, and {found.shared:,} users are in several of the runs, by "
            "the runs' own lists: what they have spent adds up. Leave the declaration out, and the "
            "runs are composed; or train on a store without these users."
        )
    return [] if found.is_known else [UNCHECKED_PEOPLE]
