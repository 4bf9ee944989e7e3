"""The tokens of a chat, and which of them the assistant wrote.

A chat template may mark the assistant's words with `{% generation %}`; `transformers` then says
which tokens they are. Without marks, the template writes the chat up to each of the assistant's
turns: once as a prompt for that turn, and once with the turn. If the first text is the beginning of
the second, and the second that of the whole chat, what lies between is the turn. A template for
which this fails is refused.

Of a chat the first `MOST_MESSAGES` messages are read. The chat is written anew for each of the
assistant's turns, so a user with one endless chat could hold up the run for everybody.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any

from userdp.data.contents import (
    Messages,
    RefusedChatError,
    refuse_unwritten,
    template_of,
    with_known_roles,
)
from userdp.errors import InputError

ASSISTANT = "assistant"
MOST_MESSAGES = 500
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Every template takes such a chat.
_MADE_UP: Messages = [
    {"role": role, "content": content}
    for role, content in (("user", "a"), (ASSISTANT, "b"), ("user", "c"), (ASSISTANT, "d"))
]

Tokens = tuple[list[int], list[bool]]


def check_template(tokenizer: Any) -> None:
    """Raise `InputError` if the tokenizer cannot say which words are the assistant's."""
    refuse_unwritten("chat", tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "task = 'chat' needs a fast tokenizer (tokenizer.json): others do not say where in the "
            "text a token lies. Save the tokenizer as a fast one."
        )
    try:
        _, labelled = chat_tokens(_MADE_UP, tokenizer)
    except RefusedChatError as error:
        raise InputError(
            f"the chat template does not show which words are the assistant's ({error}). Put them "
            "between {% generation %} and {% endgeneration %}, and give the template as [data] "
            "chat_template = FILE."
        ) from error
    if not any(labelled):
        raise InputError(
            "the chat template gives the assistant no word in a made-up chat. Put its words "
            "between {% generation %} and {% endgeneration %} in the template."
        )


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer can write out a chat."""
    return bool(template_of(tokenizer))


def chat_tokens(messages: Messages, tokenizer: Any) -> Tokens:
    """The tokens of a chat, and for each whether it is part of what the assistant wrote.

    Raises `RefusedChatError` if the template refuses the chat.
    """
    known = with_known_roles(messages[:MOST_MESSAGES])
    try:
        if _MARK.search(template_of(tokenizer)):
            return _marked(known, tokenizer)
        return _by_prefixes(known, tokenizer)
    except RefusedChatError:
        raise
    except Exception as error:
        # A template is a program, so anything can go wrong in it. Its message may quote the chat.
        raise RefusedChatError("the template refuses the chat") from error


def _marked(messages: Messages, tokenizer: Any) -> Tokens:
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]


def _by_prefixes(messages: Messages, tokenizer: Any) -> Tokens:
    def written(number: int, *, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages[:number], tokenize=False, add_generation_prompt=prompt
        )

    whole = written(len(messages))
    turns: list[tuple[int, int]] = []
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = written(place, prompt=True), written(place + 1)
        is_next = not turns or turns[-1][1] <= len(before)
        if not (is_next and after.startswith(before) and whole.startswith(after)):
            raise RefusedChatError("the beginning of a chat is written otherwise than in the whole")
        turns.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places: Sequence[tuple[int, int]] = encoded["offset_mapping"]
    begins, ends = [begin for begin, _ in turns], [end for _, end in turns]
    labelled: list[bool] = []
    for start, end in places:
        turn = bisect.bisect_right(ends, start)
        # A token that begins in the template's prompt and ends in the turn counts, as in
        # `transformers`.
        labelled.append(turn < len(turns) and begins[turn] < end)
    return list(encoded["input_ids"]), labelled


def pair_tokens(prompt: str, completion: str, tokenizer: Any) -> Tokens:
    """The tokens of a prompt with its completion, which ends the text and alone carries loss.

    With a chat template they are a chat of two messages. Without one they are one text, and the
    completion begins where its tokens part from those of the prompt alone, as in TRL.
    """
    if has_template(tokenizer):
        messages = [("user", prompt), (ASSISTANT, completion)]
        return chat_tokens(
            [{"role": role, "content": content} for role, content in messages], tokenizer
        )
    end: str = tokenizer.eos_token
    closed = completion if completion.endswith(end) else completion + end
    tokens: list[int] = tokenizer(prompt + closed, verbose=False)["input_ids"]
    return _after(tokenizer(prompt, verbose=False)["input_ids"], tokens)


def chat_pair_tokens(prompt: Messages, completion: Messages, tokenizer: Any) -> Tokens:
    """The tokens of a chat that completes another, and for each whether it is learned, as in TRL.

    What the template writes after the prompt, which ends with the beginning of the next turn,
    carries loss: the whole completion.
    """
    if not has_template(tokenizer):
        raise RefusedChatError("there is no template to write the chat")
    known = with_known_roles(prompt + completion)
    try:
        alone, tokens = (
            tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, add_generation_prompt=is_prompt
            )["input_ids"]
            # Nothing is written for a prompt without a message.
            if messages
            else []
            for messages, is_prompt in ((known[: len(prompt)], True), (known, False))
        )
    except Exception as error:
        raise RefusedChatError("the template refuses the chat") from error
    return _after(alone, tokens)


def _after(prompt: Sequence[int], tokens: Sequence[int]) -> Tokens:
    """The tokens, and which of them come after they part from those of the prompt."""
    shared = 0
    while shared < min(len(prompt), len(tokens)) and prompt[shared] == tokens[shared]:
        shared += 1
    return list(tokens), [place >= shared for place in range(len(tokens))]
