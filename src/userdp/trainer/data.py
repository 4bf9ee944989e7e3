"""From the datasets of a `Trainer` to user stores, and to what is learned from a record.

The training users' records are kept in `DATA/store`, under a key in `DATA/secret`. The people to
measure on are hidden under the same key, so that somebody who is in both is found.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from userdp.data.identity import key_beside
from userdp.data.store import UserStore
from userdp.durable import OWNER_ONLY_DIRECTORY
from userdp.errors import InputError

# Whom the rows of a dataset belong to that is declared to have none of the training users.
NOBODY_HERE = "somebody else"

Formatting = Callable[[dict[str, Any]], str]


def task_for(columns: list[str], args: Any) -> tuple[str, str]:
    """Which column (or template of columns) is learned, and by which task of `userdp.tasks`.

    The order is that of TRL: prompts with completions, chats, texts. As there, every token of a
    chat carries loss unless `assistant_only_loss` is set.
    """
    text = getattr(args, "dataset_text_field", "text")
    if "prompt" in columns and "completion" in columns:
        if getattr(args, "completion_only_loss", None) is not False:
            raise InputError(
                "prompts with completions carry loss on the completions alone, which is not in "
                "this version: set completion_only_loss=False, or join both in a column of texts."
            )
        return "{prompt}{completion}", "causal"
    for name in ("messages", "conversations"):
        if name in columns:
            if getattr(args, "assistant_only_loss", False):
                raise InputError(
                    "assistant_only_loss=True is not in this version: leave it out, and every "
                    "token of a chat carries loss."
                )
            return name, "causal"
    if text in columns:
        return text, "causal"
    raise InputError(
        f"train_dataset has none of the columns {text!r}, 'messages', or 'prompt' and "
        "'completion': name the column of texts with dataset_text_field, or give formatting_func."
    )


def columns_of(dataset: Any) -> list[str]:
    """The names of a dataset's columns."""
    named: Any = getattr(dataset, "column_names", getattr(dataset, "columns", None))
    if isinstance(dataset, list):
        named = list(dict.fromkeys(name for row in dataset for name in row))
    if named is None or isinstance(named, dict):
        raise InputError(
            f"the columns of this {type(dataset).__name__} are not known: give one split of a "
            "datasets.Dataset, a pandas DataFrame, a pyarrow Table, a list of dicts, or a "
            "UserStore."
        )
    return [str(name) for name in named]


def training_store(
    dataset: Any, args: Any, *, user: str, place: Path, formatting: Formatting | None
) -> UserStore:
    """The store of the training users at `place`; the one that is there if it holds the same data.

    What is spent on these people is counted beside the store, so a store is never replaced.
    """
    place.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    if not place.exists():
        return _imported(dataset, args, user, place, key_beside(place), formatting)
    again = place.with_name(f".{place.name}.again")
    shutil.rmtree(again, ignore_errors=True)
    try:
        new = _imported(dataset, args, user, again, key_beside(place), formatting)
        kept = UserStore.open(place)
        if new.fingerprint != kept.fingerprint:
            raise InputError(
                f"{place} holds other records than train_dataset: choose another output_dir, or "
                "another store=."
            )
    finally:
        shutil.rmtree(again, ignore_errors=True)
    return kept


def evaluation_store(
    dataset: Any,
    args: Any,
    training: UserStore,
    *,
    user: str,
    is_public: bool,
    formatting: Formatting | None,
) -> UserStore:
    """A temporary store of the people to measure on. Training users among them are refused.

    A loss on training users is not covered by the guarantee. `is_public` declares that there are
    none, where that cannot be compared.
    """
    if isinstance(dataset, UserStore):
        store = dataset
    elif user in columns_of(dataset):
        key = key_beside(training.path)
        shared_key = key if key.is_file() else None
        store = _imported(dataset, args, user, None, shared_key, formatting)
    elif is_public:
        rows = ({**row, user: NOBODY_HERE} for row in dataset)
        choice, _ = task_for(columns_of(dataset), args)
        return UserStore.from_dataset(rows, user=user, text=choice)
    else:
        raise InputError(
            f"eval_dataset has no column {user!r}, so nobody can tell whether training users are "
            "in it: add the column, or declare eval_is_public=True."
        )
    shared = training.shares_users_with(store)
    if shared or (shared is None and not is_public):
        found = "hides its users under another key" if shared is None else "has training users"
        raise InputError(
            f"eval_dataset {found}: a loss on training users is not covered by the guarantee. "
            "Measure on other people; where ids cannot be compared, declare eval_is_public=True."
        )
    return store


def _imported(
    dataset: Any,
    args: Any,
    user: str,
    place: Path | None,
    key: Path | None,
    formatting: Formatting | None,
) -> UserStore:
    if formatting is not None:
        rows = _formatted(dataset, user, formatting)
        return UserStore.from_dataset(rows, place, user=user, text="text", key=key)
    choice, _ = task_for(columns_of(dataset), args)
    return UserStore.from_dataset(dataset, place, user=user, text=choice, key=key)


def _formatted(dataset: Any, user: str, formatting: Formatting) -> Iterator[dict[str, Any]]:
    """Each record alone becomes a text, so no user's record changes another's."""
    for row in dataset:
        text = formatting(row)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("formatting_func must return one string for one record.")
        yield {user: row.get(user), "text": text}
