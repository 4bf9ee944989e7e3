"""What `evaluate` and `personalize` share: a model, and other people's store to measure it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from userdp.cli import common
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.history import read_history
from userdp.names.tasks import TaskName
from userdp.runs.facts import has_facts, own_loss
from userdp.runs.files import TRAINER_RUN, overlap, read_run, run_of, shared_users

DEFAULT_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A loaded model, its tokenizer, the store, how long rows are, and what is predicted.

    `own_loss` names the loss that the run trained with, if it was not the task's.
    `base_checked` says whether an adapter's base is the one of the ledger; None if nobody can tell.
    `overlap_checked` says whether users were compared with those of training; None if there are no
    lists of them.
    """

    model: Any
    tokenizer: Any
    store: UserStore
    sequence_length: int
    task: Any
    own_loss: str
    unfinished: bool
    base_checked: bool | None
    overlap_checked: bool | None


def open_measured(
    model: str,
    store: Path,
    *,
    sequence_length: int | None,
    task: TaskName | None = None,
    unfinished: bool,
    allow_overlap: bool = False,
    has_allow_overlap: bool = False,
    device: str = "cpu",
) -> Measured:
    """Load the model of a run, or any model, once it is known that the store's users are others."""
    if sequence_length is not None and sequence_length < 2:
        raise InputError(
            f"--sequence-length {sequence_length}: predicting takes at least 2 tokens. Give 2 or "
            "more, or leave the option out."
        )
    held_out = UserStore.open(store)
    run = run_of(Path(model))
    record = None
    if run is not None:
        record = read_run(run, unfinished=unfinished)
        for problem in record.problems:
            common.say(f"unfinished: {problem}")
        if not (run / "model").is_dir():
            raise InputError(f"{run} has no model: it was a dry run, or was stopped.")
    overlap_checked: bool | None = False
    if not allow_overlap:
        overlap_checked = _refuse_training_users(Path(model), run, held_out, has_allow_overlap)
    common.quiet_transformers()
    from userdp.clipping.execute.models import most_positions
    from userdp.models.heads import named_classes, task_of_head
    from userdp.models.load import load_model, moved
    from userdp.probe.verify import check_positions
    from userdp.runs import saved as saved_run
    from userdp.training.configured import named_task

    facts = None
    if run is not None and has_facts(run):
        loaded, tokenizer, facts = saved_run.load_run(run)
        length = facts.sequence_length
        task = task or facts.task
    else:
        source = Path(model) if run is None else run / "model"
        task = task or task_of_head(named_classes(source) if source.is_dir() else ())
        loaded, tokenizer = load_model(model if run is None else source, task=task or "causal")
        # Nobody asked for this length, so it gives way to the model's.
        length = min(DEFAULT_LENGTH, most_positions(loaded) or DEFAULT_LENGTH)
    base_checked = None
    if run is not None and record is not None and (run / "model/adapter_config.json").is_file():
        base_checked = saved_run.check_base(run, record.ledger, loaded, unfinished=unfinished)
        if base_checked is None:
            common.say("note: the ledger does not name the base model, so it was not compared.")
        elif not base_checked:
            common.say(f"unfinished: {saved_run.OTHER_BASE}")
    if sequence_length is not None:
        length = sequence_length
    check_positions(loaded, length)
    return Measured(
        model=moved(loaded, device),
        tokenizer=tokenizer,
        store=held_out,
        sequence_length=length,
        task=named_task(task, loaded, tokenizer, held_out),
        own_loss="" if record is None else own_loss(record.ledger.bound_to, facts),
        unfinished=record is not None and (bool(record.problems) or base_checked is False),
        base_checked=base_checked,
        overlap_checked=overlap_checked,
    )


def about_loss(found: Measured) -> str:
    """A line for runs that trained with a loss of their own; empty for others."""
    if not found.own_loss:
        return ""
    return (
        f"trained with a loss of its own ({found.own_loss}); measured here is the usual loss of "
        f"the task\n"
    )


def _refuse_training_users(
    model: Path, run: Path | None, held_out: UserStore, has_allow_overlap: bool
) -> bool | None:
    """Raise if users of the store were trained on, or if that cannot be known.

    True if they were compared, and None for a model that is of no run.
    """
    if run is not None:
        shared = shared_users(run, held_out)
    elif model.is_dir() and (past := read_history(model)) is not None:
        # A trainer's checkpoint lies beside the run, which has the lists of users.
        homes = (*past.homes, *(place / TRAINER_RUN for place in (model, model.resolve().parent)))
        found = overlap(held_out, {entry["run"]: 1 for entry in past.entries}, homes)
        shared = found.shared if found.shared or found.is_known else None
    else:
        # No run of ours made this model, so there are no training users.
        return None
    told = " Or say --allow-overlap: a loss on training users is covered by no guarantee."
    if shared is None:
        way_out = told if has_allow_overlap else ""
        raise InputError(f"{model}: {common.UNCHECKED_OVERLAP}{way_out}")
    way_out = "Evaluate on others, or say --allow-overlap." if has_allow_overlap else "Take others."
    common.refuse_overlap(shared, held_out, way_out=way_out)
    return True
