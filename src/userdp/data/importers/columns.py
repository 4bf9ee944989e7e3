"""Which columns hold the owners, the text and the time, and what a cell may be.

The caller names a column, or builds it from several by a template such as
`{title}\\n\\n{body}`. Otherwise the one well-known name that occurs is taken. Where two occur, no
choice is made: otherwise one user's record could choose the column for everybody. Chats, which are
lists of {role, content}, are kept as JSON, so that each model's own chat template can render them.
So are prompts with their completions, and texts with their labels.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from userdp.data.contents import TextKind, chat_pair_json, labelled_json, pair_json
from userdp.data.identity import trimmed
from userdp.errors import InputError

USER_COLUMNS = ("users", "user", "user_id", "author", "author_id", "owner", "speaker")
TEXT_COLUMNS = ("text", "body", "content", "message", "messages", "conversations")
# Where there is no column of text, these two together are one.
PAIR_COLUMNS = ("prompt", "completion")

MAX_SECONDS = 2**62

# What a column's name looks like, and how many of them a message lists.
COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}")
MOST_SHOWN = 20

PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The caller's choice of columns: names or templates. None means well-known names.

    With `completion`, the text is the prompt that it completes. With `label`, every text has a
    class. `rivals` are the well-known names that were not taken. A record that has one is refused.
    """

    user: str | None = None
    text: str | None = None
    time: str | None = None
    completion: str | None = None
    label: str | None = None
    rivals: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.completion is not None and self.label is not None:
            raise InputError("--completion and --label exclude each other: leave one out.")

    @property
    def text_kind(self) -> TextKind:
        """What records hold, unless their text column holds chats."""
        if self.completion is not None:
            return "pair"
        return "plain" if self.label is None else "labelled"

    @property
    def chosen(self) -> list[str]:
        """Every choice that was made."""
        choices = (self.user, self.text, self.time, self.completion, self.label)
        return [choice for choice in choices if choice is not None]

    def named(self) -> tuple[str, str]:
        """The user and the text column, once resolved."""
        assert self.user is not None
        assert self.text is not None
        return self.user, self.text

    def resolved(self, available: Collection[str], where: str) -> Columns:
        """The same with every choice made from the available columns."""
        chosen = self.resolved_if_found(available, where)
        for what, choice, known in (
            ("user", chosen.user, USER_COLUMNS),
            ("text", chosen.text, TEXT_COLUMNS),
        ):
            if choice is None:
                raise InputError(
                    f"{where}: no {what} column among {', '.join(known)}. {there(available)} Name "
                    f"the right one with --{what}."
                )
        return chosen

    def resolved_if_found(self, available: Collection[str], where: str) -> Columns:
        """The same with each choice made for which a column is available."""
        user = _resolve(self.user, available, USER_COLUMNS, "user", where)
        text = _resolve(self.text, available, TEXT_COLUMNS, "text", where)
        completion, rivals = self.completion, self.rivals
        if text is None and completion is None and set(PAIR_COLUMNS) <= set(available):
            text, completion = PAIR_COLUMNS
        if self.user is None and user is not None:
            rivals = rivals.union(USER_COLUMNS) - {user}
        if self.text is None and text is not None:
            rivals = rivals.union(TEXT_COLUMNS) - {text}
        return replace(self, user=user, text=text, completion=completion, rivals=rivals)

    def check_rivals(self, fields: dict[str, Any], where: str) -> None:
        """Refuse a record with a second column that could hold its owners or its text."""
        for name in sorted(self.rivals.intersection(fields)):
            if fields[name] is not None:
                user, text = self.named()
                if name in USER_COLUMNS:
                    raise _ambiguous([user, name], "user", where)
                raise _ambiguous([text, name], "text", where)


def _resolve(
    choice: str | None, available: Collection[str], known: tuple[str, ...], what: str, where: str
) -> str | None:
    if choice is None:
        found = [name for name in known if name in available]
        if len(found) > 1:
            raise _ambiguous(found, what, where)
        return found[0] if found else None
    # The reader judges whether a column is missing: lines of JSON Lines may lack a field.
    return choice.replace("\\n", "\n").replace("\\t", "\t") if is_template(choice) else choice


def no_column(name: str, available: Collection[str], where: str) -> InputError:
    """The error for a column that the caller named and that is not there."""
    close = difflib.get_close_matches(name, _shown(available), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return InputError(f"{where}: there is no column {name!r}. {there(available)}{hint}")


def there(available: Collection[str]) -> str:
    """Which columns there are, in a sentence.

    Where the header is missing, a line of people's text stands in its place. So a name is told only
    if all of them look like names: short words without blanks.

    >>> there(["author", "posted"]), there(["author", "I saw you yesterday"])
    ('The columns are author, posted.', 'There are 2 columns, not all of them with a name.')
    """
    names = _shown(available)
    if names:
        return f"The columns are {', '.join(names)}."
    return f"There are {len(available)} columns, not all of them with a name."


def _shown(available: Collection[str]) -> list[str]:
    names = list(available)
    plain = all(COLUMN_NAME.fullmatch(name) for name in names)
    return names if plain and len(names) <= MOST_SHOWN else []


def _ambiguous(names: list[str], what: str, where: str) -> InputError:
    return InputError(
        f"{where}: {' and '.join(map(repr, names))} are in this source, and each could be the "
        f"{what} column. Name the right one with --{what} COLUMN."
    )


def is_template(choice: str) -> bool:
    """Whether the choice is a template over columns.

    >>> is_template("{title}: {body}"), is_template("body")
    (True, False)
    """
    return PLACEHOLDER.search(choice) is not None


def parts_of(template: str) -> list[tuple[bool, str]]:
    """The template as (is a column, name or literal) in order.

    >>> parts_of("{play}/{speaker}")
    [(True, 'play'), (False, '/'), (True, 'speaker')]
    """
    pieces = PLACEHOLDER.split(template)
    return [(i % 2 == 1, piece) for i, piece in enumerate(pieces) if piece]


def names_in(choice: str) -> list[str]:
    """The columns a choice needs."""
    if not is_template(choice):
        return [choice]
    return list(dict.fromkeys(name for is_column, name in parts_of(choice) if is_column))


def text_of(fields: dict[str, Any], choice: str, where: str, *, chat: bool = False) -> str:
    """The text of a record. Missing parts of a template are empty.

    With `chat` every text must be a list of messages, and otherwise none: a store holds one kind.
    """
    if is_template(choice):
        return "".join(
            _part(fields.get(piece), piece, where) if is_column else piece
            for is_column, piece in parts_of(choice)
        )
    value = fields.get(choice)
    if chat and isinstance(value, list):
        return chat_json(cast(list[Any], value), choice, where)
    if chat or not isinstance(value, str):
        kind = "a list of chat messages" if chat else "a string"
        raise InputError(f"{where}: field {choice!r} is missing or not {kind}.")
    return checked(value, choice, where)


def content_of(fields: dict[str, Any], columns: Columns, where: str, *, chat: bool = False) -> str:
    """What is kept of a record: its text, and its completion or its label if it has one."""
    _, text = columns.named()
    found = text_of(fields, text, where, chat=chat)
    if chat and columns.label is not None:
        raise InputError(
            f"{where}: field {text!r} is a list of chat messages, so it takes no --label. Write "
            "each chat out as one text beforehand."
        )
    if columns.completion is not None:
        completion = text_of(fields, columns.completion, where, chat=chat)
        return chat_pair_json(found, completion) if chat else pair_json(found, completion)
    if columns.label is not None:
        return labelled_json(found, _part(fields.get(columns.label), columns.label, where))
    return found


def _part(value: Any, name: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{where}: field {name!r} is not a string or a number.")
    return checked(str(value), name, where)


def checked(value: str, name: str, where: str) -> str:
    """The value itself. Refused if no text file could hold it."""
    if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InputError(f"{where}: field {name!r} contains a NUL or a lone surrogate.")
    return value


def chat_json(messages: list[Any], name: str, where: str) -> str:
    """Chat messages in one canonical spelling: a JSON list of {role, content}.

    >>> chat_json([{"role": "user", "content": "hi", "id": 7}], "messages", "line 1")
    '[{"role": "user", "content": "hi"}]'
    """
    refuse_strings(messages, name, where)
    kept: list[dict[str, str]] = []
    for message in messages:
        fields: dict[str, Any] = message if isinstance(message, dict) else {}
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(
                f"{where}: field {name!r} is a list, so it must be chat messages, each with a "
                "'role' and a 'content' string."
            )
        kept.append({"role": checked(role, name, where), "content": checked(content, name, where)})
    if not any(message["content"].strip() for message in kept):
        return ""
    return json.dumps(kept, ensure_ascii=False)


def refuse_strings(value: list[Any], name: str, where: str) -> None:
    """Refuse a list of strings in the place of a text: it is no chat, either."""
    if value and all(isinstance(one, str) for one in value):
        raise InputError(
            f"{where}: field {name!r} is a list of strings, and a record is one text or one chat. "
            "Join the strings to one text, or give each a record of its own."
        )


def owners_of(fields: dict[str, Any], choice: str, where: str) -> tuple[str, ...]:
    """The owners as strings, or none at all if any of them is missing."""
    if is_template(choice):
        if any(is_blank(fields.get(name)) for name in names_in(choice)):
            return ()
        return (
            "".join(
                trimmed(id_of(fields.get(piece), piece, where)) if is_column else piece
                for is_column, piece in parts_of(choice)
            ),
        )
    value: Any = fields.get(choice)
    entries = cast(list[Any], value if isinstance(value, list) else [value])
    if not entries or any(is_blank(entry) for entry in entries):
        return ()
    return tuple(id_of(entry, choice, where) for entry in entries)


def is_blank(value: Any) -> bool:
    """Whether an id is missing: null, or nothing that can be seen."""
    return value is None or (isinstance(value, str) and not trimmed(value))


def id_of(value: Any, name: str, where: str) -> str:
    """An id as a string. A float such as 1.0 is refused, because it may not mean user 1."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(
            f"{where}: field {name!r} must hold user ids as strings or whole numbers, not "
            f"{type(value).__name__}."
        )
    return checked(str(value), name, where)


@dataclass(frozen=True)
class FromCells:
    """Decodes the fast readers' ids: a JSON list of the cells that `template` needs, in order.

    They go through `owners_of`, as with the careful reader. ValueError if a cell is blank, or no
    string or whole number.

    >>> FromCells("{site}/{id}")('["so ", 7]')
    'so/7'
    """

    template: str

    def __call__(self, cell: str) -> str:
        """The id that the template makes of the cells."""
        fields = dict(zip(names_in(self.template), json.loads(cell), strict=True))
        owners = self.owners(fields)
        if not owners:
            raise ValueError("blank")
        return owners[0]

    def owners(self, fields: dict[str, Any]) -> tuple[str, ...]:
        """The owner, or none if a cell is blank."""
        return owners_of(fields, self.template, "")


def seconds_of(value: Any, name: str, where: str) -> int | None:
    """A time as seconds since 1970 UTC: ISO 8601, a year, or Unix seconds.

    >>> seconds_of("1970-01-02", "date", "line 1"), seconds_of(1971, "year", "line 1")
    (86400, 31536000)
    """
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 1000 <= value <= 9999:
            return int(datetime(int(value), 1, 1, tzinfo=UTC).timestamp())
        # An infinite number, or one that is no number, fails here too.
        if abs(value) < MAX_SECONDS:
            return int(value)
    if isinstance(value, datetime):
        return int((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())
    if isinstance(value, str):
        if value.isdecimal() and len(value) < 20:
            return seconds_of(int(value), name, where)
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    raise InputError(f"{where}: field {name!r} is no time: give ISO 8601, a year or Unix seconds.")
