"""A run's directory: made from a configuration, read back by evaluation and report.

    config.toml  ledger.jsonl  statement.json  model/  report.html  MODEL_CARD.md
    secret/    for the owner alone, never to be published

Nothing else leaves a run: no loss on its training users, no norm, no cohort.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.clipping.fast import FastSettings
from userdp.config import Config, load_config
from userdp.data.store import UserStore
from userdp.digests import base_digest, digest_precision
from userdp.errors import InputError, LedgerError
from userdp.ledger import Ledger
from userdp.models.load import Lora, adapter_tensors, load_adapter, load_model, load_tokenizer
from userdp.noise.secret import RunSecret
from userdp.plan import Plan
from userdp.training import OnStep, Run, make_optimizer, train

OTHER_BASE = "the base model that was loaded is not the one the adapter was trained on."


def train_from_config(
    config_path: Path, config: Config, plan: Plan, out: Path, *, on_step: OnStep | None = None
) -> Run:
    """Train as the configuration says and leave the run in `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already holds something: choose another output directory.")
    paid = config.load_paid()
    plan.check_paid(paid)
    store = UserStore.open(config.data.store)
    settings = config.training
    model, tokenizer = load_configured_model(config)
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config_path, out / "config.toml")
    try:
        run = train(
            model,
            tokenizer,
            store,
            plan,
            optimizer=optimizer,
            scheduler=make_schedule(optimizer, settings.schedule, settings.steps),
            sequence_length=config.data.sequence_length,
            selection=config.load_selection(),
            clipping=settings.clipping,
            settings=fast_settings(config),
            microbatch_records=settings.microbatch_records,
            out=out,
            bound_to={"config": hashlib.sha256(config_path.read_bytes()).hexdigest()},
            paid=paid,
            other_people=config.privacy.other_people,
            secret=None
            if settings.fixed_seed is None
            else RunSecret.fixed_for_tests(settings.fixed_seed),
            on_step=on_step,
        )
    except InputError:
        _clear_if_unbegun(out)
        raise
    write_statement(run, out)
    return run


def load_configured_model(config: Config) -> tuple[nn.Module, Any]:
    """The model to train, with its adapters if they are asked for, and its tokenizer."""
    return load_model(
        config.model.path,
        lora=Lora(**config.model.lora.model_dump()) if config.model.lora else None,
        gguf_file=config.model.gguf_file,
        dtype=getattr(torch, config.model.dtype),
        device=config.training.device,
    )


def fast_settings(config: Config) -> FastSettings:
    """How the fast path is to run."""
    settings = config.training
    return FastSettings(
        microbatch_tokens=settings.microbatch_tokens,
        compute_dtype=torch.bfloat16 if settings.autocast_dtype == "bfloat16" else None,
        merge_lora=settings.merge_lora,
        checkpoint_blocks=settings.checkpoint_blocks,
        join_records=settings.join_records,
    )


def _clear_if_unbegun(out: Path) -> None:
    """A run that was refused before its first step has released nothing: leave nothing of it."""
    ledger = out / "ledger.jsonl"
    rows = ledger.read_text().splitlines() if ledger.is_file() else []
    if any(json.loads(row)["kind"] == "step" for row in rows):
        return
    for file in (ledger, out / "config.toml"):
        file.unlink(missing_ok=True)
    shutil.rmtree(out / "secret", ignore_errors=True)
    out.rmdir()


def write_statement(run: Run, out: Path) -> None:
    """Write what may be said about the run's model."""
    (out / "statement.json").write_text(json.dumps(run.statement.to_json(), indent=1) + "\n")


def make_schedule(optimizer: torch.optim.Optimizer, name: str, steps: int) -> Any:
    """A constant rate, or one that stays for half of the run and then falls to zero in a line."""
    if name == "constant":
        return None
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * max(0, steps - step) / steps)
    )


def load_run(run: Path) -> tuple[nn.Module, Any, Config]:
    """The model a run left, its tokenizer, and its configuration."""
    config = load_config(run / "config.toml")
    saved = run / "model"
    if not saved.is_dir():
        raise InputError(f"{run} holds no model: did the run finish?")
    if config.model.lora is None:
        model, tokenizer = load_model(saved)
        return model, tokenizer, config
    base, _ = load_model(config.model.path, gguf_file=config.model.gguf_file)
    return load_adapter(base, saved), load_tokenizer(str(saved)), config


def check_base(run: Path, ledger: Ledger, model: nn.Module, *, unfinished: bool) -> bool | None:
    """Whether the loaded base below the run's adapter is the one that its closing row names.

    Another base is refused, unless `unfinished` runs are read too. None if there is nothing to
    compare: the run left a whole model, or its ledger names no base.
    """
    published = adapter_tensors(run / "model")
    named = (ledger.end or {}).get("digests", {}).get("base_weights")
    if published is None or named is None:
        return None
    precision = digest_precision(str(named))
    is_same = (
        isinstance(getattr(torch, precision, None), torch.dtype)
        and base_digest(model, published, precision=precision) == named
    )
    if not is_same and not unfinished:
        raise LedgerError(
            f"{run}: {OTHER_BASE} Restore that base model, or say --unfinished to measure the "
            "adapter on this one."
        )
    return is_same
