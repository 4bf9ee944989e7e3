"""How a run is opened: what is looked up, refused, bound and written before its first step.

`open_run` runs on the rank that writes the run's files. The others open the same run without files
(`opening_together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.bounding.selection import Selection
from userdp.budget.debits import check_budget, counted, released_about, settle, settle_parent
from userdp.budget.population import Population
from userdp.clipping.settings import StepSettings
from userdp.data.choose import Choice
from userdp.data.store import UserStore
from userdp.data.tokens import rows_digest, tokenizer_digest
from userdp.digests.of_runs import code_digest, model_digest, task_digest
from userdp.errors import InputError
from userdp.history import history_of
from userdp.ledger.book import Ledger
from userdp.ledger.lineage import earlier_runs
from userdp.optimizers.averaging import WeightAverage
from userdp.optimizers.public_gradient import PublicData
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.marked import check_selection
from userdp.prices.paid import Paid
from userdp.probe.verify import check_positions
from userdp.ranks import Ranks
from userdp.runs.checkpoints import Moment, Saving, checkpoints_of, hardware_of
from userdp.runs.continuing import Beginning, beginning_of, move_parent, start
from userdp.runs.facts import of_parts, write_facts
from userdp.runs.files import overlap, write_training_users
from userdp.runs.record import OnStep, RunRecord
from userdp.runs.same import check_same, check_same_config, digests_of, write_ranks
from userdp.runs.state import restore_beginning, restore_finished
from userdp.sharded_tensors import device_of
from userdp.streams import RunSecret
from userdp.tasks import OwnLoss, Task
from userdp.training.choice import RowChoice
from userdp.training.rows import batches_of, rows_of, selection_name
from userdp.training.validation import Validation, Validator, validator_of


@dataclass(frozen=True, kw_only=True)
class Given:
    """What `train` was given, with its defaults filled in."""

    model: nn.Module
    tokenizer: Any
    store: UserStore
    plan: Plan
    optimizer: torch.optim.Optimizer
    scheduler: Any
    average: WeightAverage | None
    public: PublicData | None
    sequence_length: int
    task: Task
    own_task: Task | None
    selection: Selection | None
    select: str
    resample: bool
    tokens_per_user: int | None
    settings: StepSettings
    path: Path | None
    config: Path | None
    paid: Sequence[Paid]
    validation: Validation | None
    other_people: bool
    secret: RunSecret | None
    saving: Saving | None
    resume: bool
    fork: bool
    fork_step: int | None
    dry_run: bool
    on_step: OnStep | None
    ranks: Ranks


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run that is about to take its steps; `finished` is the ledger of one that has none left.

    `files` is what only the rank that writes has.
    """

    beginning: Beginning
    goes_on: bool = False
    finished: Ledger | None = None
    record: RunRecord | None = None
    moment: Moment | None = None
    row_choice: RowChoice | None = None
    bound_to: dict[str, str] = field(default_factory=dict[str, str])
    validator: Validator = field(default_factory=Validator)
    files: Files | None = None

    @property
    def rows(self) -> RowChoice:
        """The rows that the run trains on."""
        assert self.row_choice is not None
        return self.row_choice

    def _files(self) -> Files:
        assert self.files is not None
        return self.files

    def counting(self, ledger: Ledger) -> AbstractContextManager[None]:
        """Count the whole plan in the people's budget now, and at the end what the run cost."""
        files = self._files()
        path, paid = files.given.path, files.given.paid
        return counted(files.people, ledger, path, paid=paid, earlier=files.before)

    def settle(self, ledger: Ledger) -> None:
        """Count what the run cost so far."""
        settle(self._files().people, ledger)

    def released(self, ledger: Ledger) -> dict[str, Any]:
        """What else was released about these people."""
        return released_about(self._files().people, ledger)

    def begin_files(self, record: RunRecord) -> None:
        """Write what a new run has beside its first row, before its first step."""
        files, given = self._files(), self._files().given
        record.ledger.inherit(files.before)
        for item in given.paid:
            record.ledger.charge(item.event, what=item.what)
        model, optimizer, store = given.model, given.optimizer, given.store
        if record.path is not None:
            write_training_users(record.path, record.ledger.run_digest, store, files.homes)
            task, length = given.task.name, given.sequence_length
            own = given.task.loss_name if isinstance(given.task, OwnLoss) else ""
            facts = of_parts(
                model, optimizer, given.scheduler, store, task, length, record_loss=own
            )
            write_facts(record.path, facts)
        averaged = None if given.average is None else given.average.state_dict()
        record.keep_beginning(model, optimizer, before=self.beginning.before, average=averaged)


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the rank that writes has: the budget of the store's people, and earlier runs."""

    given: Given
    people: Population
    before: Sequence[Earlier]
    homes: tuple[Path, ...]


def open_run(given: Given) -> Opened:
    """Open the run on the rank that writes its files; refuse it if it must not begin."""
    path, model, store = given.path, given.model, given.store
    make_validator = partial(
        validator_of,
        given.validation,
        given.tokenizer,
        store,
        path,
        given.sequence_length,
        given.task,
        given.settings.compute_dtype,
    )
    started = start(
        path,
        model,
        given.plan,
        resume=given.resume,
        fork_of_it=given.fork,
        fork_step=given.fork_step,
        paid=given.paid,
    )
    plan, beginning = started.plan, started.beginning
    restore_beginning(beginning, model, given.optimizer, given.scheduler, given.average)
    if path is not None and started.finished is not None:
        _check_finished(given, started.finished, plan, path)
        restore_finished(path, started.finished, model)
        validator = make_validator(started.finished.earlier, (path,), goes_on=True)
        validator.after_last(model, started.finished.steps)
        return Opened(beginning=beginning_of(path), finished=started.finished, validator=validator)

    # The ledger will name this data, so make sure that the data has not changed.
    store.verify()
    before = earlier_runs(model, other_people=given.other_people, data=store.fingerprint)
    plan.check_paid(given.paid, earlier=before)
    chooses = given.select != "random" or given.resample or given.tokens_per_user
    if given.selection is not None or chooses:
        check_selection(plan)
    parents = () if beginning.parent is None else (beginning.parent,)
    homes = history_of(model).homes
    cautions = (*store.cautions, *_check_declared((*homes, *parents), store, before))
    if given.public is not None:
        cautions += tuple(given.public.cautions(store, before, (*homes, *parents)))
    check_positions(model, given.sequence_length)
    validator = make_validator(before, (*homes, *parents), goes_on=started.goes_on)
    people = Population.of(store)
    # A run that was given up before its first step has used nothing, so its part of the budget is
    # free again.
    if started.given_up is not None and people.counts(started.given_up):
        people.settle(started.given_up, 0, None)
    if beginning.parent is not None:
        settle_parent(people, beginning.parent)
    if not started.goes_on:
        check_budget(people, plan, given.paid, before)
    row_choice, bound_to = rows_and_names(given, plan)
    moment: Moment | None = None
    if path is not None and started.goes_on:
        moment = checkpoints_of(path).newest()
        record = RunRecord.resume(
            plan,
            model,
            given.optimizer,
            path=path,
            moment=moment,
            bound_to=bound_to,
            secret=given.secret,
            config=given.config,
            saving=given.saving,
            on_step=given.on_step,
            num_ranks=given.ranks.count,
            sharded=given.settings.shard and given.ranks.count > 1,
        )
    else:
        if path is not None and beginning.parent is not None:
            homes = (*homes, move_parent(path, beginning.parent))
        record = RunRecord.create(
            plan,
            model,
            given.optimizer,
            settings=given.settings,
            secret=given.secret,
            path=path,
            bound_to=bound_to,
            config=given.config,
            cautions=cautions,
            saving=given.saving,
            on_step=given.on_step,
        )
    if path is not None:
        write_ranks(path, given.ranks.count, sharded=given.settings.shard)
    return Opened(
        beginning=beginning,
        goes_on=started.goes_on,
        record=record,
        moment=moment,
        row_choice=row_choice,
        bound_to=bound_to,
        validator=validator,
        files=Files(given=given, people=people, before=before, homes=homes),
    )


def _check_finished(given: Given, ledger: Ledger, plan: Plan, path: Path) -> None:
    """Refuse to give a finished run for one that was begun otherwise."""
    check_same_config(ledger, given.config, path)
    # A configuration says all of what is compared here.
    if given.config is None:
        _, bound_to = rows_and_names(given, plan)
        named = digests_of(plan, given.model, given.optimizer, bound_to)
        check_same(ledger, plan, named, None, path)


def rows_and_names(given: Given, plan: Plan) -> tuple[RowChoice, dict[str, str]]:
    """The rows that a run trains on, and everything that it is bound to, by name."""
    model, store, task = given.model, given.store, given.task
    is_selected = given.selection is not None
    rows = rows_of(
        store, given.tokenizer, plan, given.selection, given.sequence_length, encoding=task.encoding
    )
    row_choice = RowChoice.of(
        rows,
        Choice.of(given.select, resample=given.resample, tokens_per_user=given.tokens_per_user),
        plan,
        model,
        given.tokenizer,
        task=task.name,
        is_selected=is_selected,
        batches=batches_of(rows, plan, given.selection),
        sequence_length=given.sequence_length,
        dry_run=given.dry_run,
    )
    name_rows = partial(
        rows_digest,
        tokenizer=given.tokenizer,
        sequence_length=given.sequence_length,
        encoding=task.encoding,
    )
    device = device_of(model, sharded=given.settings.shard and given.ranks.count > 1)
    bound_to = {
        "data": store.fingerprint,
        "selection": selection_name(store, given.selection),
        "select": row_choice.name(store),
        "sequence_length": str(given.sequence_length),
        "task": task.name,
        "tokenizer": tokenizer_digest(given.tokenizer),
        "rows": name_rows(store),
        "model": model_digest(model),
        "schedule": code_digest(given.scheduler),
        "settings": str(given.settings),
        "device": device.type,
        "hardware": hardware_of(device),
    }
    own_task, average, public = given.own_task, given.average, given.public
    bound_to |= {} if own_task is None else {"task_code": task_digest(own_task)}
    bound_to |= {} if average is None else {"ema": str(average.decay)}
    bound_to |= {} if public is None else {"public": f"{public.digest} {name_rows(public.store)}"}
    return row_choice, bound_to


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
