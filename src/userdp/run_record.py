"""The only place where a run has side effects: ledger rows, files, progress and the secret.

The step and the loop only compute. Whatever leaves them goes through here. A step's row is on disk
before anyone can see a weight of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from userdp.clipping.settings import StepSettings
from userdp.digests import (
    base_digest,
    code_version,
    frozen_digests,
    index_digest,
    optimizer_digest,
    parts_version,
    trained_digest,
    weights_digest,
)
from userdp.errors import InputError, MixedExamplesError
from userdp.history import ATTRIBUTE, carry, history_of, write_history
from userdp.index import UserIndex
from userdp.ledger import Ledger
from userdp.lineage import begin_run, check_current, past_cautions
from userdp.models.load import adapter_tensors, save_model
from userdp.models.proven import model_check
from userdp.plan import Plan
from userdp.run_files import model_files
from userdp.statement import Statement
from userdp.streams import RunSecret, Streams

OnStep = Callable[[int], None]


class RunRecord:
    """The record of one run while it runs.

    `on_step` is told how many steps are done, and nothing else: losses, norms and cohorts are
    secret.
    """

    def __init__(
        self,
        ledger: Ledger,
        secret: RunSecret | None = None,
        *,
        path: Path | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.ledger = ledger
        self.path = path
        self._process = os.getpid()
        # The model that a new record was made for; None for a ledger that was opened again.
        self._model: nn.Module | None = None
        self._secret = secret or RunSecret.from_system()
        self._on_step = on_step
        # The digests of what must not change, by name; None before the run begins.
        self._frozen: dict[str, str] | None = None

    @staticmethod
    def create(
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        settings: StepSettings,
        secret: RunSecret | None = None,
        path: Path | None = None,
        bound_to: Mapping[str, str] | None = None,
        config: Path | None = None,
        cautions: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> RunRecord:
        """A new record. It is on disk if `path`, the run's directory, is given.

        `bound_to` names what the run depends on beside the weights, the optimizer and the code. The
        ledger names the file `config`, too, and the file is copied into the run. `cautions` are
        those of the data.
        """
        secret = secret or RunSecret.from_system()
        named = dict(bound_to or {})
        if others := parts_version(plan.parts):
            named["parts"] = others
        if config is not None:
            named["config"] = hashlib.sha256(config.read_bytes()).hexdigest()
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        ledger = Ledger.create(
            plan,
            path=path / "ledger.jsonl" if path is not None else None,
            bound_to=named
            | {
                "initial_weights": weights_digest(model),
                "optimizer": optimizer_digest(optimizer),
                "code": code_version(),
            },
            fixed_seed=secret.fixed_seed,
            data_cautions=(*cautions, *past_cautions(model)),
            # Under a fixed seed the whole record repeats; otherwise no two runs share a key.
            key=secret.ledger_key() if secret.fixed_seed else None,
            model_check=model_check(model, checked=settings.checks_model),
        )
        if path is not None and config is not None:
            shutil.copyfile(config, path / "config.toml")
        record = RunRecord(ledger, secret, path=path, on_step=on_step)
        record._model = model
        return record

    def begin(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, index: UserIndex
    ) -> None:
        """Compose what was spent on these weights before, and bind the noise to this very run."""
        if self.ledger.plan != plan or self.ledger.fixed_seed != self._secret.fixed_seed:
            raise InputError("the ledger was opened for another plan or another kind of seed.")
        if self._model not in (None, model):
            raise InputError("the record was made for another model: make one for each run.")
        begin_run(model, self.ledger)
        secret = self._secret.bound_to(self.ledger.run_digest)
        if not secret.fixed_seed:
            # Somebody may copy a ledger and continue both copies with one secret. If the noise
            # depended only on the run's name, both would get the same noise, and the difference of
            # the two models would have none.
            secret = secret.bound_to(secrets.token_hex(32))
        for unnamed in _unnamed(self.ledger, model, optimizer, index):
            secret = secret.bound_to(unnamed)
        self._secret = secret
        self._frozen = frozen_digests(model)

    def streams(self, purpose: str) -> Streams:
        """The run's randomness for one purpose."""
        return self._secret.streams(purpose)

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return self.ledger.steps

    def check_current(self, model: nn.Module) -> None:
        """Refuse a step if another run has begun on the same model since."""
        check_current(model, self.ledger)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number` is taken inside, by nobody else and once.

        Two steps of one number would share their cohort and their noise.
        """
        if os.getpid() != self._process:
            raise InputError(
                "this process was forked from the one that began the run, and would draw the same "
                "noise as that one. Begin a run of its own in each process."
            )
        if not self.ledger.turn.acquire(blocking=False):
            raise InputError("another step of this run is being taken: take one after the other.")
        try:
            if number != self.ledger.steps:
                raise InputError(
                    f"the cohort was drawn for step {number}, and {self.ledger.steps} steps are "
                    "charged by now: another step of this run was taken in between. Draw and apply "
                    "one cohort after the other, and use one record for one model."
                )
            yield
        finally:
            self.ledger.turn.release()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("the record of a run cannot be copied: both would draw the same noise.")

    def charge_step(self) -> None:
        """Record the next step; returns once it is on disk."""
        self.ledger.charge_step()

    def doubt(self, reason: str) -> None:
        """Record why nothing is promised from here on; returns once it is on disk."""
        self.ledger.doubt(reason)

    def step_done(self) -> None:
        """Tell `on_step` how many steps are done."""
        if self._on_step is not None:
            self._on_step(self.ledger.steps)

    def finish(self, model: nn.Module, tokenizer: Any = None) -> None:
        """Write the closing row. A run with a directory also writes the model and the statement.

        Refused if anything but the trained weights has changed since the beginning, because that
        part has no noise. The ledger then stays open, and nothing is promised from it.
        """
        self._check_frozen(model)
        files: dict[str, str] = {}
        digests = {"final_weights": trained_digest(model)}
        if self.path is not None:
            saved = self.path / "model"
            save_model(model, tokenizer, saved)
            history = vars(model)[ATTRIBUTE]
            homes = (*history_of(model).homes, self.path.resolve())
            carry(model, dataclasses.replace(history, homes=homes))
            write_history(saved, history)
            files = model_files(saved)
            published = adapter_tensors(saved)
            if published is not None:
                # The adapter's files do not contain the base model, and they are useless without
                # it.
                digests["base_weights"] = base_digest(model, published)
        self.ledger.finish(digests, model_files=files)
        if self.path is not None:
            told = json.dumps(self.statement().to_json(), indent=1)
            (self.path / "statement.json").write_text(told + "\n")

    def _check_frozen(self, model: nn.Module) -> None:
        if self._frozen is None:
            return
        now = frozen_digests(model)
        changed = sorted(n for n in now.keys() | self._frozen if now.get(n) != self._frozen.get(n))
        if changed:
            self.doubt(f"{changed[0]!r} is saved with the model and was written without noise")
            raise MixedExamplesError(
                f"{changed[0]!r} is saved with the model, is not trained, and changed during the "
                "run: it may hold records without noise, so the run is not closed. Put it back as "
                "it was, keep it outside the model, or register its buffer with persistent=False."
            )

    def statement(self) -> Statement:
        """What may be said about the model after what is recorded so far."""
        return self.ledger.statement()

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close the ledger at the end, whatever happens.

        A run that is refused before its first step has released nothing. Its files are deleted.
        """
        try:
            with contextlib.closing(self.ledger):
                yield
        except InputError:
            if not self.ledger.steps:
                self._discard()
            raise

    def _discard(self) -> None:
        if self.path is None:
            return
        for name in ("ledger.jsonl", "config.toml"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "secret", ignore_errors=True)
        with contextlib.suppress(OSError):
            # If the directory is not empty, it stays: the other files in it are not the run's.
            self.path.rmdir()


def _unnamed(
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
