"""`[data] select` and `resample` in whole runs: what is trained on, resumed, and refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models_zoo
import userdp
from task_stores import CHATML, store_of, word_chat_tokenizer
from tiny import make_model, make_store
from userdp import Plan, StepSettings, load_model
from userdp.bounding.bound import bound
from userdp.clipping.plain import PlainClipping
from userdp.config.file import load_config
from userdp.data.choose import Choice, Select, contributions
from userdp.data.store import UserStore
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.evaluation import mean_losses, record_losses
from userdp.losses import causal_lm_loss
from userdp.prices.marks import RecordLevel
from userdp.runs.checkpoints import Saving
from userdp.sampling import PoissonUsers
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, cohort_batches
from userdp.training.from_config import train_from_config

RECORDS_PER_USER = [1, 2, 5, 9]
LENGTH = 4
K = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("choice")
    make_store(path / "store", RECORDS_PER_USER)
    make_model(path / "base")
    return path


def tokens_of(store: UserStore, tokenizer: Any, record: int) -> list[int]:
    return [*tokenizer(store.text(record))["input_ids"], tokenizer.eos_token_id]


def rows_by_hand(store: UserStore, tokenizer: Any, record: int) -> list[list[int]]:
    ids = tokens_of(store, tokenizer, record)
    rows = [ids[begin : begin + LENGTH] for begin in range(0, len(ids), LENGTH)]
    return [row for row in rows if len(row) > 1]


def loss_of(model: Any, row: list[int]) -> torch.Tensor:
    """The mean loss of one row, by the model library's own loss."""
    return model(torch.tensor([row]), labels=torch.tensor([row])).loss


def loss_by_hand(model: Any, rows: list[list[int]]) -> float:
    with torch.no_grad():
        losses = [float(loss_of(model, row)) * (len(row) - 1) for row in rows]
    return sum(losses) / sum(len(row) - 1 for row in rows)


def kept_by_hand(
    store: UserStore, model: Any, tokenizer: Any, select: str
) -> list[list[list[int]]]:
    """Of each user the rows that `select` keeps: one of each record in turn, best record first."""
    kept: list[list[list[int]]] = []
    for user in range(store.num_users):
        rows = {
            int(record): rows_by_hand(store, tokenizer, int(record))
            for record in store.records_of(user)
        }
        if "perplexity" in select:
            worth = {record: loss_by_hand(model, found) for record, found in rows.items()}
        else:
            worth = {record: sum(map(len, found)) for record, found in rows.items()}
        sign = -1 if select in ("longest", "highest-perplexity") else 1
        best = sorted(rows, key=lambda record: (sign * worth[record], record))
        turns = max(map(len, rows.values()))
        order = [
            rows[record][turn]
            for turn in range(turns)
            for record in best
            if len(rows[record]) > turn
        ]
        kept.append(order[:K])
    return kept


def plan(unit: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 4,
        "group_size": K,
        "steps": 1,
        "clip_norm": math.inf,
        "noise_multiplier": 0.0,
        "delta": 1e-2,
        "non_private": True,
    }
    # Everybody takes part.
    if unit == "user":
        return Plan.sample_users(expected_cohort_size=4, **(settings | changes))
    return Plan.sample_records(expected_batch_size=4 * K, **(settings | changes))


def gradient(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """The gradient of the mean loss of these rows."""
    loss = torch.stack([loss_of(model, row) for row in rows]).mean()
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("unit", ["user", "record"])
@pytest.mark.parametrize(
    "select", ["longest", "shortest", "highest-perplexity", "lowest-perplexity"]
)
def test_a_step_is_the_mean_gradient_of_exactly_the_rows_that_the_criterion_keeps(
    select: str, unit: str, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    model, tokenizer = load_model(root / "base")
    before = [p.detach().clone() for p in model.parameters()]
    users = kept_by_hand(store, model, tokenizer, select)
    assert [len(rows) for rows in users] == [min(K, len(rows)) for rows in users]
    groups = users if unit == "user" else [[row] for rows in users for row in rows]
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for rows in groups:
        for total, part in zip(expected, gradient(model, rows), strict=True):
            total += part
    chosen = plan(unit)
    userdp.train(
        model,
        tokenizer,
        store,
        chosen,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        sequence_length=LENGTH,
        settings=StepSettings(path="fast" if unit == "user" else "plain"),
        select=select,
    )
    for start, parameter, total in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            start - parameter.detach(), total / chosen.divisor, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("select", list(Select))
def test_the_update_of_a_sampled_user_is_the_mean_gradient_of_what_that_user_reads(
    select: Select, root: Path
) -> None:
    store = UserStore.open(root / "store")
    model, tokenizer = load_model(root / "base")
    rows = tokenise(store, tokenizer, sequence_length=LENGTH)
    secret = RunSecret.fixed_for_tests(1)
    choice = Choice(select=select, resample=True)
    losses = record_losses(model, tokenizer, store, sequence_length=LENGTH)
    chosen = contributions(
        rows,
        choice,
        unit=plan("user").sampler.unit,
        group_size=K,
        sequence_length=LENGTH,
        streams=secret.streams("choose rows"),
        losses=losses if choice.needs_losses else None,
    )
    sampler = PoissonUsers(user_sampling_prob=1.0, group_size=K)
    cohort = sampler.draw(chosen.index(), 5, secret.streams("cohort"))
    task = CausalTask(pad_token=tokenizer.pad_token_id)
    streams = secret.streams("rows")
    clipping = PlainClipping(model, list(model.parameters()), record_loss=causal_lm_loss)
    batches = list(cohort_batches(chosen, cohort, task, step=5, streams=streams))
    for group, batch in zip(cohort, batches, strict=True):
        table, places = chosen.read(group, streams.rng(5, int(group[0]) + 1))
        read = [table.tokens[table.indptr[i] : table.indptr[i + 1]].tolist() for i in places]
        assert len(read) == K
        update = clipping.update(batch)
        for found, part in zip(update, gradient(model, read), strict=True):
            torch.testing.assert_close(found, part, rtol=1e-4, atol=1e-6)


def train(root: Path, out: Path, *, resume: bool = False, stop: bool = False, **choice: Any) -> Any:
    model, tokenizer = load_model(root / "base")
    store = out.parent / f"{out.name}-store"
    if not store.exists():
        shutil.copytree(root / "store", store)

    def on_step(done: int) -> None:
        if stop and done == 2:
            raise KeyboardInterrupt

    return userdp.train(
        model,
        tokenizer,
        UserStore.open(store),
        plan("user", steps=4, noise_multiplier=1.0, clip_norm=0.5, non_private=False),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        sequence_length=LENGTH,
        settings=StepSettings(path="plain"),
        out=out,
        secret=RunSecret.fixed_for_tests(3),
        saving=Saving(every_steps=2),
        resume=resume,
        on_step=on_step,
        **choice,
    )


@pytest.mark.parametrize("select", ["random-chunk", "lowest-perplexity"])
def test_a_stopped_run_goes_on_with_the_same_choice_and_with_no_other(
    select: str, root: Path, tmp_path: Path
) -> None:
    choice: dict[str, Any] = {"select": select, "resample": True}
    whole = train(root, tmp_path / "whole", **choice)
    with pytest.raises(KeyboardInterrupt):
        train(root, tmp_path / "run", stop=True, **choice)
    others: list[dict[str, Any]] = [{"select": "longest", "resample": True}, {"select": select}]
    others.append(choice | {"tokens_per_user": 9})
    for other in others:
        with pytest.raises(InputError, match="begun with another choice of each user's rows"):
            train(root, tmp_path / "run", resume=True, **other)
    resumed = train(root, tmp_path / "run", resume=True, **choice)
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert resumed.ledger.bound_to["select"].startswith(f"{select}, resampled")


def test_a_step_on_equally_long_users_is_the_mean_gradient_of_their_first_tokens(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    model, tokenizer = load_model(root / "base")
    before = [p.detach().clone() for p in model.parameters()]
    expected = [torch.zeros_like(p) for p in model.parameters()]
    counts: list[int] = []
    for user in range(store.num_users):
        records = store.records_of(user).tolist()
        rows = [row for r in records for row in rows_by_hand(store, tokenizer, r)]
        counts.append(sum(map(len, rows)))
        kept: list[list[int]] = []
        for row in rows:
            row = row[: 18 - sum(map(len, kept))]
            kept += [row] if len(row) > 1 else []
        if counts[-1] >= 18:
            for total, part in zip(expected, gradient(model, kept), strict=True):
                total += part
    assert min(counts) < 18 < max(counts)
    chosen = plan("user", group_size=9)
    userdp.train(
        model,
        tokenizer,
        store,
        chosen,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        sequence_length=LENGTH,
        tokens_per_user=18,
    )
    for start, parameter, total in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            start - parameter.detach(), total / chosen.divisor, rtol=1e-4, atol=1e-6
        )


def test_equally_long_users_are_refused_where_records_are_priced_alone(
    root: Path, tmp_path: Path
) -> None:
    # One record more may bring all others of its user in.
    shutil.copytree(root / "store", tmp_path / "store")
    model, tokenizer = load_model(root / "base")
    chosen = Plan.sample_records(
        num_users=4,
        expected_batch_size=4,
        group_size=K,
        steps=1,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
        mark=RecordLevel(),
    )
    with pytest.raises(InputError, match="tokens_per_user"):
        userdp.train(
            model,
            tokenizer,
            UserStore.open(tmp_path / "store"),
            chosen,
            sequence_length=LENGTH,
            tokens_per_user=18,
        )


def test_a_run_is_held_to_the_rows_that_its_losses_chose(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(root, tmp_path / "run", stop=True, select="lowest-perplexity")
    # As if this machine rounded so that another record came first.
    other = lambda *args, **options: -mean_losses(*args, **options)  # noqa: E731
    monkeypatch.setattr("userdp.training.choice.mean_losses", other)
    with pytest.raises(InputError, match="begun with another choice of each user's rows"):
        train(root, tmp_path / "run", resume=True, select="lowest-perplexity")


def test_perplexity_is_not_scored_by_a_model_of_a_private_run(root: Path, tmp_path: Path) -> None:
    run = train(root, tmp_path / "run")
    store = UserStore.open(tmp_path / "run-store")
    _, tokenizer = load_model(root / "base")
    with pytest.raises(InputError, match="trained on private data"):
        record_losses(run.model, tokenizer, store)
    with pytest.raises(InputError, match="trained on private data"):
        userdp.train(
            run.model,
            tokenizer,
            store,
            plan("user", noise_multiplier=1.0, clip_norm=0.5, non_private=False),
            sequence_length=LENGTH,
            select="highest-perplexity",
        )


def test_records_are_scored_at_the_length_of_the_training(root: Path) -> None:
    store = UserStore.open(root / "store")
    model, tokenizer = load_model(root / "base")
    found = record_losses(model, tokenizer, store, sequence_length=LENGTH)
    by_hand = [
        loss_by_hand(model, rows_by_hand(store, tokenizer, record))
        for record in range(store.num_records)
    ]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)
    assert not np.allclose(found, record_losses(model, tokenizer, store), rtol=1e-3)
    with pytest.raises(InputError, match="above the 64 positions"):
        record_losses(model, tokenizer, store, sequence_length=65)


def test_a_selected_record_of_one_owner_gives_all_its_rows(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    model, tokenizer = load_model(root / "base")
    before = [p.detach().clone() for p in model.parameters()]
    selection = bound(tmp_path / "store", 1, method="longest").selection
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for record in selection.records().tolist():
        rows = rows_by_hand(store, tokenizer, record)
        assert len(rows) <= K
        for total, part in zip(expected, gradient(model, rows), strict=True):
            total += part
    chosen = plan("user")
    userdp.train(
        model,
        tokenizer,
        store,
        chosen,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        sequence_length=LENGTH,
        selection=selection,
    )
    for start, parameter, total in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            start - parameter.detach(), total / chosen.divisor, rtol=1e-4, atol=1e-6
        )


def test_the_configuration_names_the_choice(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""[data]
store = "{tmp_path / "store"}"
sequence_length = {LENGTH}
select = "random-chunk"
resample = true
[model]
path = "{root / "base"}"
[privacy]
unit = "record"
num_users = 4
expected_batch_size = 6
group_size = {K}
clip_norm = 1.0
epsilon = 8.0
delta = 1e-2
[training]
steps = 2
path = "plain"
"""
    )
    config = load_config(path)
    run = train_from_config(path, config, config.plan(), tmp_path / "run")
    assert run.ledger.bound_to["select"] == "random-chunk, resampled"
    assert run.statement.epsilon <= 8.0


def test_chats_surprise_by_what_the_assistant_says(tmp_path: Path) -> None:
    tokenizer = word_chat_tokenizer(CHATML)
    torch.manual_seed(4)
    model: Any = models_zoo.gpt2(vocabulary=len(tokenizer)).eval()
    turns = [("w1 w2 w3", "w4 w5"), ("w2", "w6 w1 w1"), ("w7 w8 w9 w1", "w3")]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in turns
    ]
    store = store_of(tmp_path / "store", [json.dumps(chat) for chat in chats], "chat", users=3)
    found = record_losses(model, tokenizer, store, sequence_length=24)
    for chat, loss in zip(chats, found, strict=True):
        ids = torch.tensor(tokenizer.apply_chat_template(chat, return_dict=False))
        asked = tokenizer.apply_chat_template(
            chat[:1], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(asked) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, ids[len(asked) :])
        assert loss == pytest.approx(float(expected), rel=1e-4)
