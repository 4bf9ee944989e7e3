"""Models for each task: the right head, a fresh one only for classes, and always the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import models_zoo
from task_stores import bert_tokenizer
from userdp.errors import InputError
from userdp.losses import class_logits
from userdp.models.adapters import Lora, add_lora
from userdp.models.heads import refuse_other_head
from userdp.models.load import classes_of, load_adapter, load_model, save_model

CLASSES = ["good", "bad", "so so"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("ForMaskedLM", tmp_path_factory.mktemp("models") / "bert")


def saved(kind: str, path: Path, **changes: Any) -> Path:
    tokenizer = bert_tokenizer()
    torch.manual_seed(0)
    model: Any = models_zoo.of_family(
        "Bert", kind, vocab_size=len(tokenizer), pad_token_id=0, **changes
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_masked_model_is_loaded_whole(bert: Path) -> None:
    model, tokenizer = load_model(bert, task="masked")
    assert type(model).__name__ == "BertForMaskedLM"
    assert tokenizer.mask_token_id == 4


def test_a_head_for_classes_begins_fresh_with_the_same_weights_for_everyone(
    bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states: list[dict[str, Any]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with caplog.at_level(logging.WARNING, logger="userdp"):
            model, _ = load_model(bert, task="classification", classes=CLASSES)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    weight = states[0]["classifier.weight"]
    assert weight.shape == (3, 16)
    assert 0.01 < float(weight.std()) < 0.04
    assert not states[0]["classifier.bias"].any()
    assert classes_of(model) == tuple(CLASSES)
    own = [record for record in caplog.records if record.name.startswith("userdp")]
    assert [record.levelname for record in own] == ["WARNING"] * 2
    assert "classifier.weight" in own[0].getMessage()


def test_a_model_that_has_classes_keeps_them_and_its_head(tmp_path: Path) -> None:
    names = dict(enumerate(CLASSES))
    path = saved("ForSequenceClassification", tmp_path, id2label=names)
    model, _ = load_model(path, task="classification")
    assert classes_of(model) == tuple(CLASSES)
    with pytest.raises(InputError, match="knows the classes"):
        load_model(path, task="classification", classes=["good", "bad"])


def test_a_model_without_classes_needs_their_names(bert: Path) -> None:
    with pytest.raises(InputError, match=r"\[data\] classes ="):
        load_model(bert, task="classification")


@pytest.mark.parametrize(
    ("kind", "fits"),
    [("ForMaskedLM", "masked"), ("ForSequenceClassification", "classification")],
)
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_model_object_with_another_head_is_refused_by_every_other_task(
    kind: str, fits: Any, with_lora: bool
) -> None:
    model = models_zoo.of_family("Bert", kind)
    if with_lora:
        model = add_lora(model, Lora(rank=2), task=fits)
    refuse_other_head(model, fits)
    others: list[Any] = ["causal", "chat", "masked", "classification"]
    for task in others:
        if task != fits:
            with pytest.raises(InputError, match=f"Bert{kind}, which has no head"):
                refuse_other_head(model, task)


def test_a_causal_model_object_is_refused_by_tasks_of_encoders() -> None:
    model = models_zoo.gpt2(vocabulary=8)
    for task in ("masked", "classification"):
        with pytest.raises(InputError, match="GPT2LMHeadModel, which has no head"):
            refuse_other_head(model, task)


def test_modules_of_ones_own_are_never_refused_by_their_name() -> None:
    class MyForMaskedLM(nn.Module):
        pass

    refuse_other_head(MyForMaskedLM(), "causal")


def test_a_class_made_from_one_of_the_library_is_known_by_that() -> None:
    class Mine(transformers.BertForMaskedLM):
        pass

    bert = models_zoo.of_family("Bert", "ForMaskedLM")
    with pytest.raises(InputError, match="BertForMaskedLM"):
        refuse_other_head(Mine(bert.config), "causal")  # pyright: ignore[reportArgumentType]


def test_classes_have_no_meaning_for_another_task(bert: Path) -> None:
    with pytest.raises(InputError, match="leave them out"):
        load_model(bert, task="masked", classes=CLASSES)


@pytest.mark.parametrize(
    ("kind", "task", "says"),
    [
        ("ForMaskedLM", "causal", "does not predict the next token"),
        ("ForMaskedLM", "chat", "does not predict the next token"),
        ("ForSequenceClassification", "masked", "no head that fills gaps"),
        ("ForTokenClassification", "classification", "for another task"),
        ("ForQuestionAnswering", "classification", "for another task"),
    ],
)
def test_a_checkpoint_of_another_task_is_refused_by_its_name(
    kind: str, task: Any, says: str, tmp_path: Path
) -> None:
    path = saved(kind, tmp_path)
    classes = CLASSES if task == "classification" else None
    with pytest.raises(InputError, match=says):
        load_model(path, task=task, classes=classes)


def test_adapters_train_a_fresh_head_with_them(bert: Path) -> None:
    model, _ = load_model(bert, task="classification", classes=CLASSES, lora=Lora(rank=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("classifier" in name for name in trained)
    assert all("lora_" in name or "classifier" in name for name in trained)
    masked, _ = load_model(bert, task="masked", lora=Lora(rank=2))
    assert all("lora_" in name for name, p in masked.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("family", "settings", "head"),
    [
        ("DistilBert", {"dim": 16, "n_layers": 1, "n_heads": 2}, {"pre_classifier", "classifier"}),
        ("XLNet", {"d_model": 16, "n_layer": 1, "n_head": 2}, {"sequence_summary", "logits_proj"}),
    ],
)
def test_adapters_train_the_whole_head_whatever_its_parts_are_called(
    family: str, settings: dict[str, Any], head: set[str], tmp_path: Path
) -> None:
    config: Any = getattr(transformers, f"{family}Config")(vocab_size=11, **settings)
    fresh = getattr(transformers, f"{family}ForSequenceClassification")
    model = add_lora(fresh(config), Lora(rank=2), task="classification")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = {name.split(".")[2] for name in trained if "lora_" not in name}
    assert whole == head
    assert not any("lora_" in name for name in trained if name.split(".")[2] in head)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = load_adapter(fresh(config), tmp_path)
    state = model.state_dict()
    for name, value in again.state_dict().items():
        if name in trained:
            assert torch.equal(value, state[name])


def test_a_head_that_fills_gaps_under_a_more_general_name_is_taken(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    config = transformers.FlaubertConfig(
        vocab_size=len(tokenizer), emb_dim=16, n_layers=1, n_heads=2, pad_index=0
    )
    transformers.FlaubertWithLMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, task="masked")
    refuse_other_head(model, "masked")


@pytest.mark.parametrize("task", ["classification", "masked"])
def test_a_saved_adapter_is_loaded_with_its_head(bert: Path, task: Any, tmp_path: Path) -> None:
    classes = CLASSES if task == "classification" else None
    model, tokenizer = load_model(bert, task=task, classes=classes, lora=Lora(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    save_model(model, tokenizer, tmp_path, card="")
    again, _ = load_model(tmp_path, task=task, classes=classes)
    ids = torch.tensor([[2, 6, 7, 3]])
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, again.eval()(input_ids=ids).logits)


def test_a_decoder_classifies_by_the_last_token_of_a_record_however_it_is_padded() -> None:
    torch.manual_seed(0)
    model: nn.Module = models_zoo.of_family(
        "GPT2", "ForSequenceClassification", n_embd=16, n_layer=1, n_head=2, pad_token_id=7
    ).eval()
    ids = torch.tensor([[1, 2, 3]])
    alone = class_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    padded = {
        "input_ids": torch.tensor([[1, 2, 3, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
    }
    assert torch.allclose(class_logits(model, padded), alone, atol=1e-6)
