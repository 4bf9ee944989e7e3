"""What a trainer learns: the model's head says it, or `task=`, and a collator must agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_llama import USERS, chats
from tiny_llama import texts as of_llama

import models_zoo
from task_stores import bert_tokenizer
from userdp import InputError, UserDPTrainer
from userdp.trainer.settings import sequence_length_of

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")


def make_bert(path: Path, kind: str, **settings: Any) -> str:
    tokenizer = bert_tokenizer()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    getattr(transformers, f"Bert{kind}")(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_bert(tmp_path_factory.mktemp("masked"), "ForMaskedLM")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    names = {0: "good", 1: "bad"}
    return make_bert(
        tmp_path_factory.mktemp("classifier"),
        "ForSequenceClassification",
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )


def texts(users: int, **given: Any) -> list[dict[str, Any]]:
    """Texts in the words of the small BERT."""
    words = models_zoo.WORDS
    return [
        {**row, "text": " ".join(words[(n + i * i) % len(words)] for i in range(12))}
        for n, row in enumerate(of_llama(users, **given))
    ]


def labelled(users: int, labels: tuple[Any, Any], **given: Any) -> list[dict[str, Any]]:
    return [{**row, "label": labels[n % 2]} for n, row in enumerate(texts(users, **given))]


def learned(trainer: UserDPTrainer) -> str:
    trainer.train()
    assert trainer.run is not None
    return trainer.run.ledger.bound_to["task"]


def test_a_masked_language_model_learns_to_fill_gaps(
    make: Callable[..., UserDPTrainer], masked: str
) -> None:
    collator = transformers.DataCollatorForLanguageModeling(bert_tokenizer())
    trainer = make(
        masked,
        train_dataset=texts(USERS),
        data_collator=collator,
        eval_dataset=texts(4, prefix="other"),
    )
    assert learned(trainer).startswith("masked 0.15")
    assert "eval_mean_token_accuracy" in trainer.evaluate()
    model = transformers.AutoModelForMaskedLM.from_pretrained(masked)
    loaded = make(
        model,
        task="masked",
        train_dataset=texts(USERS),
        arguments={"output_dir": f"{trainer.args.output_dir}-2"},
    )
    assert learned(loaded).startswith("masked 0.15")


@pytest.mark.parametrize("labels", [("good", "bad"), (0, 1)], ids=["names", "numbers"])
def test_a_classifier_learns_labels_by_name_or_number(
    make: Callable[..., UserDPTrainer], classifier: str, labels: tuple[Any, Any]
) -> None:
    trainer = make(
        classifier,
        train_dataset=labelled(USERS, labels),
        eval_dataset=labelled(4, labels, prefix="other"),
        data_collator=transformers.DataCollatorWithPadding(bert_tokenizer()),
    )
    assert learned(trainer).startswith("classification")
    assert trainer.run is not None
    assert trainer.evaluate().keys() >= {"eval_loss", "eval_accuracy", "eval_worst_decile_loss"}
    # Every record of the others has a class.
    assert trainer.run.validation[0].tokens == 8
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        trainer.args.output_dir
    )
    assert loaded.config.id2label == {0: "good", 1: "bad"}


def test_what_does_not_fit_the_head_is_refused_with_a_way_out(
    make: Callable[..., UserDPTrainer], llama: str, masked: str, classifier: str
) -> None:
    tokenizer = bert_tokenizer()
    padding_free = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    vars(padding_free)["padding_free"] = True
    language = transformers.DataCollatorForLanguageModeling
    causal = transformers.AutoModelForCausalLM.from_pretrained(llama)
    for given, message in (
        ({"model": causal, "task": "masked"}, "task='masked': the model is a LlamaForCausalLM"),
        ({"model": classifier}, "needs a column 'text' and a column 'label'"),
        (
            {"model": llama, "data_collator": language(tokenizer)},
            r"mlm=True\) asks for masked tokens, and this model learns the next token",
        ),
        (
            {"model": masked, "data_collator": language(tokenizer, mlm=False)},
            r"mlm=False\) asks for the next token",
        ),
        (
            {"model": masked, "data_collator": language(tokenizer, mlm_probability=0.3)},
            "mlm_probability=0.3, and the masked task has 0.15",
        ),
        ({"model": llama, "data_collator": padding_free}, "joins records of several users"),
    ):
        with pytest.raises(InputError, match=message):
            make(**given)


def small(kind: str, **settings: Any) -> Any:
    """A model of random weights for the tokenizer of `make_bert`."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind.startswith("T5"):
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('Model')}Config")
    vocabulary = len(bert_tokenizer())
    return getattr(transformers, kind)(config(vocab_size=vocabulary, **sizes, **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "BertForSequenceClassification",
            {"problem_type": "multi_label_classification"},
            "the model is for multi_label_classification",
        ),
        ("BertForSequenceClassification", {"num_labels": 1}, "the model is for regression"),
        ("BertModel", {}, "is a BertModel, which has no head"),
        ("T5ForConditionalGeneration", {}, "writes a text for another one"),
    ],
)
def test_what_no_task_here_trains_is_refused_by_name(
    make: Callable[..., UserDPTrainer], kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(
            small(kind, **settings),
            processing_class=bert_tokenizer(),
            train_dataset=labelled(3, (0, 1)),
        )


def test_rows_fit_the_positions_and_the_tokenizer(make: Callable[..., UserDPTrainer]) -> None:
    """RoBERTa counts positions from behind that of its padding token."""
    tokenizer = bert_tokenizer()
    settings = {"max_position_embeddings": 34, "pad_token_id": 1, "intermediate_size": 32}
    long = [{**row, "text": " ".join([row["text"]] * 9)} for row in texts(USERS)]
    trainer = make(
        small("RobertaForMaskedLM", **settings),
        processing_class=tokenizer,
        train_dataset=long,
        arguments={"per_device_train_batch_size": USERS, "max_steps": 1},
    )
    trainer.train()
    assert trainer.run is not None
    assert trainer.run.ledger.bound_to["sequence_length"] == "32"
    tokenizer.model_max_length = 20
    assert length_of(small("RobertaForMaskedLM", **settings), tokenizer) == 20
    for name in ("max_length", "sequence_length"):
        with pytest.raises(InputError, match=f"^{name}: it belongs into the arguments"):
            make(**{name: 32})


def length_of(model: Any, tokenizer: Any) -> int:
    args = transformers.TrainingArguments(output_dir="out", use_cpu=True)
    return sequence_length_of(args, model, tokenizer)


def test_prompts_and_completions_may_be_chats(
    make: Callable[..., UserDPTrainer], llama: str
) -> None:
    rows = [
        {
            "user_id": row["user_id"],
            "prompt": row["messages"][:1],
            "completion": row["messages"][1:],
        }
        for row in chats(USERS)
    ]
    trainer = make(train_dataset=rows)
    assert learned(trainer) == "chat"
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has no chat template: set"):
        make(
            train_dataset=rows,
            processing_class=tokenizer,
            arguments={"output_dir": f"{trainer.args.output_dir}-2"},
        )
