"""Each task from files to a measured model, by commands alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models_zoo
from cli_runner import userdp
from task_stores import CHATML, bert_tokenizer, word_chat_tokenizer

Fields = Callable[[np.random.Generator], dict[str, Any]]


def words(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(models_zoo.WORDS, size=int(rng.integers(3, 8))))


def imported(root: Path, fields: Fields, *options: str) -> tuple[Path, Path]:
    """A store to train on and one of other users."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("other", 6)):
        lines = [
            json.dumps({"user": f"{part} {user}", **fields(rng)})
            for user in range(count)
            for _ in range(3)
        ]
        source = root / f"{part}.jsonl"
        source.write_text("\n".join(lines))
        key = ("--key", root / "secret" / "ids.key")
        assert userdp("import", source, "--out", root / part, *key, *options).code == 0
    return root / "train", root / "other"


def config(root: Path, stores: tuple[Path, Path], base: Path, data: str, lora: bool) -> Path:
    path = root / "run.toml"
    path.write_text(
        f"""[data]
store = "{stores[0]}"
evaluation = "{stores[1]}"
sequence_length = 24
{data}
[model]
path = "{base}"
{"[model.lora]" if lora else ""}
{"rank = 2" if lora else ""}
[privacy]
num_users = 20
expected_cohort_size = 8
group_size = 2
epsilon = 8.0
delta = 1e-2
clip_norm = 1.0
[training]
steps = 3
fixed_seed = 7
"""
    )
    return path


def save_base(path: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def bert_base(root: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = bert_tokenizer()
    model = models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=len(tokenizer), pad_token_id=0)
    return save_base(root / "base", model, tokenizer)


def run_and_measure(root: Path, path: Path, other: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    checked = userdp("verify", path, "--json").json
    assert checked["safe"]
    trained = userdp("train", path, "--out", root / "run", "--json").json
    measured = userdp("evaluate", root / "run", other, "--json").json
    assert measured["loss"] == pytest.approx(trained["loss"])
    return trained, measured


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_chats_with_a_template_in_a_file(lora: bool, tmp_path: Path) -> None:
    def messages(rng: np.random.Generator) -> dict[str, Any]:
        said = [{"role": role, "content": words(rng)} for role in ("user", "assistant")]
        return {"messages": said}

    stores = imported(tmp_path, messages)
    tokenizer = word_chat_tokenizer(None)
    torch.manual_seed(0)
    base = save_base(tmp_path / "base", models_zoo.gpt2(vocabulary=len(tokenizer)), tokenizer)
    path = config(tmp_path, stores, base, "", lora)
    refused = userdp("train", path, "--out", tmp_path / "run")
    assert refused.code == 2
    assert "chat_template = FILE" in refused.err
    (tmp_path / "chat.jinja").write_text(CHATML)
    data = f'chat_template = "{tmp_path / "chat.jinja"}"'
    path = config(tmp_path, stores, base, data, lora)
    _, measured = run_and_measure(tmp_path, path, stores[1])
    # Every assistant's turn has three to seven words and an end.
    assert 18 * 4 <= measured["tokens"] <= 18 * 8
    every = userdp("evaluate", tmp_path / "run", stores[1], "--task", "causal", "--json").json
    assert every["tokens"] > 2 * measured["tokens"]
    # Of three records the last one is measured.
    lines = (tmp_path / "other.jsonl").read_text().splitlines()
    (tmp_path / "last.jsonl").write_text("\n".join(lines[2::3]))
    key = ("--key", tmp_path / "secret" / "ids.key")
    assert userdp("import", tmp_path / "last.jsonl", "--out", tmp_path / "last", *key).code == 0
    last = userdp("evaluate", tmp_path / "run", tmp_path / "last", "--json").json
    tuned = userdp("personalize", tmp_path / "run", stores[1], "--json").json
    assert tuned["loss_before"] == pytest.approx(last["mean_user_loss"], rel=1e-5)
    assert tuned["users"] == 6


@pytest.mark.slow
def test_masked_words(tmp_path: Path) -> None:
    stores = imported(tmp_path, lambda rng: {"text": words(rng)})
    path = config(tmp_path, stores, bert_base(tmp_path), 'task = "masked"', False)
    _, measured = run_and_measure(tmp_path, path, stores[1])
    assert 0 < measured["tokens"] < 18 * 7 / 2
    tuned = userdp("personalize", tmp_path / "run", stores[1], "--json").json
    assert tuned["users"] + tuned["users_left_out"] == 6
    other = userdp("evaluate", tmp_path / "run", stores[1], "--task", "causal")
    assert other.code == 2
    assert "BertForMaskedLM, which has no head" in other.err


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_classes(lora: bool, tmp_path: Path) -> None:
    def labelled(rng: np.random.Generator) -> dict[str, Any]:
        return {"text": words(rng), "mood": str(rng.choice(["good", "bad"]))}

    stores = imported(tmp_path, labelled, "--label", "mood")
    data = 'task = "classification"\nclasses = ["good", "bad"]'
    path = config(tmp_path, stores, bert_base(tmp_path), data, lora)
    trained, measured = run_and_measure(tmp_path, path, stores[1])
    assert measured["tokens"] == 18
    assert measured["base_checked"] is (True if lora else None)
    assert math.isfinite(trained["loss"])
    tuned = userdp("personalize", tmp_path / "run", stores[1], "--json").json
    assert tuned["users"] == 6
    assert tuned["loss_before"] != tuned["loss_after"]
    assert (measured["covered_by_statement"], tuned["covered_by_statement"]) == (False, False)
    # Who forgets to name the task is told what would be learned instead.
    forgotten = config(tmp_path, stores, bert_base(tmp_path), "", lora)
    refused = userdp("train", forgotten, "--out", tmp_path / "forgotten")
    assert "note: the records have labels" in refused.err
    # What is told of classes has no words of tokens.
    said = userdp("evaluate", tmp_path / "run", stores[1]).out
    assert "class right" in said
    assert "over 18 records of 6 users" in said
    assert "perplexity" not in said
