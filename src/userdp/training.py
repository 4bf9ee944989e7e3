"""The private training loop over a store; it reads like Charles et al. 2024, Alg. 1 and 2.

`train` is the loop. `train_from_config` is what the command calls. It makes everything that the
configuration names, runs the loop, and leaves the run in a directory:

    config.toml  ledger.jsonl  statement.json  model/  report.html  MODEL_CARD.md
    secret/    for the owner alone, never to be published

Nothing else leaves a run: no loss on its training users, no norm, no cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.bounding.selection import Selection
from userdp.checkpoints import Moment, Saving, hardware_of
from userdp.clipping.kernels.running import same_every_time
from userdp.clipping.settings import StepSettings
from userdp.config import Config
from userdp.continuing import move_parent, start
from userdp.data.store import UserStore
from userdp.data.tokens import tokenizer_digest
from userdp.debits import check_budget, counted, released_about, settle_parent
from userdp.digests import model_digest, scheduler_digest
from userdp.earlier import Earlier
from userdp.errors import InputError, StoppedRunError
from userdp.history import history_of
from userdp.interrupts import signals_wait_for_the_step
from userdp.ledger import Ledger
from userdp.lineage import earlier_runs
from userdp.marked_price import check_selection
from userdp.models.load import Lora, load_model
from userdp.optimizers import make_optimizer, make_schedule
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.population import Population
from userdp.probe import check_positions
from userdp.run_files import overlap, write_training_users
from userdp.run_record import OnStep, RunRecord, checkpoints_of
from userdp.run_state import Checkpoint, restore, restore_beginning, restore_finished
from userdp.same_run import NOISE_KEY, check_same_config
from userdp.statement import Statement
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, Task
from userdp.training_rows import cohort_batches, rows_of, selection_name


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training run."""

    model: nn.Module
    ledger: Ledger
    path: Path | None

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
    learning_rate: float = 1e-3,
    scheduler: Any = None,
    sequence_length: int = 128,
    task: Task | None = None,
    selection: Selection | None = None,
    settings: StepSettings | None = None,
    out: str | Path | None = None,
    config: Path | None = None,
    paid: Sequence[Paid] = (),
    other_people: bool = False,
    secret: RunSecret | None = None,
    saving: Saving | None = None,
    resume: bool = False,
    fork: bool = False,
    fork_step: int | None = None,
    dry_run: bool = False,
    on_step: OnStep | None = None,
) -> Run:
    """Train `model` on the store's users as `plan` says. The model is changed in place.

    `task` says what is learned from a record; by default the next token, everywhere in it.

    Records of several owners need a `selection` that bounds what each owner contributes. A long
    record is then cut to one row, so the bound on records is also a bound on rows.

    `settings` say how sums are computed: in batches of many users, or one user at a time. The sums
    are the same.

    With `out`, the ledger is written to that directory, row by row, before each step's weights
    exist. The model and the statement follow at the end. `config` is the configuration file of the
    run. Looks at the data that were `paid` for are charged before the first step. `on_step` is told
    how many steps are done, and nothing else: losses, norms and cohorts are secret.

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
    """
    path = Path(out) if out is not None else None
    settings = settings or StepSettings()
    task = task or CausalTask(pad_token=tokenizer.pad_token_id)
    if optimizer is None:
        optimizer = make_optimizer(model, "adamw", learning_rate)
    if dry_run and (resume or fork):
        raise InputError("dry_run begins a run of its own: leave out resume and fork.")
    started = start(
        path, model, plan, resume=resume, fork_of_it=fork, fork_step=fork_step, paid=paid
    )
    if path is not None and started.finished is not None:
        check_same_config(started.finished, config, path)
        restore_finished(path, started.finished, model)
        return Run(model=model, ledger=started.finished, path=path)
    plan, beginning = started.plan, started.beginning
    restore_beginning(beginning, model, optimizer, scheduler)

    # The ledger will name this data, so make sure that the data has not changed.
    store.verify()
    before = earlier_runs(model, other_people=other_people, data=store.fingerprint)
    plan.check_paid(paid, earlier=before)
    if selection is not None:
        check_selection(plan)
    parents = () if beginning.parent is None else (beginning.parent,)
    homes = history_of(model).homes
    cautions = (*store.cautions, *_check_declared((*homes, *parents), store, before))
    check_positions(model, sequence_length)
    people = Population.of(store)
    # What the runs before this one did not use is free for it.
    if started.given_up is not None and people.counts(started.given_up):
        people.settle(started.given_up, 0, None)
    if beginning.parent is not None:
        settle_parent(people, beginning.parent)
    if not started.goes_on:
        check_budget(people, plan, paid, before)
    rows = rows_of(store, tokenizer, plan, selection, sequence_length)
    device = next(model.parameters()).device
    bound_to = {
        "data": store.fingerprint,
        "selection": selection_name(store, selection),
        "sequence_length": str(sequence_length),
        "task": task.name,
        "tokenizer": tokenizer_digest(tokenizer),
        "model": model_digest(model),
        "schedule": scheduler_digest(scheduler),
        "settings": str(settings),
        "device": device.type,
        "hardware": hardware_of(device),
    }
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
        signals_wait_for_the_step() as stop,
    ):
        if not started.goes_on:
            record.ledger.inherit(before)
            for item in paid:
                record.ledger.charge(item.event, what=item.what)
            if record.path is not None:
                write_training_users(record.path, record.ledger.run_digest, store, homes)
            record.keep_beginning(model, optimizer, before=beginning.before)
        if dry_run:
            record.charge_all(released_about(people, record.ledger))
            return Run(model=model, ledger=record.ledger, path=record.path)
        # Dropout is off: the noise regularises enough, and a group's update then depends only on
        # its rows.
        model.eval()
        step = PrivateStep(
            model,
            optimizer,
            plan,
            rows.index(),
            record_loss=task.record_loss,
            settings=settings,
            sequence_length=sequence_length,
            record=record,
        )
        example = task.example(tokenizer)
        if moment is not None:
            restore(moment, model, optimizer, scheduler, step, example)
        step.check_model(example)
        checkpoint = Checkpoint(record, model, optimizer, scheduler, step, beginning.before)
        for cohort in step.cohorts():
            step.apply(
                cohort_batches(
                    rows, cohort, task, step=record.steps, streams=record.streams("rows")
                )
            )
            if scheduler is not None:
                scheduler.step()
            record.step_done()
            checkpoint.save_if_due()
            if stop and step.steps_left:
                checkpoint.save_and_stop(stop.number)
        checkpoint.save()
        record.finish(model, tokenizer, people=released_about(people, record.ledger))
    return Run(model=model, ledger=record.ledger, path=record.path)


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


def train_from_config(
    config_path: Path,
    config: Config,
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    fork: bool = False,
    fork_step: int | None = None,
    dry_run: bool = False,
    on_step: OnStep | None = None,
) -> Run:
    """Train as the configuration says and leave the run in `out`."""
    _check_out(out, goes_on=resume or fork)
    paid = config.load_paid()
    plan.check_paid(paid)
    store = UserStore.open(config.data.store)
    settings = config.training
    model, tokenizer = load_configured_model(config)
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    seed = settings.fixed_seed
    return train(
        model,
        tokenizer,
        store,
        plan,
        optimizer=optimizer,
        scheduler=make_schedule(optimizer, settings.schedule, settings.steps),
        sequence_length=config.data.sequence_length,
        selection=config.load_selection(),
        settings=step_settings(config),
        out=out,
        config=config_path,
        paid=paid,
        other_people=config.privacy.other_people,
        secret=None if seed is None else RunSecret.fixed_for_tests(seed),
        saving=Saving(
            every_steps=settings.checkpoint_every,
            every_minutes=settings.checkpoint_minutes,
            keep=settings.keep_checkpoints,
        ),
        resume=resume,
        fork=fork,
        fork_step=fork_step,
        dry_run=dry_run,
        on_step=on_step,
    )


def _check_out(out: Path, *, goes_on: bool) -> None:
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    holds_something = bool(names) or (out.exists() and not out.is_dir())
    # A run that was stopped at once has a secret alone.
    is_run = names == ["secret"] or bool({"ledger.jsonl", "earlier"} & set(names))
    if holds_something and not (goes_on and is_run):
        way_out = " Say --resume to go on with the run in it." if (out / NOISE_KEY).exists() else ""
        raise InputError(
            f"{out} already holds something: choose another output directory.{way_out}"
        )


def load_configured_model(config: Config) -> tuple[nn.Module, Any]:
    """The model to train, with adapters if the configuration asks for them, and its tokenizer."""
    return load_model(
        config.model.path,
        lora=Lora(**config.model.lora.model_dump()) if config.model.lora else None,
        gguf_file=config.model.gguf_file,
        dtype=getattr(torch, config.model.dtype),
        device=config.training.device,
    )


def step_settings(config: Config) -> StepSettings:
    """The configuration's choices of how to compute sums."""
    given = config.training
    shared = StepSettings.__dataclass_fields__.keys() & type(given).model_fields.keys()
    return StepSettings(
        **{name: getattr(given, name) for name in shared - {"compute_dtype"}},
        compute_dtype=torch.bfloat16 if given.autocast_dtype == "bfloat16" else None,
    )
