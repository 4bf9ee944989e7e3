"""From the datasets of a `Trainer` to user stores, and to what is learned from a record.

The training users' records are kept in `DATA/store`, under a key in `DATA/secret`. The people to
measure on are hidden under the same key, so that somebody who is in both is found.
"""

from __future__ import annotations

import numbers
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from userdp.data.identity import key_beside
from userdp.data.importers.arrow import refuse_transform
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_DIRECTORY, write_file
from userdp.history import Module, history_of
from userdp.names.tasks import TaskName
from userdp.prices.earlier import Earlier
from userdp.runs.files import TRAINER_RUN, overlap

# The folder below `output_dir` that is for the owner alone.
PRIVATE = TRAINER_RUN.parent.name

# The owner of all rows of a dataset that is declared to have none of the training users.
NOBODY_HERE = "somebody else"

Formatting = Callable[[dict[str, Any]], str]
LABELS = ("label", "labels")
PAIR = ("prompt", "completion")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Which column, or template of columns, is learned; `completion` is learned after `text`.

    Of classified texts `label` is the column of classes.
    """

    text: str
    completion: str | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How datasets are read: what the arguments and the task say of their columns.

    `classes` are the names of the model's classes, which datasets may give by their numbers.
    """

    args: Any
    user: str
    formatting: Formatting | None = None
    task: TaskName | None = None
    classes: Sequence[str] = ()

    def learned(self, columns: list[str]) -> Learned:
        """What of a dataset is learned."""
        if self.task == "classification":
            return self._classified(columns)
        if self.formatting is not None:
            return Learned(text="text")
        return learned_columns(columns, self.args)

    def _classified(self, columns: list[str]) -> Learned:
        text = getattr(self.args, "dataset_text_field", "text")
        label = _only_one([name for name in LABELS if name in columns], "the label")
        if label is None or (text not in columns and self.formatting is None):
            raise InputError(
                f"task='classification': the dataset needs a column {text!r} and a column 'label' "
                "with the name or the number of one of the model's classes."
            )
        return Learned(text="text" if self.formatting else text, label=label)

    def rows(self, dataset: Any, learned: Learned) -> Any:
        """The dataset, or its rows with what is learned of them where that must be made first."""
        if self.formatting is None and learned.label is None:
            return dataset
        return self._made(dataset, learned)

    def _made(self, dataset: Any, learned: Learned) -> Iterator[dict[str, Any]]:
        """Each record alone becomes a text, so no user's record changes another's."""
        for row in _rows_of(dataset):
            text = row.get(learned.text) if self.formatting is None else self.formatting(row)
            if self.formatting is not None and not isinstance(text, str):
                raise InputError("formatting_func must return one string for one record.")
            made = {self.user: row.get(self.user), learned.text: text}
            if learned.label is not None:
                made[learned.label] = self._named(row.get(learned.label))
            yield made

    def _named(self, label: Any) -> str | None:
        """The name of a record's class. Any other label becomes a text, which is no class.

        All labels are texts then: a column of several kinds would end the import for everybody.
        One missing label turns a column of a data frame into floats, so 1.0 means 1.
        """
        is_number = isinstance(label, numbers.Real) and not isinstance(label, bool)
        if is_number and label in range(len(self.classes)):
            return self.classes[int(float(label))]
        try:
            return None if label is None else str(label).encode(errors="replace").decode()
        except ValueError:
            # A number of thousands of digits is not written out.
            return ""


def learned_columns(columns: list[str], args: Any) -> Learned:
    """What of a dataset is learned: its pairs, its chats or its texts."""
    text = getattr(args, "dataset_text_field", "text")
    names = dict.fromkeys(("messages", "conversations", text))
    forms = {repr(name): Learned(text=name) for name in names if name in columns}
    if set(PAIR) <= set(columns):
        forms["'prompt' and 'completion'"] = Learned(text=PAIR[0], completion=PAIR[1])
    found = _only_one(list(forms), "what is learned")
    if found is None:
        raise InputError(
            f"the dataset has none of the columns {text!r}, 'messages', or 'prompt' and "
            "'completion': name the column of texts with dataset_text_field, or give "
            "formatting_func."
        )
    return forms[found]


def _only_one(found: list[str], what: str) -> str | None:
    """The one that was found. Of several none is chosen, because one record may have brought it.

    That holds for declared columns, too: whoever reads a file of JSON declares what occurs in it.
    """
    if len(found) > 1:
        raise InputError(
            f"the dataset has the columns {' and '.join(found)}, and each could be {what}: keep "
            "those that you mean, as with dataset.select_columns, so that no single record decides."
        )
    return found[0] if found else None


def task_of(store: UserStore, args: Any) -> TaskName:
    """Which tokens carry loss, as in TRL: completions alone, but all of a chat unless told so."""
    if store.text_kind == "pair":
        return "causal" if getattr(args, "completion_only_loss", None) is False else "chat"
    is_chat = store.text_kind == "chat" and getattr(args, "assistant_only_loss", False)
    return "chat" if is_chat else "causal"


def hide_private_files(out: Path) -> None:
    """Make the folder for the owner alone, and keep it out of commits and uploads."""
    (out / PRIVATE).mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    ignored = out / ".gitignore"
    lines = ignored.read_text().splitlines() if ignored.is_file() else []
    if f"/{PRIVATE}/" not in lines:
        write_file(ignored, "".join(f"{line}\n" for line in [*lines, f"/{PRIVATE}/"]).encode())


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


def training_store(dataset: Any, reading: Reading, place: Path) -> UserStore:
    """The store of the training users at `place`; the one that is there if it holds the same data.

    What is spent on these people is counted beside the store, so a store is never replaced.
    """
    place.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    if not place.exists():
        return _imported(dataset, reading, place, key_beside(place))
    again = place.with_name(f".{place.name}.again")
    shutil.rmtree(again, ignore_errors=True)
    try:
        new = _imported(dataset, reading, again, key_beside(place))
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
    reading: Reading,
    training: UserStore,
    *,
    is_public: bool,
    earlier: Sequence[Earlier],
    homes: Sequence[Path],
) -> UserStore:
    """A temporary store of the people to measure on. Training users among them are refused.

    A loss on training users is not covered by the guarantee, neither on users of this run nor on
    those of the `earlier` ones behind the weights, whose lists of users lie in `homes`. `is_public`
    declares that there are none, where that cannot be compared.
    """
    if isinstance(dataset, UserStore):
        store = dataset
    elif reading.user in columns_of(dataset):
        key = key_beside(training.path)
        store = _imported(dataset, reading, None, key if key.is_file() else None)
    elif is_public:
        rows = ({**row, reading.user: NOBODY_HERE} for row in _rows_of(dataset))
        learned = reading.learned(columns_of(dataset))
        return _store_of(reading.rows(rows, learned), reading, learned, None, None)
    else:
        raise InputError(
            f"eval_dataset has no column {reading.user!r}, so nobody can tell whether training "
            "users are in it: add the column, or declare eval_is_public=True."
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
    return (*found.homes, *(out / TRAINER_RUN for out in outs))


def _imported(dataset: Any, reading: Reading, place: Path | None, key: Path | None) -> UserStore:
    learned = reading.learned(columns_of(dataset))
    return _store_of(reading.rows(dataset, learned), reading, learned, place, key)


def _store_of(
    rows: Any, reading: Reading, learned: Learned, place: Path | None, key: Path | None
) -> UserStore:
    return UserStore.from_dataset(
        rows,
        place,
        user=reading.user,
        text=learned.text,
        completion=learned.completion,
        label=learned.label,
        key=key,
    )


def _rows_of(dataset: Any) -> Any:
    """The rows of a dataset as dicts of plain values."""
    if hasattr(dataset, "to_pylist"):
        return dataset.to_pylist()
    kind = type(dataset).__module__.partition(".")[0]
    if kind == "datasets":
        refuse_transform(dataset)
        return dataset.with_format(None)
    return dataset.to_dict("records") if kind == "pandas" else dataset
