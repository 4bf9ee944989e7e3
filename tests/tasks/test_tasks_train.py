"""Every task trains, with adapters and in full, and both paths give the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models_zoo
import userdp
from task_stores import bert_tokenizer, store_of
from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.data.contents import TextKind, labelled_json
from userdp.index import IGNORED_LABEL
from userdp.losses import Batch, causal_lm_loss, classification_loss
from userdp.models.adapters import Lora, add_lora
from userdp.models.load import classes_of
from userdp.probe.checked_model import CheckedModel
from userdp.probe.verify import verify
from userdp.streams import RunSecret
from userdp.tasks import OwnLoss, TaskName, task_named

LENGTH = 16
CLASSES = ["good", "bad"]
# Roles are words here, so that all models of the zoo have enough embeddings.
TEMPLATE = (
    "{% for message in messages %}{{ 'w20 ' if message['role'] == 'user' else 'w21 ' }}"
    "{{ message['content'] }} <end> {% endfor %}{% if add_generation_prompt %}w21 {% endif %}"
)


def classifier(family: str, vocabulary: int, **changes: Any) -> nn.Module:
    names = dict(enumerate(CLASSES))
    return models_zoo.of_family(
        family, "ForSequenceClassification", vocab_size=vocabulary, id2label=names, **changes
    )


BERT_WORDS = len(bert_tokenizer())
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
# Name -> (task, builder, whether it takes adapters).
MODELS: dict[str, tuple[TaskName, Callable[[], nn.Module], bool]] = {
    "gpt2": ("chat", models_zoo.gpt2, True),
    "llama": ("chat", lambda: models_zoo.llama(tied=False), True),
    "qwen2": ("chat", models_zoo.MORE_BUILDERS["qwen2"], True),
    "gemma": ("chat", models_zoo.MORE_BUILDERS["gemma"], True),
    "lstm": ("causal", models_zoo.TiedLSTM, False),
    "bert, masked": (
        "masked",
        lambda: models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=BERT_WORDS, pad_token_id=0),
        True,
    ),
    "bert, classes": (
        "classification",
        lambda: classifier("Bert", BERT_WORDS, pad_token_id=0),
        True,
    ),
    "gpt2, classes": (
        "classification",
        lambda: classifier("GPT2", BERT_WORDS, pad_token_id=0, **GPT2),
        True,
    ),
}
# One of each kind; the others wait for the long run.
USUAL = {("gpt2", "lora"), ("lstm", "full"), ("bert, masked", "full"), ("bert, classes", "lora")}
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in USUAL else [pytest.mark.slow])
    for name, (_, _, adapts) in MODELS.items()
    for kind in (("full", "lora") if adapts else ("full",))
]


def build(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    task, make, _ = MODELS[name]
    model = make().to(torch.float64).eval()
    if kind == "lora":
        model = add_lora(model, Lora(rank=2), task=task).to(torch.float64)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.1)
    return model


def tokenizer_of(task: TaskName) -> Any:
    if task in ("masked", "classification"):
        return bert_tokenizer()
    tokenizer = models_zoo.word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[TaskName, userdp.UserStore]:
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("stores")

    def words() -> str:
        return " ".join(rng.choice(models_zoo.WORDS[:19], size=int(rng.integers(2, 7))))

    def chat() -> str:
        roles = ("user", "assistant") * int(rng.integers(1, 4))
        return json.dumps([{"role": role, "content": words()} for role in roles])

    makers: dict[TextKind, Callable[[], str]] = {
        "plain": words,
        "chat": chat,
        "labelled": lambda: labelled_json(words(), str(rng.choice([*CLASSES, "neither"]))),
    }
    made = {
        kind: store_of(root / kind, [make() for _ in range(30)], kind)
        for kind, make in makers.items()
    }
    return {
        "causal": made["plain"],
        "chat": made["chat"],
        "masked": made["plain"],
        "classification": made["labelled"],
    }


def trained(
    model: nn.Module,
    task: TaskName,
    store: userdp.UserStore,
    path: Literal["fast", "plain"] = "fast",
    **options: Any,
) -> dict[str, Tensor]:
    plan = userdp.Plan.sample_users(
        num_users=12,
        expected_cohort_size=6,
        group_size=2,
        steps=5,
        clip_norm=0.5,
        noise_multiplier=0.5,
        delta=1e-2,
    )
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run = userdp.train(
        model,
        tokenizer_of(task),
        store,
        plan,
        optimizer=torch.optim.SGD(own, lr=0.1),
        task=task,
        sequence_length=LENGTH,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(3),
        **options,
    )
    assert run.statement.steps == 5
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_five_private_steps_give_the_same_weights_on_both_paths(
    name: str,
    kind: str,
    stores: dict[TaskName, userdp.UserStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Two runs with other settings draw other noise. Here they must not, to be compared.
    monkeypatch.setattr(RunSecret, "bound_to", lambda self, context: self)
    task = MODELS[name][0]
    before = {n: p.detach().clone() for n, p in build(name, kind).named_parameters()}
    fast = trained(build(name, kind), task, stores[task], "fast")
    plain = trained(build(name, kind), task, stores[task], "plain")
    # Neither did the fast path give way to the plain one, nor did a group count as zero.
    assert not caplog.records
    tolerance = 1e-7 if name == "gemma" else 1e-12
    for parameter, value in fast.items():
        assert not torch.equal(value, before[parameter])
        assert float((value - plain[parameter]).abs().max()) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_weights_depend_on_what_records_say(
    name: str, kind: str, stores: dict[TaskName, userdp.UserStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, updates of zero would pass for equal ones.
    monkeypatch.setattr(RunSecret, "bound_to", lambda self, context: self)
    task = MODELS[name][0]
    model = build(name, kind)

    def silent(model: nn.Module, batch: Batch) -> Tensor:
        return 0.0 * task_named(task, tokenizer_of(task), classes=classes_of(model)).record_loss(
            model, batch
        )

    with_data = trained(model, task, stores[task])
    without = trained(build(name, kind), task, stores[task], record_loss=silent)
    moved = sum(float((with_data[n] - without[n]).square().sum()) for n in without) ** 0.5
    assert moved > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_thorough_probes_find_nothing_in(name: str, kind: str) -> None:
    task_name = MODELS[name][0]
    model, tokenizer = build(name, kind), tokenizer_of(task_name)
    task = task_named(task_name, tokenizer, classes=CLASSES)
    found = verify(
        model,
        task.example(tokenizer),
        record_loss=task.record_loss,
        sequence_length=LENGTH,
    )
    assert found.safe, found.cause
    assert 0.5 < found.largest_movement <= 1 + 1e-5


def test_a_loss_of_ones_own_is_used_and_named(stores: dict[TaskName, userdp.UserStore]) -> None:
    asked: list[int] = []

    def doubled(model: nn.Module, batch: Batch) -> Tensor:
        asked.append(len(batch["labels"]))
        return 2 * causal_lm_loss(model, batch)

    torch.manual_seed(0)
    trained(models_zoo.gpt2().double().eval(), "chat", stores["chat"], record_loss=doubled)
    assert asked
    named = OwnLoss(task=task_named("chat", tokenizer_of("chat")), record_loss=doubled).name
    assert named.startswith("chat, loss ")
    assert named.endswith("doubled")


def labelled_group(labels: list[int], length: int, seed: int) -> dict[str, Tensor]:
    batch = models_zoo.ragged_batch([length] * len(labels), seed=seed)
    ids = batch["input_ids"]
    return {
        "input_ids": ids,
        "labels": torch.tensor(labels),
        "attention_mask": ids.new_ones(ids.shape),
    }


def test_one_label_a_record_works_in_a_loop_of_ones_own() -> None:
    def own_loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    model, rule = build("bert, classes", "full"), FlatClip(clip_norm=0.1)
    parameters = list(model.parameters())
    sizes = [([0, 1], 5), ([1], 3), ([0], 9), ([1, 1, 0], 4), ([0], 2)]
    groups = [labelled_group(labels, n, seed) for seed, (labels, n) in enumerate(sizes)]
    fast = FastClipping(model, parameters, rule, record_loss=own_loss).clipped_sum(groups, rule)
    plain = PlainClipping(model, parameters, record_loss=own_loss).clipped_sum(groups, rule)
    assert float(plain.total.values.norm()) > 0.1
    assert torch.allclose(fast.total.values, plain.total.values, rtol=0, atol=1e-12)


def test_a_class_that_the_model_does_not_have_counts_as_zero() -> None:
    model = build("bert, classes", "full")
    plan = userdp.Plan.sample_users(
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
        list(model.parameters()),
        plan,
        update=plan.update,
        record_loss=classification_loss,
        settings=StepSettings(),
        sequence_length=LENGTH,
    )
    groups = [labelled_group([label], 4, 0) for label in (0, 1, IGNORED_LABEL, 2, -1)]
    assert [checked.reads(group) for group in groups] == [True, True, True, False, False]


def test_a_model_object_that_fills_gaps_is_not_trained_on_the_next_token(
    stores: dict[TaskName, userdp.UserStore],
) -> None:
    model, tokenizer = build("bert, masked", "full"), tokenizer_of("masked")
    before = [p.detach().clone() for p in model.parameters()]
    store = stores["masked"]
    plan = userdp.Plan.sample_users(
        num_users=store.num_users,
        expected_cohort_size=4,
        group_size=1,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    given: dict[str, Any] = {
        "sequence_length": LENGTH,
        "settings": StepSettings(path="plain"),
        "secret": RunSecret.fixed_for_tests(1),
    }
    with pytest.raises(userdp.InputError, match="BertForMaskedLM, which has no head"):
        userdp.train(model, tokenizer, store, plan, **given)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    # A loss of one's own reads the model as it likes.
    def quiet(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return 0.0 * logits.flatten(1).sum(1)

    tokenizer.eos_token = "[SEP]"
    userdp.train(model, tokenizer, store, plan, record_loss=quiet, **given)
