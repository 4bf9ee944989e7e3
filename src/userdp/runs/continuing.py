"""Where a run goes on from: its own checkpoint, or as a fork from the checkpoint of another run.

Resuming takes the steps that are left, with the noise that the run began with. A fork is a new run
with new noise. It begins with the weights of a checkpoint, and everything that its parent was
charged for is composed with it. The parent's files move to `RUN/earlier/001/`, and it cannot go on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from userdp.errors import FORK, InputError, LedgerError
from userdp.files.chain import without_torn_row
from userdp.files.remembered import CHECKPOINTS, SUMS, checkpoint_places, steps_with_sums
from userdp.files.rows import RowsFile
from userdp.history import History, carry, history_of, merged
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices.paid import Paid
from userdp.runs.checkpoints import Moment, checkpoints_of
from userdp.runs.files import EARLIER, NOISE_KEY, discard, missing_rows
from userdp.runs.same import stored_secret

# The ledger moves last: as long as it is there, the files are not all moved.
MOVED = (
    "statement.json",
    "report.html",
    "MODEL_CARD.md",
    "validation.jsonl",
    "trackers",
    "run.json",
    "model",
    "config.toml",
    "checkpoints",
    "secret",
    "ledger.jsonl",
)


def charged_ledger(run: Path) -> Ledger | None:
    """The ledger in `run`, to look at; None if it was charged for no step.

    A last row that was cut short by a kill is cut off.
    """
    path = run / "ledger.jsonl"
    if not path.is_file():
        return None
    content = path.read_bytes()
    whole = without_torn_row(content)
    if not whole:
        return None
    if whole != content:
        Ledger.open(path).close()
    found = Ledger.read(path)
    return found if found.steps else None


def clear_unbegun(run: Path) -> str | None:
    """Delete what a run left that was stopped before its first step: it has released nothing.

    Returns the digest of that run, if its first row was written.
    """
    path = run / "ledger.jsonl"
    digest = None
    _refuse_other_files(run)
    if path.is_file():
        # Under the lock, so that a run which is just beginning elsewhere is not deleted.
        held = RowsFile.open(path)
        try:
            if b"\n" in path.read_bytes():
                digest = Ledger.read(path, without_torn_row=True).run_digest
            discard(run)
        finally:
            held.close()
    elif run.is_dir():
        discard(run)
    return digest


def _refuse_other_files(run: Path) -> None:
    """Refuse to delete files that a run stopped before its first step would not have left."""
    results = [name for name in ("model", "statement.json") if (run / name).exists()]
    results += [f"{CHECKPOINTS}/{path.name}" for path in checkpoint_places(run / CHECKPOINTS)]
    results += [SUMS.as_posix()] * bool(steps_with_sums(run))
    if results:
        raise LedgerError(
            f"{run} holds {results[0]}, and its ledger no step: rows were cut off, or the ledger "
            "is lost, and nobody knows what was spent. Restore ledger.jsonl, or choose another "
            "output directory. Nothing was deleted."
        )
    others = (CHECKPOINTS, "config.toml")
    secrets = {path.name for path in (run / "secret").glob("*")} - {"noise.key", SUMS.name}
    found = sorted(secrets) or [name for name in others if (run / name).exists()]
    if found and not (run / "ledger.jsonl").is_file():
        raise InputError(
            f"{run} holds {found[0]!r} and no ledger: it is not a run that can go on. Choose "
            "another output directory."
        )


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run begins with, if not with the model as it was loaded.

    `before` is the number of steps that the runs before it took on the way to these weights.
    `parent` is the directory of the run that a fork comes from.
    """

    before: int = 0
    moment: Moment | None = None
    parent: Path | None = None


def beginning_of(run: Path) -> Beginning:
    """What the run in `run` began with."""
    moment = checkpoints_of(run).initial()
    return Beginning(before=0 if moment is None else moment.state["before"], moment=moment)


def fork(run: Path, model: nn.Module, *, step: int | None = None) -> Beginning:
    """Begin a new run with the last checkpoint in `run`, or with the one after `step` steps.

    From here on the model carries what the parent was charged for.
    """
    parent = run
    ledger = charged_ledger(run)
    if ledger is None:
        parent = _last_moved(run)
        ledger = None if parent is None else charged_ledger(parent)
    if parent is None or ledger is None:
        raise InputError(f"{run} holds no run that was charged: there is nothing to fork.")
    checkpoints = checkpoints_of(parent)
    began = checkpoints.initial()
    # Rows that were cut off would be steps that nobody counts.
    if what := missing_rows(parent, ledger):
        raise LedgerError(
            f"{parent} holds {what}, which is of more steps than its ledger has: rows were cut "
            "off. Restore ledger.jsonl."
        )
    moment = checkpoints.newest(step) or (began if step in (None, 0) else None)
    if step is not None and (moment is None or moment.step != step):
        raise InputError(f"{parent / 'checkpoints'} has no checkpoint after {step} steps.")
    if moment is None and not ledger.fixed_seed and not (parent / NOISE_KEY).is_file():
        raise InputError(
            f"{parent} was finalized and has no checkpoint left, so there is nothing to fork. "
            "Train with another output directory."
        )
    if moment is not None and moment.step > ledger.steps:
        raise InputError(f"{parent} goes on in another process: wait for it, or stop it.")
    entry = ledger.as_entry()
    assert entry is not None
    entries = (*(item.to_json() for item in ledger.earlier), entry)
    carry(model, merged(history_of(model), History(entries=entries)))
    before = 0 if began is None else began.state["before"]
    return Beginning(
        before=before + (0 if moment is None else moment.step), moment=moment, parent=parent
    )


def move_parent(run: Path, parent: Path) -> Path:
    """Move the parent's files out of the way of the fork; returns where they are now."""
    if parent == run:
        _move(run, _next_place(run))
    found = _last_moved(run)
    assert found is not None
    return found


def _places(run: Path) -> list[Path]:
    return sorted((run / EARLIER).glob("[0-9][0-9][0-9]"))


def _last_moved(run: Path) -> Path | None:
    whole = [place for place in _places(run) if (place / "ledger.jsonl").is_file()]
    return whole[-1] if whole else None


def _next_place(run: Path) -> Path:
    last = max((int(place.name) for place in _places(run)), default=0)
    return run / EARLIER / f"{last + 1:03d}"


def _finish_moving(run: Path) -> None:
    """Move what is left, if the program was stopped while it moved a parent's files."""
    for place in _places(run):
        if not (place / "ledger.jsonl").is_file():
            _move(run, place)


def _move(run: Path, place: Path) -> None:
    # Under the lock: a run that goes on in another process is not moved away.
    held = RowsFile.open(run / "ledger.jsonl")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in MOVED:
            if (run / name).exists():
                os.replace(run / name, place / name)
    finally:
        held.close()


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run starts: the plan of its own steps, what it begins with, and whether it goes on.

    `finished` is the ledger of a run that has taken all its steps. `given_up` is the digest of one
    that was stopped before its first step, and that this one takes the place of.
    """

    plan: Plan
    beginning: Beginning
    goes_on: bool = False
    finished: Ledger | None = None
    given_up: str | None = None


def start(
    run: Path | None,
    model: nn.Module,
    plan: Plan,
    *,
    resume: bool,
    fork_of_it: bool,
    fork_step: int | None,
    paid: Sequence[Paid] = (),
) -> Start:
    """Decide from what lies in `run` how a run with this plan starts."""
    if run is None:
        if resume or fork_of_it:
            raise InputError("resume and fork need `out`, the directory of the run to go on with.")
        return Start(plan=plan, beginning=Beginning())
    charged = charged_ledger(run) if resume and not fork_of_it else None
    if charged is not None and charged.is_finished:
        taken = beginning_of(run).before + charged.steps
        if plan.steps <= taken or charged.is_halted:
            _check_paid(run, charged, paid)
            beginning = beginning_of(run)
            own = plan.over(charged.plan.steps) if beginning.before else plan
            return Start(plan=own, beginning=beginning, finished=charged)
        if not (run / NOISE_KEY).is_file() and not charged.fixed_seed:
            raise InputError(
                f"{run} was finalized, so it takes no further step. Train on from its model, "
                f"{run / 'model'}, with another output directory: what was spent is composed."
            )
        fork_of_it = True
    given_up = None
    if fork_of_it:
        _finish_moving(run)
        if _last_moved(run) is not None and charged_ledger(run) is None:
            # A fork that was stopped before its first step.
            given_up = clear_unbegun(run)
        beginning = fork(run, model, step=fork_step)
        own = plan.over(_steps_left(plan, beginning))
        return Start(plan=own, beginning=beginning, given_up=given_up)
    if charged is not None:
        if not charged.steps_begun:
            raise InputError(
                f"{run} is a dry run that was stopped: there is nothing to go on with. Choose "
                "another directory."
            )
        if not charged.fixed_seed:
            # Without it nothing goes on, whatever else has changed.
            stored_secret(run, charged.bound_to.get("noise_key"))
        _check_paid(run, charged, paid)
        beginning = beginning_of(run)
        # The runs before a fork took some of the planned steps.
        own = plan.over(charged.plan.steps) if beginning.before else plan
        return Start(plan=own, beginning=beginning, goes_on=True)
    if resume and _last_moved(run) is not None:
        raise InputError(
            f"{run} holds a fork that was stopped before its first step: say {FORK} to begin it "
            "again."
        )
    given_up = clear_unbegun(run) if resume else None
    return Start(plan=plan, beginning=Beginning(), given_up=given_up)


def _check_paid(run: Path, charged: Ledger, paid: Sequence[Paid]) -> None:
    """Refuse other paid looks at the data than those that the run was begun with."""
    if [item.to_json() for item in paid] != [item.to_json() for item in charged.paid]:
        raise InputError(
            f"{run} was begun with other paid looks at the data: a run goes on only as it began. "
            f"Put that back, or say {FORK}."
        )


def _steps_left(plan: Plan, beginning: Beginning) -> int:
    """How many of the planned steps a fork takes: those that its parents did not."""
    left = plan.steps - beginning.before
    if left < 1:
        raise InputError(
            f"the checkpoint has {beginning.before:,} steps and {plan.steps:,} are planned: there "
            "is none left to take. Plan more steps, or fork an earlier checkpoint."
        )
    return left
