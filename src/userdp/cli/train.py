"""`userdp train`: a private run from a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from userdp.cli import common
from userdp.cli.ranked import by_first, leave
from userdp.config.file import Config, load_config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.files.interrupts import InterruptedRunError
from userdp.history import read_history
from userdp.plan import Plan
from userdp.planner.filter_noise import whether_it_pays
from userdp.ranks_launched import is_restarted, launched_rank
from userdp.runs.files import Overlap, overlap, shared_users
from userdp.runs.validation_curve import Point, released_curve
from userdp.units import SamplingUnit

# Declared numbers are rounded, and some users may have left; beyond this factor it is a mistake.
LARGEST_ROUNDING = 2
OTHER_USERS = "Name a store of other users as [data] evaluation, or leave that setting out."


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    out: Annotated[Path, typer.Option(help="Directory of the run to write.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out where it was stopped.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork",
            help="Begin a new run with the last checkpoint in --out, under what has changed. What "
            "was charged there is composed with it.",
        ),
    ] = False,
    from_step: Annotated[
        int | None, typer.Option(help="With --fork: begin with the checkpoint after these steps.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Instead of \\[training] steps. With --resume, a finished run goes on to so many."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Charge every step and train nothing.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Train a model with user-level privacy and leave it with its ledger and statement."""
    if from_step is not None and not fork:
        raise InputError("--from-step says where a fork begins: say --fork, or leave it out.")
    if dry_run and (resume or fork):
        raise InputError("--dry-run begins a run of its own: leave out --resume and --fork.")
    # A launcher that restarts its processes starts them with the same command.
    if resume and not fork:
        _say_if_new(out)
    resume = resume or (is_restarted() and not fork and not dry_run)
    ready = by_first(lambda: _ready(config, out, steps, resume=resume, fork=fork))
    settings = _configured(config, steps)
    follows = launched_rank() > 0

    common.quiet_transformers()
    from userdp.training import from_config as training_from_config

    with _saying_how_to_go_on():
        run = training_from_config.train_from_config(
            config,
            settings,
            ready.plan,
            out,
            resume=resume,
            fork=fork,
            fork_step=from_step,
            dry_run=dry_run,
        )
    leave()
    if follows:
        return
    held_out, unchecked = ready.held_out(settings), ready.unchecked
    points = {point.step: point for point in run.validation}
    before, after = points.get(0), points.get(run.ledger.steps)
    is_released = after is not None and after in released_curve(out)
    if held_out is not None and not dry_run:
        # Check again with the finished run's own lists, which name every run behind the model.
        shared = shared_users(out, held_out)
        common.refuse_overlap(shared, held_out, way_out=OTHER_USERS)
        unchecked = shared is None
    statement = run.statement
    common.emit(
        json,
        {
            **common.promised(statement),
            "steps": run.before + statement.steps,
            "dry_run": dry_run,
            "new_steps": statement.steps,
            "earlier": list(statement.earlier),
            "overlap_checked": None if held_out is None else not unchecked,
            "loss_before": None if before is None else before.loss,
            "loss": None if after is None else after.loss,
            "loss_may_be_released": is_released if after is not None else None,
            "run": str(out),
        },
        f"{statement}\n{_in_all(run.before, statement.steps)}"
        f"{_held_out_line(before, after, is_released)}run: {out}",
    )


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What is known before torch is loaded: all checks of the configuration are passed."""

    plan: Plan
    unchecked: bool

    def held_out(self, settings: Config) -> UserStore | None:
        """The store of other users to measure on."""
        place = settings.data.evaluation
        return None if place is None else UserStore.open(place)


def _say_if_new(out: Path) -> None:
    """Say that --resume finds nothing to go on with, so that a mistyped directory is noticed.

    That is no error: the command of a job that is restarted is the same each time, and a run may be
    killed before it has a directory.
    """
    is_there = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if not is_there and not launched_rank():
        common.say(f"note: there is no run in {out}: --resume begins a new one, at a charge")


def _configured(config: Path, steps: int | None) -> Config:
    settings = load_config(config)
    if steps is None:
        return settings
    common.check_steps(steps)
    changed = settings.training.model_copy(update={"steps": steps})
    return settings.model_copy(update={"training": changed})


def _ready(config: Path, out: Path, steps: int | None, *, resume: bool, fork: bool) -> _Ready:
    """Check everything that can be checked at once; several ranks do so on the first."""
    settings = _configured(config, steps)
    plan = _going_on(out, steps) if resume and not fork else None
    store = _store_of(settings)
    if store is not None:
        _check_owners(settings, store)
    plan = plan or settings.plan()
    paid = settings.load_paid()
    earlier = settings.load_earlier()
    plan.check_paid(paid, earlier=earlier)
    if earlier:
        counted = (
            "other_people declares that nobody here was in them, and the largest epsilon is stated"
            if settings.privacy.other_people
            else "their cost is composed with this one's"
        )
        common.say(
            f"note: the model carries {sum(item.steps for item in earlier):,} steps of "
            f"{len(earlier)} earlier runs; {counted}"
        )
    for caution in plan.cautions():
        common.say(f"caution: {caution}")
    advice = whether_it_pays(plan)
    if advice:
        common.say(f"note: {advice}")
    far = "" if store is None else _far_from_the_declared(store, plan)
    if far:
        common.say(f"note: {far}")

    # Import torch only now, so that a wrong configuration is refused at once.
    common.quiet_transformers()
    from torch.cuda import is_available as has_cuda

    from userdp.optimizers.by_name import check_options
    from userdp.tasks import labels_left_out
    from userdp.training.configured import configured_loss
    from userdp.training.from_config import check_out
    from userdp.training.trackers import check_trackers

    check_out(out, goes_on=resume or fork)
    check_options(settings.training)
    check_trackers(settings.training.trackers, out)
    # A loss that cannot be imported is refused now, before the model is read.
    own_loss = configured_loss(settings)
    if store is not None and own_loss is None:
        left_out = labels_left_out(settings.data.task, store.text_kind)
        if left_out:
            common.say(f"note: {left_out}")
    unchecked = _check_held_out(settings)
    if settings.training.on_cuda and settings.training.path == "fast" and has_cuda():
        common.say("the first steps compile the model for its batches: a minute or two")
    return _Ready(plan=plan, unchecked=unchecked)


def _far_from_the_declared(store: UserStore, plan: Plan) -> str:
    """What to say where the store's users are many more or fewer than declared; else empty.

    The count is private. It is told to whoever holds the store, and stands in no file of the run.
    """
    share = store.num_users / plan.num_users
    if 1 / LARGEST_ROUNDING <= share <= LARGEST_ROUNDING:
        return ""
    return (
        f"num_users = {plan.num_users:,} is declared, and the store has {store.num_users:,} users "
        f"(private: do not publish this count). So steps are about {share:.2g} times as large as "
        "planned, while noise and divisor are as planned. If that is not meant, declare a round "
        "public number nearer to it."
    )


def _store_of(settings: Config) -> UserStore | None:
    """The store; None for a wrong one, which is refused where it is read."""
    try:
        return UserStore.open(settings.data.store)
    except InputError:
        return None


def _check_owners(settings: Config, store: UserStore) -> None:
    """Refuse records of several owners without a selection, before their numbers are asked for."""
    if settings.data.selection is None and settings.privacy.unit is SamplingUnit.RECORD:
        store.sole_owners()


def _check_held_out(settings: Config) -> bool:
    """Refuse people to measure on who are trained on. True if that cannot be known."""
    from userdp.data.tokens import tokenise_by_record
    from userdp.training.configured import configured_task, load_configured_tokenizer

    if settings.data.evaluation is None:
        return False
    held_out = UserStore.open(settings.data.evaluation)
    store = UserStore.open(settings.data.store)
    shared = store.shares_users_with(held_out)
    common.refuse_overlap(shared, held_out, way_out=OTHER_USERS)
    before = _in_earlier_runs(settings, held_out)
    common.refuse_overlap(before.shared, held_out, way_out=OTHER_USERS)
    unchecked = shared is None or not before.is_known
    if unchecked:
        common.say(f"note: {common.UNCHECKED_OVERLAP}")
    # A store that cannot be evaluated is refused now, not after the last step.
    tokenizer = load_configured_tokenizer(settings)
    tokenise_by_record(
        held_out,
        tokenizer,
        sequence_length=settings.data.sequence_length,
        encoding=configured_task(settings, tokenizer, store).encoding,
    )
    return unchecked


def _in_all(before: int, new: int) -> str:
    if not before:
        return ""
    return f"{before + new:,} steps in all: {before:,} of the run before it, and {new:,} of this\n"


def _held_out_line(before: Point | None, after: Point | None, is_released: bool) -> str:
    if after is None:
        return ""
    began = "" if before is None or before.loss is None else f", {before.loss:.4f} before training"
    kept = "" if is_released else " (not for release: kept in secret/validation.jsonl)"
    return f"{after.in_words}{began}{kept}\n"


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    """End with the code of the signal that stopped the run."""
    try:
        yield
    except InterruptedRunError as stopped:
        if not launched_rank():
            common.say(str(stopped))
        raise typer.Exit(stopped.exit_code) from None


def _going_on(out: Path, steps: int | None) -> Plan | None:
    """The plan of a run that goes on beyond its configuration: longer, or as a fork of another.

    It keeps the noise that it was planned with, and its cost is composed. None for other runs.
    """
    if not (out / "ledger.jsonl").is_file():
        return None
    from userdp.runs.continuing import beginning_of, charged_ledger

    charged = charged_ledger(out)
    if charged is None:
        return None
    before = beginning_of(out).before
    done = before + charged.plan.steps
    if charged.is_finished and (steps is not None or before):
        return charged.plan.over(steps or done)
    return charged.plan.over(done) if before else None


def _in_earlier_runs(settings: Config, held_out: UserStore) -> Overlap:
    """How many of these users were trained on in the runs behind the model."""
    past = read_history(Path(settings.model.path))
    if past is None:
        return Overlap(shared=0, is_known=True)
    return overlap(held_out, {entry["run"]: 1 for entry in past.entries}, past.homes)
