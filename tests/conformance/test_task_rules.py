"""The conformance suite of tasks, run on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models_zoo
from task_stores import bert_tokenizer, store_of
from userdp.clipping.settings import StepSettings
from userdp.data.contents import TextKind, labelled_json
from userdp.data.tokens import TokenRows, tokenise
from userdp.index import IGNORED_LABEL
from userdp.models.checks import trainable_parameters
from userdp.plan import Plan
from userdp.probe.checked_model import CheckedModel
from userdp.tasks import Task, TaskName, task_named

LENGTH = 16
CLASSES = ("good", "bad")
TEMPLATE = (
    "{% for message in messages %}{{ 'w20 ' if message['role'] == 'user' else 'w21 ' }}"
    "{{ message['content'] }} <end> {% endfor %}{% if add_generation_prompt %}w21 {% endif %}"
)
WORDS = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9", "w1", "w2 w3", "w9 w9 w9 w9"]
TASKS: dict[TaskName, TextKind] = {
    "causal": "plain",
    "chat": "chat",
    "masked": "plain",
    "classification": "labelled",
}
each = pytest.mark.parametrize("name", TASKS)


def tokenizer_of(name: TaskName) -> Any:
    if name in ("masked", "classification"):
        return bert_tokenizer()
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def task_of(name: TaskName) -> Task:
    return task_named(name, tokenizer_of(name), classes=CLASSES)


def model_of(name: TaskName) -> nn.Module:
    torch.manual_seed(0)
    if name in ("causal", "chat"):
        return models_zoo.gpt2().eval()
    kind = "ForMaskedLM" if name == "masked" else "ForSequenceClassification"
    return models_zoo.of_family(
        "Bert", kind, vocab_size=len(bert_tokenizer()), pad_token_id=0
    ).eval()


def text(words: str, kind: TextKind, number: int) -> str:
    if kind == "chat":
        roles = ("user", "assistant")
        return json.dumps([{"role": role, "content": words} for role in roles])
    return labelled_json(words, CLASSES[number % 2]) if kind == "labelled" else words


def rows_of(name: TaskName, path: Path) -> TokenRows:
    kind = TASKS[name]
    texts = [text(words, kind, number) for number, words in enumerate(WORDS)]
    store = store_of(path / "store", texts, kind)
    return tokenise(
        store, tokenizer_of(name), sequence_length=LENGTH, encoding=task_of(name).encoding
    )


@each
def test_a_batch_depends_on_its_rows_and_its_stream_alone(name: TaskName, tmp_path: Path) -> None:
    rows, task = rows_of(name, tmp_path), task_of(name)
    first = task.batch(rows, np.array([0, 1]), np.random.default_rng(1))
    task.batch(rows, np.array([2, 3]), np.random.default_rng(2))
    again = task.batch(rows, np.array([0, 1]), np.random.default_rng(1))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


@each
def test_a_group_without_rows_has_the_same_tensors(name: TaskName, tmp_path: Path) -> None:
    rows, task = rows_of(name, tmp_path), task_of(name)
    some = task.batch(rows, np.array([0]), np.random.default_rng(0))
    none = task.batch(rows, np.zeros(0, np.int64), np.random.default_rng(0))
    assert {key: (t.dtype, t.dim()) for key, t in some.items()} == {
        key: (t.dtype, t.dim()) for key, t in none.items()
    }
    assert all(len(tensor) == 0 for tensor in none.values())


@each
def test_batches_and_the_example_can_be_read(name: TaskName, tmp_path: Path) -> None:
    model, task = model_of(name), task_of(name)
    plan = Plan.sample_users(
        num_users=3,
        expected_cohort_size=3,
        group_size=1,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    checked = CheckedModel(
        model,
        list(trainable_parameters(model).values()),
        plan,
        update=plan.update,
        record_loss=task.record_loss,
        settings=StepSettings(),
        sequence_length=len(tokenizer_of(name)),
    )
    example = task.example(tokenizer_of(name))
    assert checked.reads(example)
    assert set(example["input_ids"].flatten().tolist()) == set(range(len(tokenizer_of(name))))
    batch = task.batch(rows_of(name, tmp_path), np.arange(5), np.random.default_rng(3))
    assert checked.reads(batch)
    assert batch.keys() == example.keys()


@each
def test_predictions_have_the_loss_that_is_trained(name: TaskName, tmp_path: Path) -> None:
    model, task = model_of(name), task_of(name)
    batch = task.batch(rows_of(name, tmp_path), np.arange(5), np.random.default_rng(3))
    with torch.no_grad():
        logits, right = task.predictions(model, batch)
        trained = task.record_loss(model, batch)
    losses = F.cross_entropy(logits.transpose(1, 2), right, reduction="none")
    counted = (right != IGNORED_LABEL).sum(1)
    assert torch.allclose(losses.sum(1) / counted.clamp(min=1), trained, atol=1e-5)
    assert int(counted.sum()) > 0


@each
def test_a_record_without_labels_has_loss_zero(name: TaskName, tmp_path: Path) -> None:
    model, task = model_of(name), task_of(name)
    batch = dict(task.batch(rows_of(name, tmp_path), np.arange(3), np.random.default_rng(3)))
    batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
    with torch.no_grad():
        assert task.record_loss(model, batch).tolist() == [0.0, 0.0, 0.0]


def test_every_task_has_a_name_of_its_own() -> None:
    names = [task_of(name).name for name in TASKS]
    encodings = [task_of(name).encoding.name for name in TASKS]
    assert len(set(names)) == len(set(encodings)) == len(TASKS)
