"""The private loop over a store; reads like the box of Charles et al. 2024, Alg. 1 and 2."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.clipping.fast import FastSettings
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise, tokenise_selected, tokenizer_digest
from userdp.digests import (
    base_digest,
    code_version,
    model_digest,
    optimizer_digest,
    scheduler_digest,
    trained_digest,
    weights_digest,
)
from userdp.earlier import Earlier
from userdp.errors import InputError
from userdp.history import ATTRIBUTE, carry, history_of, write_history
from userdp.ledger import Ledger
from userdp.lineage import earlier_runs
from userdp.models.checks import trainable_parameters
from userdp.models.load import adapter_tensors, save_model
from userdp.models.proven import model_check
from userdp.noise.secret import RunSecret
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.probe import check_positions
from userdp.run_files import model_files, overlap, write_training_users
from userdp.sampling import Cohort
from userdp.statement import Statement
from userdp.step import PrivateStep
from userdp.updates import Batch

OnStep = Callable[[int], None]


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
    selection: Selection | None = None,
    clipping: Literal["fast", "plain"] = "fast",
    settings: FastSettings | None = None,
    microbatch_records: int | None = None,
    out: str | Path | None = None,
    bound_to: dict[str, str] | None = None,
    paid: Sequence[Paid] = (),
    other_people: bool = False,
    secret: RunSecret | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train `model` on the store's users as `plan` says; the model is changed in place.

    Records of several owners need a `selection` that bounds what each of them contributes; a long
    record is then cut to one row, so that the bound on records is one on rows.

    `clipping` is "fast" (many users in one backward pass, with `settings`) or "plain" (one user at
    a time, `microbatch_records` rows of it); both give the same sums.

    With `out`, the run's directory gets the ledger (row by row, before each step's weights exist)
    and at the end the model. Looks at the data that were `paid` for are charged before the first
    step. `on_step` is told how many steps are done, and nothing else: losses,
    norms and cohorts are secret.

    A model that was trained privately before carries what was spent on it, and that is composed
    with this run. `other_people` declares that nobody in this store was in those runs: then each
    person is in one of them, and the statement gives the largest epsilon. The users of the runs are
    compared where their lists are there; where not, the statement says so.
    """
    # The ledger will name this data: make sure that it still is this data.
    store.verify()
    before = earlier_runs(model, other_people=other_people, data=store.fingerprint)
    plan.check_paid(paid, earlier=before)
    cautions = (*store.cautions, *_check_declared(model, store, before))
    check_positions(model, sequence_length)
    rows = _rows(store, tokenizer, plan, selection, sequence_length)
    secret = secret or RunSecret.from_system()
    settings = settings or FastSettings()
    if optimizer is None:
        optimizer = make_optimizer(model, "adamw", learning_rate)
    path = Path(out) if out is not None else None
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    homes = history_of(model).homes
    ledger = Ledger.create(
        plan,
        path=path / "ledger.jsonl" if path is not None else None,
        bound_to={
            "data": store.fingerprint,
            "selection": _selection_name(store, selection),
            "sequence_length": str(sequence_length),
            "tokenizer": tokenizer_digest(tokenizer),
            "model": model_digest(model),
            "initial_weights": weights_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "schedule": scheduler_digest(scheduler),
            "clipping": f"{clipping}, {settings}, microbatch_records={microbatch_records}",
            "device": next(model.parameters()).device.type,
            "code": code_version(),
        }
        | (bound_to or {}),
        fixed_seed=secret.fixed_seed,
        data_cautions=cautions,
        # Under a fixed seed the whole record repeats; otherwise no two runs share a key.
        key=secret.ledger_key() if secret.fixed_seed else None,
        model_check=model_check(model, checked=clipping == "plain" or settings.check),
    )
    with contextlib.closing(ledger):
        ledger.inherit(before)
        for item in paid:
            ledger.charge(item.event, what=item.what)
        if path is not None:
            write_training_users(path, ledger.run_digest, store, homes)
        # Dropout off: the noise regularises enough, and a group's update is then a function of its
        # rows.
        model.eval()
        step = PrivateStep(
            model,
            optimizer,
            plan,
            rows.index(),
            clipping=clipping,
            settings=settings,
            microbatch_records=microbatch_records,
            sequence_length=sequence_length,
            ledger=ledger,
            secret=secret,
        )
        # A model that does not tell its vocabulary reads the tokenizer's.
        tokens = torch.arange(len(tokenizer))[None]
        step.check_model({"input_ids": tokens, "labels": tokens})
        for cohort in step.cohorts():
            step.apply(cohort_batches(rows, cohort, pad_token=tokenizer.pad_token_id))
            if scheduler is not None:
                scheduler.step()
            if on_step is not None:
                on_step(ledger.steps)
        files: dict[str, str] = {}
        digests = {"final_weights": trained_digest(model)}
        if path is not None:
            save_model(model, tokenizer, path / "model")
            history = vars(model)[ATTRIBUTE]
            carry(model, dataclasses.replace(history, homes=(*homes, path.resolve())))
            write_history(path / "model", history)
            files = model_files(path / "model")
            published = adapter_tensors(path / "model")
            if published is not None:
                # The adapter's files do not hold the base, and are nothing without it.
                digests["base_weights"] = base_digest(model, published)
        ledger.finish(digests, model_files=files)
    return Run(model=model, ledger=ledger, path=path)


UNCHECKED_PEOPLE = (
    "that the people of the earlier runs are others was declared and could not be checked: a list "
    "of their users is not there, or hides ids under another key; whoever is in several runs has "
    "spent more than is stated"
)


def _check_declared(model: nn.Module, store: UserStore, before: Sequence[Earlier]) -> list[str]:
    """Refuse a declaration of other people that is wrong; what to say where that is not known."""
    people = {item.run: item.people for item in before}
    if not any(people.values()):
        return []
    found = overlap(store, people, history_of(model).homes)
    if found.shared:
        raise InputError(
            f"other_people is declared, and {found.shared:,} users are in several of the runs, by "
            "the runs' own lists: what they have spent adds up. Leave the declaration out, and the "
            "runs are composed; or train on a store without these users."
        )
    return [] if found.is_known else [UNCHECKED_PEOPLE]


def _selection_name(store: UserStore, selection: Selection | None) -> str:
    """A keyed name: who owns how much of what is private."""
    if selection is None:
        return ""
    return store.keyed_digest(f"selection {selection.sha256()}".encode())


def make_optimizer(model: nn.Module, name: str, learning_rate: float) -> torch.optim.Optimizer:
    """The named torch optimizer over the trainable parameters, in one kernel on CUDA."""
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    parameters = list(trainable_parameters(model).values())
    fused = all(parameter.is_cuda for parameter in parameters)
    return kinds[name](parameters, lr=learning_rate, fused=fused)


def _rows(
    store: UserStore,
    tokenizer: Any,
    plan: Plan,
    selection: Selection | None,
    sequence_length: int,
) -> TokenRows:
    if selection is None:
        if plan.adjacency.fixed_graph:
            raise InputError(
                f"adjacency {plan.adjacency.value!r} needs a selection: bound contributions first."
            )
        return tokenise(store, tokenizer, sequence_length=sequence_length, verify=True)
    edges = Edges.load(store.path)
    selection.check(edges)
    if not plan.adjacency.fixed_graph:
        # Rows keep their owners: the sampler limits what each contributes, as without a selection.
        selection.check_user_by_user(edges)
        return tokenise_selected(
            store,
            tokenizer,
            selection.records(),
            sequence_length=sequence_length,
            owners=store.sole_owners(),
            verify=True,
        )
    if plan.sampler.group_size < selection.realised_bound:
        raise InputError(
            f"the selection gives users up to {selection.realised_bound} records; the plan covers "
            f"{plan.sampler.group_size} under {plan.adjacency.value}. Plan for the selection, "
            "under fixed-graph adjacency."
        )
    return tokenise_selected(
        store, tokenizer, selection.records(), sequence_length=sequence_length, verify=True
    )


def cohort_batches(rows: TokenRows, cohort: Cohort, *, pad_token: int) -> Iterator[Batch]:
    """One batch per group: the group's records, padded on the right."""
    for group in cohort:
        input_ids, labels = rows.padded(group, pad_token=pad_token)
        yield {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
