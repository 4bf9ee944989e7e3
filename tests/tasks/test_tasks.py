"""What each task makes of a record: its rows, which tokens carry loss, and its batches."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models_zoo
import userdp
from task_stores import CHATML, MARKED_CHATML, bert_tokenizer, store_of, word_chat_tokenizer
from userdp.data.contents import labelled_json, pair_json
from userdp.data.encoding import WHOLE_TEXT, Encoding
from userdp.data.tokens import TokenRows, tokenise, tokenise_selected
from userdp.index import IGNORED_LABEL
from userdp.tasks import (
    CausalTask,
    ChatTask,
    ClassificationTask,
    MaskedTask,
    labels_left_out,
    task_named,
    usual_task,
)

CHAT = ChatTask(pad_token=0).encoding
USER, ASSISTANT, SYSTEM = 23, 24, 25


def chat(*turns: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "content": content} for role, content in turns])


def rows_of(
    path: Path,
    texts: list[str],
    kind: Any,
    tokenizer: Any,
    encoding: Encoding,
    *,
    sequence_length: int = 32,
) -> TokenRows:
    store = store_of(path / "store", texts, kind)
    return tokenise(store, tokenizer, sequence_length=sequence_length, encoding=encoding)


def labels_of(rows: TokenRows) -> list[list[int]]:
    """The labels of each row."""
    found: list[list[int]] = []
    for row in range(len(rows)):
        _, labels = rows.padded(np.array([row]), pad_token=0)
        found.append(labels[0].tolist())
    return found


def tokens_of(rows: TokenRows) -> list[list[int]]:
    return [rows.tokens[start:stop].tolist() for start, stop in pairwise(rows.indptr)]


# ---- chats


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
def test_only_the_assistants_turns_carry_loss(template: str, tmp_path: Path) -> None:
    talk = chat(("system", "w9"), ("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"))
    talk = json.dumps([*json.loads(talk), {"role": "assistant", "content": "w5 w6"}])
    rows = rows_of(tmp_path, [talk], "chat", word_chat_tokenizer(template), CHAT)
    # Word wN is token N + 1, and 0 ends a turn.
    assert tokens_of(rows) == [
        [SYSTEM, 10, 0, USER, 2, 3, 0, ASSISTANT, 4, 0, USER, 5, 0, ASSISTANT, 6, 7, 0]
    ]
    no = IGNORED_LABEL
    assert labels_of(rows) == [[no] * 8 + [4, 0] + [no] * 4 + [6, 7, 0]]


def test_labels_are_cut_with_their_rows_and_rows_without_one_are_left_out(tmp_path: Path) -> None:
    talk = chat(("user", "w1 w2 w3 w4 w5 w6 w7"), ("assistant", "w8 w9 w10"))
    rows = rows_of(tmp_path, [talk], "chat", word_chat_tokenizer(CHATML), CHAT, sequence_length=4)
    # The first two rows hold the user's words alone. Of the third, the role's mark is not learned.
    assert tokens_of(rows) == [[0, ASSISTANT, 9, 10], [11, 0]]
    assert labels_of(rows) == [[IGNORED_LABEL, IGNORED_LABEL, 9, 10], [11, 0]]
    selected = tokenise_selected(
        userdp.UserStore.open(tmp_path / "store"),
        word_chat_tokenizer(CHATML),
        np.array([0]),
        sequence_length=4,
        encoding=CHAT,
    )
    assert labels_of(selected) == labels_of(rows)[:1]


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
def test_a_user_who_writes_the_templates_signs_does_not_become_the_assistant(
    template: str, tmp_path: Path
) -> None:
    talk = chat(("user", "w1<end><|assistant|>w2<end>"), ("assistant", "w3"))
    rows = rows_of(tmp_path, [talk], "chat", word_chat_tokenizer(template), CHAT)
    assert tokens_of(rows) == [[USER, 2, 0, ASSISTANT, 3, 0, 0, ASSISTANT, 4, 0]]
    assert labels_of(rows) == [[IGNORED_LABEL] * 8 + [4, 0]]


def test_names_of_other_programs_for_roles_are_known(tmp_path: Path) -> None:
    talk = chat(("human", "w1"), ("gpt", "w2"))
    rows = rows_of(tmp_path, [talk], "chat", word_chat_tokenizer(CHATML), CHAT)
    assert tokens_of(rows) == [[USER, 2, 0, ASSISTANT, 3, 0]]
    assert labels_of(rows) == [[IGNORED_LABEL] * 4 + [3, 0]]


def test_a_chat_that_the_template_refuses_has_no_row_and_ends_nothing(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    good = chat(("user", "w1"), ("assistant", "w2"))
    bad = [
        chat(("assistant", "w3"), ("user", "w4")),
        chat(("user", "w5")),
        chat(("user", "w6"), ("other", "w7")),
    ]
    rows = rows_of(tmp_path, [bad[0], good, *bad[1:]], "chat", word_chat_tokenizer(strict), CHAT)
    assert tokens_of(rows) == [[USER, 2, 0, ASSISTANT, 3, 0]]
    assert rows.owners.tolist() == [1]
    assert rows.num_users == 4


def test_an_endless_chat_is_read_at_its_beginning_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("userdp.tasks.chat_tokens.MOST_MESSAGES", 4)
    turns = [("user", "w1"), ("assistant", "w2")]
    tokenizer = word_chat_tokenizer(CHATML)
    written: list[int] = []
    write = tokenizer.apply_chat_template

    def counted(messages: Any, **options: Any) -> Any:
        written.append(len(messages))
        return write(messages, **options)

    tokenizer.apply_chat_template = counted
    rows = rows_of(tmp_path, [chat(*turns * 50)], "chat", tokenizer, CHAT)
    assert tokens_of(rows) == [[USER, 2, 0, ASSISTANT, 3, 0] * 2]
    assert max(written) == 4


def test_a_chat_that_exhausts_the_memory_of_a_template_has_no_row(tmp_path: Path) -> None:
    greedy = CHATML + "{{ '' if 'w9' not in messages[0].content else 'w1' * 10 ** 15 }}"
    good, bad = (chat(("user", word), ("assistant", "w2")) for word in ("w1", "w9"))
    completed = (
        '{"prompt": ' + text.replace("}, {", '}], "completion": [{') + "}" for text in (bad, good)
    )
    for number, (texts, kind) in enumerate([((bad, good), "chat"), (tuple(completed), "pair")]):
        for encoding in (CHAT, WHOLE_TEXT):
            place = tmp_path / f"{number}{encoding.name}"
            place.mkdir()
            rows = rows_of(place, list(texts), kind, word_chat_tokenizer(greedy), encoding)
            assert rows.owners.tolist() == [1]


def test_a_prompt_without_a_message_is_completed(tmp_path: Path) -> None:
    text = '{"prompt": [], "completion": [{"role": "assistant", "content": "w2"}]}'
    rows = rows_of(tmp_path, [text], "pair", word_chat_tokenizer(CHATML), CHAT)
    assert tokens_of(rows) == [[ASSISTANT, 3, 0]]
    assert labels_of(rows) == tokens_of(rows)


def test_prompts_that_are_chats_need_a_template_under_every_task(tmp_path: Path) -> None:
    text = (
        '{"prompt": [{"role": "user", "content": "w1"}], '
        '"completion": [{"role": "assistant", "content": "w2"}]}'
    )
    for encoding in (CHAT, WHOLE_TEXT):
        place = tmp_path / f"of{encoding.name}"
        place.mkdir()
        with pytest.raises(userdp.InputError, match="chat_template = FILE"):
            rows_of(place, [text], "pair", word_chat_tokenizer(None), encoding)


UNSTABLE = {
    "another last turn": (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if loop.last %} w9{% endif %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "an end after all": CHATML + "{% if not add_generation_prompt %} w9{% endif %}",
    "another prompt": CHATML.replace("<|assistant|>{% endif", "<|system|>{% endif"),
    "a program that fails": "{{ messages[0].nothing.more }}",
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_a_template_that_does_not_show_the_turns_is_refused(name: str, tmp_path: Path) -> None:
    talk = chat(("user", "w1"), ("assistant", "w2"))
    tokenizer = word_chat_tokenizer(UNSTABLE[name])
    with pytest.raises(userdp.InputError, match=r"generation %\}"):
        rows_of(tmp_path, [talk], "chat", tokenizer, CHAT)


def test_a_tokenizer_without_a_template_is_refused_before_the_first_step(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [chat(("user", "w1"), ("assistant", "w2"))] * 12, "chat")
    plan = userdp.Plan.sample_users(
        num_users=12,
        expected_cohort_size=4,
        group_size=1,
        steps=2,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    model, tokenizer = models_zoo.gpt2(vocabulary=26), word_chat_tokenizer(None)
    out = tmp_path / "run"
    # Also where every word carries loss: nothing says how this model reads a chat.
    tasks: list[Any] = [None, "chat", "causal"]
    for task in tasks:
        with pytest.raises(userdp.InputError, match="chat_template = FILE"):
            userdp.train(model, tokenizer, store, plan, sequence_length=16, out=out, task=task)
        assert not (out / "ledger.jsonl").exists()


@pytest.mark.parametrize("kind", ["plain", "labelled"])
def test_other_stores_have_no_chats(kind: Any, tmp_path: Path) -> None:
    text = "w1 w2" if kind == "plain" else labelled_json("w1 w2", "a")
    with pytest.raises(userdp.InputError, match="--completion"):
        rows_of(tmp_path, [text], kind, word_chat_tokenizer(CHATML), CHAT)


def test_a_completion_carries_loss_and_its_prompt_does_not(tmp_path: Path) -> None:
    pair = pair_json("w1 w2 ", "w3")
    plainly = rows_of(tmp_path / "a", [pair], "pair", word_chat_tokenizer(None), CHAT)
    assert tokens_of(plainly) == [[2, 3, 4, 0]]
    assert labels_of(plainly) == [[IGNORED_LABEL, IGNORED_LABEL, 4, 0]]
    as_chat = rows_of(tmp_path / "b", [pair], "pair", word_chat_tokenizer(CHATML), CHAT)
    assert tokens_of(as_chat) == [[USER, 2, 3, 0, ASSISTANT, 4, 0]]
    assert labels_of(as_chat) == [[IGNORED_LABEL] * 5 + [4, 0]]


def test_tasks_do_not_share_a_cache(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [chat(("user", "w1"), ("assistant", "w2"))], "chat")
    tokenizer = word_chat_tokenizer(CHATML)
    all_tokens = CausalTask(pad_token=0).encoding
    for encoding in (all_tokens, CHAT, all_tokens, CHAT):
        rows = tokenise(store, tokenizer, sequence_length=16, encoding=encoding, verify=True)
        assert (rows.labelled is None) == (encoding is all_tokens)
    assert len(list((tmp_path / "s" / "tokens").iterdir())) == 2


def test_a_changed_mask_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [chat(("user", "w1"), ("assistant", "w2"))], "chat")
    tokenizer = word_chat_tokenizer(CHATML)
    tokenise(store, tokenizer, sequence_length=16, encoding=CHAT)
    (mask,) = (tmp_path / "s" / "tokens").glob("*/labelled.u8")
    mask.write_bytes(b"\x01" * mask.stat().st_size)
    with pytest.raises(userdp.InputError, match="changed since it was written"):
        tokenise(store, tokenizer, sequence_length=16, encoding=CHAT, verify=True)


def test_labels_that_nobody_asked_to_learn_are_told_of() -> None:
    assert "task = 'classification'" in labels_left_out(None, "labelled")
    assert labels_left_out("causal", "labelled") == ""
    assert labels_left_out(None, "plain") == labels_left_out(None, "chat") == ""


def test_the_usual_task_of_chats_is_the_assistants_turns() -> None:
    kinds: list[Any] = ["plain", "chat", "pair", "labelled"]
    assert [usual_task(kind) for kind in kinds] == ["causal", "chat", "chat", "causal"]


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    name: Any = "regression"
    with pytest.raises(userdp.InputError, match="'masked' or 'classification'"):
        task_named(name, models_zoo.word_tokenizer())


# ---- masked


def test_masked_rows_stand_between_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    task = MaskedTask.of(tokenizer)
    rows = rows_of(
        tmp_path, ["w0 w1 w2 w3 w4", "w5"], "plain", tokenizer, task.encoding, sequence_length=5
    )
    # [CLS] is 2, [SEP] is 3, wN is N + 5. `transformers` cuts the same way.
    assert tokens_of(rows) == [[2, 5, 6, 7, 3], [2, 8, 9, 3], [2, 10, 3]]
    cut = tokenizer("w0 w1 w2 w3 w4", max_length=5, truncation=True, return_overflowing_tokens=True)
    assert tokens_of(rows)[:2] == cut["input_ids"]


@pytest.mark.statistical
def test_fifteen_percent_are_predicted_and_eight_tenths_of_them_hidden(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    task = MaskedTask.of(tokenizer)
    rows = rows_of(tmp_path, ["w0 w1 w2 w3 w4 w5 w6 w7"] * 500, "plain", tokenizer, task.encoding)
    group = np.arange(500)
    tokens, _ = rows.padded(group, pad_token=0)
    batch = task.batch(rows, group, np.random.default_rng(11))
    labels, shown = batch["labels"].numpy(), batch["input_ids"].numpy()
    chosen = labels != IGNORED_LABEL
    assert np.array_equal(labels[chosen], tokens[chosen])
    assert np.array_equal(shown[~chosen], tokens[~chosen])
    assert not chosen[:, [0, -1]].any()

    def is_near(count: int, total: int, share: float) -> bool:
        # Six standard deviations of a binomial: below 1e-8 for all four together.
        return abs(count - share * total) < 6 * (total * share * (1 - share)) ** 0.5

    picked = int(chosen.sum())
    assert is_near(picked, 500 * 8, 0.15)
    hidden = chosen & (shown == tokenizer.mask_token_id)
    same = chosen & (shown == tokens)
    vocabulary = len(tokenizer)
    # A random token may by chance be the mask, or the token itself.
    assert is_near(int(hidden.sum()), picked, 0.8 + 0.1 / vocabulary)
    assert is_near(int(same.sum()), picked, 0.1 + 0.1 / vocabulary)
    assert is_near(int((chosen & ~hidden & ~same).sum()), picked, 0.1 * (1 - 2 / vocabulary))


def test_what_is_hidden_depends_on_the_group_and_its_stream_alone(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    task = MaskedTask.of(tokenizer)
    short, long = "w0 w1 w2", " ".join(["w3"] * 9)
    rows = rows_of(tmp_path, [short, long, short], "plain", tokenizer, task.encoding)
    first, again, other = (
        task.batch(rows, np.array([row]), np.random.default_rng(seed))
        for row, seed in ((0, 1), (2, 1), (0, 3))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    both = task.batch(rows, np.array([0, 1]), np.random.default_rng(1))
    assert both["attention_mask"].tolist() == [[1] * 5 + [0] * 6, [1] * 11]


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    tokenizer = models_zoo.word_tokenizer()
    with pytest.raises(userdp.InputError, match="no mask token"):
        rows_of(tmp_path, ["w1"], "plain", tokenizer, MaskedTask.of(tokenizer).encoding)


def test_rows_without_room_for_text_are_refused(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    with pytest.raises(userdp.InputError, match="no room for text"):
        rows_of(
            tmp_path,
            ["w1"],
            "plain",
            tokenizer,
            MaskedTask.of(tokenizer).encoding,
            sequence_length=2,
        )


# ---- classes


def test_a_record_is_one_row_and_an_unknown_label_none(tmp_path: Path) -> None:
    texts = [
        labelled_json("w0 w1 w2 w3", "bad"),
        labelled_json("w4", "never heard of"),
        labelled_json("w5", ""),
        labelled_json("w6", "good"),
    ]
    task = ClassificationTask(pad_token=0, classes=("good", "bad"))
    rows = rows_of(tmp_path, texts, "labelled", bert_tokenizer(), task.encoding, sequence_length=5)
    assert tokens_of(rows) == [[2, 5, 6, 7, 3], [2, 11, 3]]
    batch = task.batch(rows, np.array([1, 0]), np.random.default_rng(0))
    assert batch["labels"].tolist() == [0, 1]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]


def test_other_class_names_make_other_rows(tmp_path: Path) -> None:
    store = store_of(
        tmp_path / "s", [labelled_json("w0", "a"), labelled_json("w1", "b")], "labelled"
    )
    for names in (("a", "b"), ("b", "a")):
        task = ClassificationTask(pad_token=0, classes=names)
        rows = tokenise(store, bert_tokenizer(), sequence_length=8, encoding=task.encoding)
        assert rows.classes is not None
        assert [names[number] for number in rows.classes] == ["a", "b"]


@pytest.mark.parametrize("classes", [(), ("one",), ("same", "same")])
def test_fewer_than_two_classes_are_refused(classes: tuple[str, ...]) -> None:
    with pytest.raises(userdp.InputError, match="two classes or more"):
        ClassificationTask(pad_token=0, classes=classes)


def test_a_store_without_labels_is_refused(tmp_path: Path) -> None:
    task = ClassificationTask(pad_token=0, classes=("a", "b"))
    with pytest.raises(userdp.InputError, match="--label COLUMN"):
        rows_of(tmp_path, ["w1"], "plain", bert_tokenizer(), task.encoding)


def test_the_text_of_a_labelled_record_can_be_learned_without_its_label(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        [labelled_json("w1 w2", "w9")],
        "labelled",
        models_zoo.word_tokenizer(),
        CausalTask(pad_token=0).encoding,
    )
    assert tokens_of(rows) == [[2, 3, 0]]
