"""The labels of chats and of prompts with completions are those of TRL, token by token."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models_zoo
from shared import SHARED
from task_stores import byte_tokenizer, made_up_chats, real_chats, store_of
from userdp.data.contents import Messages, chat_pair_json, pair_json
from userdp.data.tokens import TokenRows, tokenise
from userdp.index import IGNORED_LABEL
from userdp.tasks import ChatTask

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
}
LENGTH = 100_000


def of_trl(
    examples: list[dict[str, Any]], tokenizer: Any, out: Path, **settings: Any
) -> list[tuple[list[int], list[int]]]:
    """Input ids and labels as TRL's trainer and its collator make them."""
    trainer = trl.SFTTrainer(
        model=models_zoo.gpt2(vocabulary=len(tokenizer)),
        args=trl.SFTConfig(
            output_dir=str(out), max_length=None, report_to="none", use_cpu=True, **settings
        ),
        train_dataset=datasets.Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    found: list[tuple[list[int], list[int]]] = []
    for example in trainer.train_dataset:
        batch = trainer.data_collator([example])
        found.append((batch["input_ids"][0].tolist(), batch["labels"][0].tolist()))
    return found


def of_userdp(rows: TokenRows) -> list[tuple[list[int], list[int]]]:
    found: list[tuple[list[int], list[int]]] = []
    for row, (start, stop) in enumerate(pairwise(rows.indptr)):
        ids, labels = rows.padded(np.array([row]), pad_token=0)
        assert ids.shape[1] == stop - start
        found.append((ids[0].tolist(), labels[0].tolist()))
    return found


def chats() -> list[Messages]:
    """200 conversations, half of them real where the shared data is here."""
    real = real_chats(100) if SHARED.is_dir() else []
    return made_up_chats(200 - len(real), seed=0) + real


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama3_training", "gemma", "gemma_training", "qwen2_5_training")
        ),
    ],
)
def test_labels_of_200_chats_are_those_of_trl(name: str, tmp_path: Path) -> None:
    # Those without marks are known to TRL, which marks them itself.
    conversations = chats()
    contents = [message["content"] for chat in conversations for message in chat]
    tokenizer = byte_tokenizer(SPECIAL[name.removesuffix("_training")], contents[:200])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    store = store_of(tmp_path / "store", list(map(json.dumps, conversations)), "chat")
    rows = tokenise(
        store, tokenizer, sequence_length=LENGTH, encoding=ChatTask(pad_token=0).encoding
    )
    found = of_userdp(rows)
    expected = of_trl(
        [{"messages": chat} for chat in conversations],
        tokenizer,
        tmp_path / "trl",
        assistant_only_loss=True,
    )
    assert len(found) == len(expected) == 200
    assert found == expected
    assert all(IGNORED_LABEL in labels for _, labels in expected)


def test_labels_of_200_completions_are_those_of_trl(tmp_path: Path) -> None:
    pairs = [(chat[0]["content"], chat[1]["content"]) for chat in chats()]
    tokenizer = byte_tokenizer([], [text for pair in pairs[:100] for text in pair])
    store = store_of(tmp_path / "store", [pair_json(*pair) for pair in pairs], "pair")
    rows = tokenise(
        store, tokenizer, sequence_length=LENGTH, encoding=ChatTask(pad_token=0).encoding
    )
    expected = of_trl(
        [{"prompt": prompt, "completion": completion} for prompt, completion in pairs],
        tokenizer,
        tmp_path / "trl",
        completion_only_loss=True,
    )
    assert len(expected) == 200
    assert of_userdp(rows) == expected


def test_labels_of_200_prompts_and_completions_of_messages_are_those_of_trl(tmp_path: Path) -> None:
    found = [chat for chat in chats() if len(chat) > 1]
    pairs = [(chat[: place % (len(chat) - 1) + 1], chat) for place, chat in enumerate(found)]
    split = [(prompt, chat[len(prompt) :]) for prompt, chat in pairs]
    texts = [message["content"] for chat in found[:100] for message in chat]
    tokenizer = byte_tokenizer(SPECIAL["qwen2_5"], texts)
    tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    stored = [chat_pair_json(json.dumps(one), json.dumps(other)) for one, other in split]
    store = store_of(tmp_path / "store", stored, "pair")
    rows = tokenise(
        store, tokenizer, sequence_length=LENGTH, encoding=ChatTask(pad_token=0).encoding
    )
    expected = of_trl(
        [{"prompt": prompt, "completion": completion} for prompt, completion in split],
        tokenizer,
        tmp_path / "trl",
    )
    assert len(expected) == len(found)
    assert of_userdp(rows) == expected
