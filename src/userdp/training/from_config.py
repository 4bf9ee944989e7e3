"""A training run as a configuration describes it. This is what `userdp train` calls."""

from __future__ import annotations

from pathlib import Path

import torch

from userdp.clipping.settings import StepSettings
from userdp.config.file import Config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.optimizers.by_name import optimizer_of, schedule_of
from userdp.optimizers.public_gradient import public_of
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.runs.checkpoints import Saving
from userdp.runs.files import NOISE_KEY
from userdp.runs.record import OnStep
from userdp.streams import RunSecret
from userdp.training.configured import configured_loss, load_configured_model
from userdp.training.loop import Run, train
from userdp.training.validation import Validation


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
    ranks = Ranks.found()
    ranks.on_first(lambda: check_out(out, goes_on=resume or fork))
    settings = config.training
    # Either every rank has its model and its data, or none of them begins.
    with ranks.together():
        paid = config.load_paid()
        plan.check_paid(paid)
        store = UserStore.open(config.data.store)
        own_loss = configured_loss(config)
        model, tokenizer = load_configured_model(config)
        optimizer = optimizer_of(model, settings)
    seed = settings.fixed_seed
    return train(
        model,
        tokenizer,
        store,
        plan,
        optimizer=optimizer,
        scheduler=schedule_of(optimizer, settings),
        ema=settings.ema,
        public=public_of(config.data),
        sequence_length=config.data.sequence_length,
        task=config.data.task,
        record_loss=own_loss,
        selection=config.load_selection(),
        select=config.data.select,
        resample=config.data.resample,
        tokens_per_user=config.data.tokens_per_user,
        settings=step_settings(config),
        out=out,
        config=config_path,
        paid=paid,
        validation=Validation.configured(config),
        trackers=settings.trackers,
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


def check_out(out: Path, *, goes_on: bool) -> None:
    """Refuse a directory that holds something else than a run to go on with."""
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    holds_something = bool(names) or (out.exists() and not out.is_dir())
    # A run that was stopped at once has a secret alone.
    is_run = names == ["secret"] or bool({"ledger.jsonl", "earlier"} & set(names))
    if holds_something and not (goes_on and is_run):
        way_out = " Say --resume to go on with the run in it." if (out / NOISE_KEY).exists() else ""
        raise InputError(
            f"{out} already holds something: choose another output directory.{way_out}"
        )


def step_settings(config: Config) -> StepSettings:
    """The configuration's choices of how to compute sums."""
    given = config.training
    shared = StepSettings.__dataclass_fields__.keys() & type(given).model_fields.keys()
    return StepSettings(
        **{name: getattr(given, name) for name in shared - {"compute_dtype"}},
        compute_dtype=torch.bfloat16 if given.autocast_dtype == "bfloat16" else None,
    )
