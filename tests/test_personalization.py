"""Tuning for each user: many at once like one after the other, and like SGD written out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models_zoo
import task_stores
from stores import KEY
from userdp.data.contents import TextKind, labelled_json
from userdp.data.identity import Pseudonyms
from userdp.data.record import Record, batches_of
from userdp.data.store import UserStore, write_batches
from userdp.errors import InputError
from userdp.evaluation import evaluate_store
from userdp.models.adapters import Lora, add_lora
from userdp.personalization import Personalization, personalize
from userdp.stacked_lora import adapter_layers, stacked
from userdp.tasks import task_named

MakeStore = Callable[[list[Record]], UserStore]


@pytest.fixture(scope="module")
def store(make_store: MakeStore) -> UserStore:
    """Seven users with 1 to 7 records of 2 to 9 words; one record has two owners."""
    rng = np.random.default_rng(4)
    records = [
        Record(
            " ".join(rng.choice(models_zoo.WORDS, size=int(rng.integers(2, 10)))),
            ("u6", "u5") if (user, number) == (6, 0) else (f"u{user}",),
            f"{user}.{number}",
        )
        for user in range(7)
        for number in range(user + 1)
    ]
    return make_store(records)


def adapted(architecture: str, *, freeze_a: bool = False) -> Any:
    """A model with adapters that are not zero, as after a run."""
    model = add_lora(models_zoo.build(architecture), Lora(rank=2, freeze_a=freeze_a)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("architecture", ["gpt2 tied", "llama"])
@pytest.mark.parametrize(("users_at_once", "freeze_a"), [(1, False), (3, True), (100, False)])
def test_many_users_at_once_are_tuned_like_one_after_the_other(
    architecture: str, users_at_once: int, freeze_a: bool, store: UserStore
) -> None:
    model = adapted(architecture, freeze_a=freeze_a)
    tokenizer = models_zoo.word_tokenizer()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"sequence_length": 6, "learning_rate": 0.5, "batch_rows": 2}
    alone = personalize(model, tokenizer, store, one_by_one=True, **options)
    many = personalize(model, tokenizer, store, users_at_once=users_at_once, **options)
    assert many.how == "adapters, many users at once"
    assert alone.how == "adapters, one user after the other"
    assert many.before == pytest.approx(alone.before, rel=1e-9)
    assert many.after == pytest.approx(alone.after, rel=1e-9)
    assert np.abs(alone.before - alone.after).min() > 1e-3, "tuning changes every loss"
    assert (len(many.before), many.left_out) == (6, 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(p.grad is not None for p in model.parameters())


def test_one_user_is_tuned_like_sgd_written_out(store: UserStore) -> None:
    tokenizer = models_zoo.word_tokenizer()
    found = personalize(
        models_zoo.build("gpt2 tied"),
        tokenizer,
        store,
        sequence_length=32,
        epochs=2,
        learning_rate=0.3,
        batch_rows=2,
    )
    assert found.how == "all trained weights, one user after the other"
    # User 4 has five records: three to tune on, in batches of two and one, and two to measure on.
    model = models_zoo.build("gpt2 tied")
    texts = [store.text(record) for record in store.records_of(4).tolist()]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]

    def token_losses(row: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        return -torch.log_softmax(logits, -1)[torch.arange(len(row) - 1), torch.tensor(row[1:])]

    def measured() -> float:
        with torch.no_grad():
            return float(torch.cat([token_losses(row) for row in rows[3:]]).mean())

    # Users are numbered in the order in which they appear; the first has one record only.
    assert found.before[3] == pytest.approx(measured(), rel=1e-9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        for batch in (rows[:2], rows[2:3]):
            optimizer.zero_grad()
            torch.stack([token_losses(row).mean() for row in batch]).mean().backward()
            optimizer.step()
    assert found.after[3] == pytest.approx(measured(), rel=1e-9)


def test_what_one_user_wrote_changes_nobody_elses_loss(make_store: MakeStore) -> None:
    def losses(text: str) -> np.ndarray:
        records = [
            Record(words, (user,), f"{user}{number}")
            for user, texts in {
                "a": ("w1 w2 w3", "w2 w4"),
                "b": (text, "w5 w5 w5"),
                "c": ("w6 w1", "w7 w2 w1"),
            }.items()
            for number, words in enumerate(texts)
        ]
        return personalize(
            adapted("gpt2 tied"), models_zoo.word_tokenizer(), make_store(records)
        ).after

    first, second = losses("w3 w3 w3 w3 w3"), losses("w9 w8")
    assert first[[0, 2]] == pytest.approx(second[[0, 2]], rel=1e-12)
    assert first[1] != pytest.approx(second[1], rel=1e-4)


def test_an_lstm_is_tuned_one_by_one(store: UserStore) -> None:
    found = personalize(
        models_zoo.build("lstm tied"), models_zoo.word_tokenizer(), store, sequence_length=8
    )
    assert "one user after the other" in found.how
    assert np.isfinite(found.after).all()
    told = found.to_json()
    assert told["users"] == 6
    assert told["loss_before"] == pytest.approx(found.before.mean())
    assert told["share_improved"] == pytest.approx((found.after < found.before).mean())


class RoutesTokens(torch.nn.Module):
    """Gives a layer single tokens, as a mixture of experts does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.flatten(0, 1)).view(*rows.shape[:-1], -1)


def test_a_layer_that_sees_single_tokens_is_tuned_one_by_one(store: UserStore) -> None:
    model = adapted("gpt2 tied")
    plain = personalize(
        model, models_zoo.word_tokenizer(), store, sequence_length=8, one_by_one=True
    )
    block = model.base_model.model.transformer.h[0]
    block.mlp.c_fc = RoutesTokens(block.mlp.c_fc)
    found = personalize(model, models_zoo.word_tokenizer(), store, sequence_length=8)
    assert found.how == "adapters, one user after the other"
    assert found.after == pytest.approx(plain.after, rel=1e-9)


def test_only_plain_adapters_are_stacked_and_the_model_gets_its_own_back() -> None:
    model = adapted("gpt2 tied")
    layers = adapter_layers(model)
    assert layers is not None
    before = dict(model.named_modules())
    with stacked(model, {name: layer.weight[None] for name, layer in layers.items()}):
        assert dict(model.named_modules()) != before
    assert dict(model.named_modules()) == before
    assert adapter_layers(models_zoo.build("gpt2 tied")) is None
    next(p for p in model.parameters() if not p.requires_grad).requires_grad_()
    assert adapter_layers(model) is None


def test_a_store_in_which_nobody_has_two_records_is_refused(make_store: MakeStore) -> None:
    single = make_store([Record("w1 w2", ("a",), "a"), Record("w2 w3", ("b",), "b")])
    with pytest.raises(InputError, match="nobody has two records with something to predict"):
        personalize(models_zoo.build("gpt2 tied"), models_zoo.word_tokenizer(), single)


CHATS = [
    json.dumps(
        [
            {"role": "user", "content": f"w{number} w9 w3"},
            {"role": "assistant", "content": f"w{number % 7} w2"},
        ]
    )
    for number in range(12)
]


def second_halves(store: UserStore, path: Path, kind: TextKind) -> UserStore:
    """A store of what is measured: the second half of each user's records."""
    records = [
        Record(store.text(record), (f"u{user}",), f"record {record}")
        for user in range(store.num_users)
        for record in store.records_of(user).tolist()[(len(store.records_of(user)) + 1) // 2 :]
    ]
    write_batches(batches_of(records, text_kind=kind), path, pseudonyms=Pseudonyms.under(KEY))
    return UserStore.open(path)


@pytest.mark.parametrize("task", [None, "chat", "causal"])
@pytest.mark.parametrize("with_adapters", [False, True])
def test_the_loss_of_chats_before_tuning_is_that_of_evaluate(
    task: Any, with_adapters: bool, tmp_path: Path
) -> None:
    model = models_zoo.gpt2(vocabulary=26).double()
    if with_adapters:
        model = add_lora(model, Lora(rank=2))
    tokenizer = task_stores.word_chat_tokenizer(task_stores.CHATML)
    store = task_stores.store_of(tmp_path / "all", CHATS, "chat", users=3)
    found = personalize(model, tokenizer, store, task=task, sequence_length=32, learning_rate=0.5)
    measured = evaluate_store(
        model,
        tokenizer,
        second_halves(store, tmp_path / "half", "chat"),
        sequence_length=32,
        task=task_named(task or "chat", tokenizer),
    )
    assert np.sort(found.before) == pytest.approx(np.sort(measured.user_losses), rel=1e-9)
    assert np.abs(found.before - found.after).min() > 1e-3
    assert ("at once" in found.how) == with_adapters


def test_classes_are_measured_as_evaluate_does(tmp_path: Path) -> None:
    texts = [labelled_json(f"w{n % 5} w{n % 3} w1", "good" if n % 2 else "bad") for n in range(12)]
    store = task_stores.store_of(tmp_path / "all", texts, "labelled", users=3)
    tokenizer = task_stores.bert_tokenizer()
    names = {0: "bad", 1: "good"}
    model = models_zoo.of_family(
        "Bert",
        "ForSequenceClassification",
        vocab_size=len(tokenizer),
        id2label=names,
        label2id={name: number for number, name in names.items()},
    ).double()
    found = personalize(model, tokenizer, store, task="classification", sequence_length=8)
    measured = evaluate_store(
        model,
        tokenizer,
        second_halves(store, tmp_path / "half", "labelled"),
        sequence_length=8,
        task=task_named("classification", tokenizer, classes=("bad", "good")),
    )
    assert np.sort(found.before) == pytest.approx(np.sort(measured.user_losses), rel=1e-9)


def test_hidden_tokens_are_predicted_and_the_same_before_and_after(store: UserStore) -> None:
    tokenizer = task_stores.bert_tokenizer()
    model = models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=len(tokenizer)).double()
    options: dict[str, Any] = {"task": "masked", "sequence_length": 16}
    still = personalize(model, tokenizer, store, learning_rate=1e-12, **options)
    assert still.after == pytest.approx(still.before, rel=1e-9)
    tuned = personalize(model, tokenizer, store, learning_rate=0.5, **options)
    assert tuned.before == pytest.approx(still.before, rel=1e-12)
    assert np.isfinite(tuned.after).all()
    assert (np.abs(tuned.after - tuned.before) > 1e-3).any()
    # Users of whom no token happened to be hidden are left out, and nobody is counted twice.
    assert len(tuned.before) + tuned.left_out == store.num_users


def test_what_is_hidden_of_a_user_does_not_depend_on_who_else_is_there(tmp_path: Path) -> None:
    tokenizer = task_stores.bert_tokenizer()
    model = models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=len(tokenizer)).double()
    found: list[dict[bytes, complex]] = []
    for users in (range(6), range(1, 6)):
        records = [
            Record(f"w{user} w{number} " + "w3 w4 w5 w6 w7 w8 w9 w1 w2 " * 2, (f"u{user}",), "r")
            for user in users
            for number in range(4)
        ]
        place = tmp_path / str(len(users))
        write_batches(batches_of(records), place, pseudonyms=Pseudonyms.under(KEY))
        store = UserStore.open(place)
        told = personalize(model, tokenizer, store, task="masked", sequence_length=32, epochs=1)
        assert told.left_out == 0
        losses = (told.before + 1j * told.after).tolist()
        found.append(dict(zip(store.pseudonyms.to_pylist(), losses, strict=True)))
    everybody, others = found
    assert all(everybody[user] == pytest.approx(others[user], rel=1e-9) for user in others)


def test_a_model_with_a_head_for_another_task_is_refused_by_name(store: UserStore) -> None:
    tokenizer = task_stores.bert_tokenizer()
    model = models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=len(tokenizer))
    with pytest.raises(InputError, match="BertForMaskedLM, which has no head"):
        personalize(model, tokenizer, store, sequence_length=16)


def test_what_is_printed_tells_the_losses() -> None:
    found = Personalization(
        before=np.array([2.0, 4.0]), after=np.array([1.0, 2.0]), left_out=1, how="weights"
    )
    assert repr(found) == (
        "Personalization(loss_before=3.0000, loss_after=1.5000, users=2, tuned='weights')"
    )
