"""What the text of a record holds: plain text, a chat, a prompt and its completion, or a label too.

A store holds one kind only. All kinds but plain text are kept as JSON, so that each tokenizer's own
chat template can write them out later.
"""

from __future__ import annotations

import json
from typing import Any, Literal, cast, get_args

from userdp.errors import InputError

TextKind = Literal["plain", "chat", "pair", "labelled"]
TEXT_KINDS: tuple[TextKind, ...] = get_args(TextKind)
IN_WORDS: dict[TextKind, str] = {
    "plain": "plain text",
    "chat": "chat messages",
    "pair": "prompts with completions",
    "labelled": "labelled texts",
}

Messages = list[dict[str, str]]

# What other programs call the roles that chat templates know.
_ROLES = {"human": "user", "gpt": "assistant"}


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


def said_in(stored: str, kind: TextKind) -> str:
    """What people wrote in a record: of a chat its messages alone, one after the other."""
    messages = chat_of(stored) if kind == "chat" else []
    if kind == "pair":
        for part in pair_of(stored):
            messages += [{"content": part}] if isinstance(part, str) else part
    if messages:
        return "\n\n".join(message["content"] for message in messages)
    return text_of(stored, kind, None)


class RefusedChatError(ValueError):
    """The template does not write this chat, or does not show whose words are whose."""


def template_of(tokenizer: Any) -> str:
    """The template for chats without tools; empty if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        # Several named templates, and none of them is the default.
        return ""


def refuse_unwritten(kind: TextKind, tokenizer: Any) -> None:
    """Refuse chats if the tokenizer has no template: nothing says how this model reads them."""
    if kind == "chat" and not template_of(tokenizer):
        raise InputError(
            "the store holds chats, and the tokenizer has no chat template to write them out. Give "
            "one in a file, [data] chat_template = FILE (Python: tokenizer.chat_template), or a "
            "tokenizer that has one; or import another column, of plain text."
        )


def with_known_roles(messages: Messages) -> Messages:
    """The chat with the roles that templates know."""
    return [{**one, "role": _ROLES.get(one["role"], one["role"])} for one in messages]


def written_out(messages: Messages, tokenizer: Any) -> str:
    """A chat as the tokenizer's template writes it, and never in another way.

    Raises `RefusedChatError` if the template refuses the chat, for instance one that begins with
    the wrong role.
    """
    try:
        return tokenizer.apply_chat_template(with_known_roles(messages), tokenize=False)
    except Exception as error:
        # A template is a program, so anything can go wrong in it. Its message may quote the chat.
        raise RefusedChatError("the template refuses the chat") from error
