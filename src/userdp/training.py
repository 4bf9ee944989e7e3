"""The private training loop over a store; it reads like Charles et al. 2024, Alg. 1 and 2.

`train` is the loop. `train_from_config` is what the command calls. It makes everything that the
configuration names, runs the loop, and leaves the run in a directory:

    config.toml  ledger.jsonl  statement.json  model/  report.html  MODEL_CARD.md
    secret/    for the owner alone, never to be published

Nothing else leaves a run: no loss on its training users, no norm, no cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.clipping.settings import StepSettings
from userdp.config import Config, load_config
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows, tokenise, tokenise_selected, tokenizer_digest
from userdp.digests import base_digest, digest_precision, model_digest, scheduler_digest
from userdp.earlier import Earlier
from userdp.errors import InputError, LedgerError
from userdp.history import history_of
from userdp.ledger import Ledger
from userdp.lineage import earlier_runs
from userdp.losses import Batch
from userdp.models.checks import trainable_parameters
from userdp.models.load import Lora, adapter_tensors, load_adapter, load_model, load_tokenizer
from userdp.paid import Paid
from userdp.plan import Plan
from userdp.probe import check_positions
from userdp.run_files import overlap, write_training_users
from userdp.run_record import OnStep, RunRecord
from userdp.sampling import Cohort
from userdp.statement import Statement
from userdp.step import PrivateStep
from userdp.streams import RunSecret


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
    settings: StepSettings | None = None,
    out: str | Path | None = None,
    config: Path | None = None,
    paid: Sequence[Paid] = (),
    other_people: bool = False,
    secret: RunSecret | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train `model` on the store's users as `plan` says. The model is changed in place.

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
    """
    # The ledger will name this data, so make sure that the data has not changed.
    store.verify()
    before = earlier_runs(model, other_people=other_people, data=store.fingerprint)
    plan.check_paid(paid, earlier=before)
    cautions = (*store.cautions, *_check_declared(model, store, before))
    check_positions(model, sequence_length)
    rows = _rows(store, tokenizer, plan, selection, sequence_length)
    settings = settings or StepSettings()
    if optimizer is None:
        optimizer = make_optimizer(model, "adamw", learning_rate)
    homes = history_of(model).homes
    record = RunRecord.create(
        plan,
        model,
        optimizer,
        settings=settings,
        secret=secret,
        path=Path(out) if out is not None else None,
        bound_to={
            "data": store.fingerprint,
            "selection": _selection_name(store, selection),
            "sequence_length": str(sequence_length),
            "tokenizer": tokenizer_digest(tokenizer),
            "model": model_digest(model),
            "schedule": scheduler_digest(scheduler),
            "settings": str(settings),
            "device": next(model.parameters()).device.type,
        },
        config=config,
        cautions=cautions,
        on_step=on_step,
    )
    with record.closing():
        record.ledger.inherit(before)
        for item in paid:
            record.ledger.charge(item.event, what=item.what)
        if record.path is not None:
            write_training_users(record.path, record.ledger.run_digest, store, homes)
        # Dropout is off: the noise regularises enough, and a group's update then depends only on
        # its rows.
        model.eval()
        step = PrivateStep(
            model,
            optimizer,
            plan,
            rows.index(),
            settings=settings,
            sequence_length=sequence_length,
            record=record,
        )
        # If the model does not tell its vocabulary, the rows are made up from the tokenizer's.
        tokens = torch.arange(len(tokenizer))[None]
        step.check_model({"input_ids": tokens, "labels": tokens})
        for cohort in step.cohorts():
            step.apply(cohort_batches(rows, cohort, pad_token=tokenizer.pad_token_id))
            if scheduler is not None:
                scheduler.step()
            record.step_done()
        record.finish(model, tokenizer)
    return Run(model=model, ledger=record.ledger, path=record.path)


OTHER_BASE = "the base model that was loaded is not the one the adapter was trained on."
UNCHECKED_PEOPLE = (
    "that the people of the earlier runs are others was declared and could not be checked: a list "
    "of their users is not there, or hides ids under another key, or compares ids by another rule; "
    "whoever is in several runs has spent more than is stated"
)


def _check_declared(model: nn.Module, store: UserStore, before: Sequence[Earlier]) -> list[str]:
    """Refuse a wrong declaration of other people. Gives a caution if it cannot be checked."""
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
    """A keyed name, because it is private who owns how much."""
    if selection is None:
        return ""
    return store.keyed_digest(f"selection {selection.sha256()}".encode())


def make_optimizer(model: nn.Module, name: str, learning_rate: float) -> torch.optim.Optimizer:
    """The named torch optimizer over the trainable parameters. On CUDA it is fused."""
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
        # Rows keep their owners. The sampler limits what each owner contributes, as without a
        # selection.
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
        on_step=on_step,
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


def make_schedule(optimizer: torch.optim.Optimizer, name: str, steps: int) -> Any:
    """None for a constant rate; else constant for half of the run, then linear to zero."""
    if name == "constant":
        return None
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * max(0, steps - step) / steps)
    )


def load_run(run: Path) -> tuple[nn.Module, Any, Config]:
    """The model that a run left, its tokenizer and its configuration."""
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
    """Whether the base model below the run's adapter is the one that its closing row names.

    Another base is refused, unless `unfinished` runs are accepted. None if there is nothing to
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
