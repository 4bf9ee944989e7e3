"""What the text of a record holds: plain text, a chat, a prompt and its completion, or a label too.

A store holds one kind only. All kinds but plain text are kept as JSON, so that each tokenizer's own
chat template can write them out later.
"""

from __future__ import annotations

import json
from typing import Any, Literal, cast, get_args

import jinja2

TextKind = Literal["plain", "chat", "pair", "labelled"]
TEXT_KINDS: tuple[TextKind, ...] = get_args(TextKind)
IN_WORDS: dict[TextKind, str] = {
    "plain": "plain text",
    "chat": "chat messages",
    "pair": "prompts with completions",
    "labelled": "labelled texts",
}

Messages = list[dict[str, str]]


def pair_json(prompt: str, completion: str) -> str:
    """A prompt and its completion as the text of a record; empty if the completion is blank.

    >>> pair_json("2 + 2 =", " 4")
    '{"prompt": "2 + 2 =", "completion": " 4"}'
    """
    if not completion.strip():
        return ""
    return json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False)


def chat_pair_json(prompt: str, completion: str) -> str:
    """The same where both are chats in their canonical spelling (`chat_json`).

    >>> chat_pair_json('[{"role": "user", "content": "hi"}]', "")
    ''
    """
    if not completion:
        return ""
    return f'{{"prompt": {prompt or "[]"}, "completion": {completion}}}'


def labelled_json(text: str, label: str) -> str:
    """A text and its label as the text of a record; empty if the text is blank."""
    if not text.strip():
        return ""
    return json.dumps({"text": text, "label": label}, ensure_ascii=False)


def chat_of(stored: str) -> Messages:
    """The messages of a stored chat."""
    return json.loads(stored)


def pair_of(stored: str) -> tuple[str, str] | tuple[Messages, Messages]:
    """Prompt and completion of a stored pair: two texts, or two chats."""
    fields: dict[str, Any] = json.loads(stored)
    return fields["prompt"], fields["completion"]


def label_of(stored: str) -> str:
    """The label of a stored text."""
    fields: dict[str, str] = json.loads(stored)
    return fields["label"]


def text_of(stored: str, kind: TextKind, tokenizer: Any) -> str:
    """The words of a record in one piece. A chat is written out as `written_out` does."""
    if kind == "chat":
        return written_out(chat_of(stored), tokenizer)
    if kind == "pair":
        prompt, completion = pair_of(stored)
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        return written_out([*prompt, *cast(Messages, completion)], tokenizer)
    if kind == "labelled":
        fields: dict[str, str] = json.loads(stored)
        return fields["text"]
    return stored


def written_out(messages: Messages, tokenizer: Any) -> str:
    """A chat as the tokenizer's template writes it, or as plain text if it has none.

    A template may refuse a chat, for instance one that begins with the wrong role. That chat is
    plain text too: one user's record must not end the run of all. Where only the assistant's turns
    carry loss, chats are not written out in this way (`tasks.chat`).
    """
    if getattr(tokenizer, "chat_template", None):
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError):
            pass
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
