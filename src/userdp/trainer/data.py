"""From the datasets of a `Trainer` to user stores, and to what is learned from a record.

The training users' records are kept in `DATA/store`, under a key in `DATA/secret`. The people to
measure on are hidden under the same key, so that somebody who is in both is found.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from userdp.data.identity import key_beside
from userdp.data.store import UserStore
from userdp.durable import OWNER_ONLY_DIRECTORY
from userdp.earlier import Earlier
from userdp.errors import InputError
from userdp.history import Module, history_of
from userdp.run_files import overlap
from userdp.task_names import TaskName

# The folder below `output_dir` that is for the owner alone.
PRIVATE = "userdp"

# Whom the rows of a dataset belong to that is declared to have none of the training users.
NOBODY_HERE = "somebody else"

Formatting = Callable[[dict[str, Any]], str]


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Which column, or template of columns, is learned; `completion` is learned after `text`."""

    text: str
    completion: str | None = None


def learned_columns(columns: list[str], args: Any) -> Learned:
    """What of a dataset is learned. The order is that of TRL: completions, chats, texts."""
    text = getattr(args, "dataset_text_field", "text")
    if "prompt" in columns and "completion" in columns:
        if getattr(args, "completion_only_loss", None) is False:
            return Learned(text="{prompt}{completion}")
        return Learned(text="prompt", completion="completion")
    for name in ("messages", "conversations", text):
        if name in columns:
            return Learned(text=name)
    raise InputError(
        f"train_dataset has none of the columns {text!r}, 'messages', or 'prompt' and "
        "'completion': name the column of texts with dataset_text_field, or give formatting_func."
    )


def task_of(store: UserStore, args: Any) -> TaskName:
    """Which tokens carry loss, as in TRL: completions alone, but all of a chat unless told so."""
    if store.text_kind == "pair":
        return "chat"
    is_chat = store.text_kind == "chat" and getattr(args, "assistant_only_loss", False)
    return "chat" if is_chat else "causal"


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
        # The fingerprint names users by their numbers: other people may have the same records.
        is_same = new.pseudonyms.to_pylist() == kept.pseudonyms.to_pylist()
        if new.fingerprint != kept.fingerprint or not is_same:
            raise InputError(
                f"{place} holds other records than train_dataset, or other users' records: choose "
                "another output_dir, or another store=."
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
    earlier: Sequence[Earlier],
    homes: Sequence[Path],
) -> UserStore:
    """A temporary store of the people to measure on. Training users among them are refused.

    A loss on training users is not covered by the guarantee, be they users of this run or of the
    `earlier` ones behind the weights, whose lists of users lie in `homes`. `is_public` declares
    that there are none, where that cannot be compared.
    """
    if isinstance(dataset, UserStore):
        store = dataset
    elif user in columns_of(dataset):
        key = key_beside(training.path)
        shared_key = key if key.is_file() else None
        store = _imported(dataset, args, user, None, shared_key, formatting)
    elif is_public:
        rows = ({**row, user: NOBODY_HERE} for row in dataset)
        chosen = learned_columns(columns_of(dataset), args)
        return UserStore.from_dataset(
            rows, user=user, text=chosen.text, completion=chosen.completion
        )
    else:
        raise InputError(
            f"eval_dataset has no column {user!r}, so nobody can tell whether training users are "
            "in it: add the column, or declare eval_is_public=True."
        )
    shared = training.shares_users_with(store)
    before = overlap(store, {item.run: 1 for item in earlier}, homes)
    is_known = shared is not None and before.is_known
    if shared or before.shared or not (is_known or is_public):
        found = "cannot be compared with the users of an earlier run behind the model"
        if shared or before.shared:
            found = "has training users" + " of an earlier run behind the model" * (not shared)
        elif shared is None:
            found = "hides its users under another key"
        raise InputError(
            f"eval_dataset {found}: a loss on training users is not covered by the guarantee. "
            "Measure on other people; where ids cannot be compared, declare eval_is_public=True."
        )
    return store


def homes_of(model: Module) -> tuple[Path, ...]:
    """Where lists of the users of runs behind the model may lie, those of trainers among them."""
    found = history_of(model)
    # A trainer's model lies in its output_dir, or in output_dir/checkpoint-N.
    outs = [out for place in found.loaded for out in (place, place.parent)]
    return (*found.homes, *(out / PRIVATE / "run" for out in outs))


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
    chosen = learned_columns(columns_of(dataset), args)
    return UserStore.from_dataset(
        dataset, place, user=user, text=chosen.text, completion=chosen.completion, key=key
    )


def _formatted(dataset: Any, user: str, formatting: Formatting) -> Iterator[dict[str, Any]]:
    """Each record alone becomes a text, so no user's record changes another's."""
    for row in dataset:
        text = formatting(row)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("formatting_func must return one string for one record.")
        yield {user: row.get(user), "text": text}
