"""What a run is bound to, and whether a start that says "go on" is of the same run.

A run goes on with the noise that it began with. The same noise on other values would show the
difference of the two values. So everything that changes what a run releases must be as it was.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.digests.of_runs import (
    code_version,
    index_digest,
    optimizer_digest,
    parts_version,
    weights_digest,
)
from userdp.errors import FORK, InputError, LedgerError
from userdp.files.durable import OWNER_ONLY_FILE, write_file
from userdp.index import UserIndex
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.runs.checkpoints import Moment, hardware_of
from userdp.runs.files import NOISE_KEY
from userdp.streams import RunSecret

# How many ranks took the last steps.
RANKS = Path("secret", "ranks")

# What a run is bound to, in words.
MEANINGS = {
    # First: where it differs, others may differ because of it.
    "code": "version of this package, torch, transformers or peft",
    "plan": "privacy settings or another number of steps",
    "data": "store or other data in it",
    "selection": "selection of records",
    "select": "choice of each user's rows",
    "sequence_length": "sequence length",
    "tokenizer": "tokenizer",
    "task_code": "code of its task or loss",
    "rows": "reading of the records as tokens (does the chat template use the date?)",
    "model": "model",
    "initial_weights": "set of initial weights",
    "schedule": "learning rate schedule",
    "optimizer": "optimizer or learning rate",
    "public": "set of public records",
    "ema": "average of the weights (ema)",
    "settings": "settings of the step",
    "device": "device",
    "parts": "code of its parts",
    "config": "configuration",
}


# Settings that change nothing that is released.
UNRELEASED = (
    ("training", "checkpoint_every"),
    ("training", "checkpoint_minutes"),
    ("training", "keep_checkpoints"),
    ("training", "evaluate_every"),
    ("training", "trackers"),
    ("data", "evaluation"),
    ("data", "evaluation_private"),
)
SECRET_BYTES = 32
# What changes how a run computes. A finished run computes nothing more, so there it may differ.
COMPUTING = {"code", "parts", "device"}


def digests_of(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, bound_to: Mapping[str, str]
) -> dict[str, str]:
    """Everything that changes what a run releases, by name, each with its digest."""
    others = parts_version(plan.parts)
    return (
        dict(bound_to)
        | ({"parts": others} if others else {})
        | ({"noise": plan.noise.digest} if plan.noise.digest else {})
        | {
            "initial_weights": weights_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "code": code_version(),
        }
    )


def check_same(
    ledger: Ledger, plan: Plan, named: Mapping[str, str], config: Path | None, path: Path
) -> None:
    """Refuse to go on with a run under anything that would change what it releases.

    A finished run computes nothing more. It may be asked for with other code, or elsewhere.
    """
    before = dict(ledger.bound_to)
    written = before.pop("config", None)
    # Only steps that are taken again need the same hardware, and the same numbers of the noise.
    before.pop("hardware", None)
    before.pop("noise", None)
    # Compared where it is read.
    before.pop("noise_key", None)
    named = {name: digest for name, digest in named.items() if name not in ("hardware", "noise")}
    changed = {name for name in before.keys() | named if before.get(name) != named.get(name)}
    if ledger.plan != plan:
        changed.add("plan")
    if is_other_config(written, config, path):
        changed.add("config")
    if ledger.is_finished:
        changed -= COMPUTING
    if changed:
        # The first of these is named: others may follow from it.
        first = min(changed, key=lambda name: (*MEANINGS, name).index(name))
        meaning = MEANINGS.get(first, first)
        if ledger.is_finished:
            raise InputError(
                f"{path} is finished, and it was begun with another {meaning}: nothing was "
                "trained. Put that back, or choose another output directory."
            )
        raise InputError(
            f"{path} was begun with another {meaning}: a run goes on only as it began. Put that "
            f"back, choose another output directory, or say {FORK} to go on from the last "
            "checkpoint at a new charge."
        )


def check_same_config(ledger: Ledger, config: Path | None, path: Path) -> None:
    """Refuse to give a finished run for one of another configuration."""
    if is_other_config(ledger.bound_to.get("config"), config, path):
        raise InputError(
            f"{path} is finished, under another configuration: nothing was trained. Choose another "
            f"output directory, or say {FORK} to train on from its last checkpoint."
        )


def is_other_config(written: str | None, config: Path | None, path: Path) -> bool:
    """Whether `config` differs from the run's configuration, whose digest is `written`."""
    if config is None or written is None:
        return False
    # The run's own copy is compared by what it says: the run's files may lie elsewhere now.
    place = path / "config.toml"
    copy = place.read_bytes() if place.is_file() else b""
    if hashlib.sha256(copy).hexdigest() != written:
        raise LedgerError(f"{place} is not what the ledger names: restore it.")
    return _settings_of(copy) != _settings_of(config.read_bytes())


def _settings_of(config: bytes) -> dict[str, Any]:
    """What a configuration says, without what changes nothing that is released."""
    settings = tomllib.loads(config.decode())
    for section, name in UNRELEASED:
        settings.get(section, {}).pop(name, None)
    return settings


def key_name(secret: RunSecret) -> str:
    """A public name of a secret of 256 bits, which nobody can guess from it."""
    return hashlib.sha256(b"userdp noise key\n" + secret.key).hexdigest()


def stored_secret(path: Path, name: str | None) -> RunSecret:
    """The secret that the run in `path` began with, which the ledger calls `name`."""
    place = path / NOISE_KEY
    try:
        key = bytes.fromhex(place.read_text(encoding="ascii"))
    except (OSError, ValueError):
        key = b""
    if len(key) != SECRET_BYTES:
        raise LedgerError(
            f"{place} is not there or damaged: the run was finalized, or its secret is lost. It "
            f"cannot go on. If it has a checkpoint left, {FORK} goes on from that at a new charge."
        )
    found = RunSecret(key=key, fixed_seed=False)
    if name is not None and key_name(found) != name:
        raise LedgerError(
            f"{place} is not the key that the run began with: steps that are taken again would "
            f"have other noise. Restore it, or say {FORK} to go on at a new charge."
        )
    return found


def check_hardware(ledger: Ledger, moment: Moment | None, device: torch.device) -> None:
    """Refuse to repeat steps where they would be rounded, or their noise drawn, in another way."""
    repeated = ledger.steps - (0 if moment is None else moment.step)
    before, now = ledger.bound_to.get("hardware", ""), hardware_of(device)
    if repeated and before and before != now:
        raise InputError(
            f"{repeated:,} steps since the last checkpoint must be taken again exactly as they "
            f"were, and this is other hardware: {now} instead of {before}. Go back to that, or say "
            f"{FORK} to take them with new noise at a new charge."
        )


def check_ranks(
    ledger: Ledger, moment: Moment | None, path: Path, num_ranks: int, *, sharded: bool = False
) -> None:
    """Refuse to repeat steps on another number of ranks: sums would be rounded in another way."""
    repeated = ledger.steps - (0 if moment is None else moment.step)
    place = path / RANKS
    before = place.read_text(encoding="ascii").strip() if place.is_file() else "1"
    now = _ranks_in_words(num_ranks, sharded)
    is_other_way = before != now
    if repeated and is_other_way:
        raise InputError(
            f"{repeated:,} steps since the last checkpoint must be taken again exactly as they "
            f"were, by {before} ranks, and here are {now}. Start {before} ranks until the "
            f"next checkpoint, or say {FORK} to take them with new noise at a new charge."
        )


def _ranks_in_words(num_ranks: int, sharded: bool) -> str:
    return f"{num_ranks} sharded" if sharded and num_ranks > 1 else str(num_ranks)


def write_ranks(path: Path, num_ranks: int, *, sharded: bool = False) -> None:
    """Note how many ranks take the next steps. One process leaves no note unless there is one.

    The ledger does not name it: neither the cohorts nor the noise depend on it.
    """
    if num_ranks > 1 or (path / RANKS).is_file():
        words = _ranks_in_words(num_ranks, sharded)
        write_file(path / RANKS, f"{words}\n".encode(), mode=OWNER_ONLY_FILE)


def check_noise(ledger: Ledger, moment: Moment | None, plan: Plan) -> None:
    """Refuse to repeat steps with noise that is computed otherwise than the checkpoint says."""
    if moment is None and ledger.steps and ledger.bound_to.get("noise", "") != plan.noise.digest:
        raise InputError(
            f"{ledger.steps:,} steps must be taken again with the same noise, and here the "
            f"strategy of the {plan.noise.name} noise comes out otherwise: this is another machine "
            f"or another version of scipy. Go back to that, or say {FORK} to take them with new "
            "noise at a new charge."
        )


def unnamed_digests(
    ledger: Ledger, model: nn.Module, optimizer: torch.optim.Optimizer, index: UserIndex
) -> list[str]:
    """Digests of what the noise also depends on but the ledger does not name. Secret."""
    named = ledger.bound_to
    found: list[str] = []
    if "initial_weights" not in named:
        found += [weights_digest(model), optimizer_digest(optimizer)]
    # With a fixed seed there is nothing to protect, and tests compare neighbours under equal noise.
    if "data" not in named and not ledger.fixed_seed:
        found.append(index_digest(index))
    return found
