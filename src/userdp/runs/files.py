"""What a run's directory holds beside the ledger, and whether its files belong together.

    ledger.jsonl  model/                     public, bound to each other by the closing row
    secret/ledger.key                        marks rows of the ledger and lists of users
    secret/noise.key, secret/sums.jsonl      make the noise, and tell steps that are taken again;
                                             `userdp finalize` destroys both
    secret/users/RUN.bin                     pseudonyms of the training users, for the overlap check

Everything in `secret/` is for the owner alone (mode 0600) and is not part of the model. This file
needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hmac
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from userdp.data.array_files import PSEUDONYM_BYTES, file_digest
from userdp.errors import LedgerError
from userdp.files.chain import read_key, write_private
from userdp.history import home_of
from userdp.ledger.book import Ledger
from userdp.ledger.rows import UNVERIFIED
from userdp.statement import Statement

if TYPE_CHECKING:
    from userdp.data.store import UserStore

NOISE_KEY = Path("secret", "noise.key")
# Where the runs lie that a run was forked from.
EARLIER = "earlier"

# People write and edit these files. They change no weight.
# A card that was being written when the process was killed goes with the next one.
FREE_FILES = frozenset({"README.md", ".README.md.partial"})

# How weights are called, by this package and by others.
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "adapter_model*.bin", "*.gguf")

# The files of an export beside the model, and the settings whose base it may rename.
EXPORTED_RECORD = frozenset({"ledger.jsonl", "statement.json"})
REWRITTEN = frozenset({"config.json", "adapter_config.json", "tokenizer_config.json"})


def model_files(directory: Path) -> dict[str, str]:
    """The files of a saved model and the digest of each.

    A saved model has no links. If there is one, its digest is the word "link", wherever it leads.
    """
    return {
        path.relative_to(directory).as_posix(): "link" if path.is_symlink() else file_digest(path)
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or (path.is_file() and path.name not in FREE_FILES)
    }


# Where a merged export keeps the ordinary one.
RECORD = "record"

# Where `UserDPTrainer` keeps its run, below its output_dir.
TRAINER_RUN = Path("userdp", "run")


def run_at(place: Path) -> Path:
    """The directory of a run: `place`, or the run of the trainer whose output_dir that is."""
    inside = place / TRAINER_RUN
    return inside if inside.is_dir() and not (place / "ledger.jsonl").exists() else place


def record_at(place: Path) -> Path:
    """Where the record of a run or an export is: in a merged export, beside the whole weights."""
    inside = place / RECORD
    is_merged = (inside / "ledger.jsonl").is_file() and not (place / "ledger.jsonl").exists()
    return inside if is_merged else place


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run that was checked: its ledger, and why it is not a finished record of the run's model.

    Whoever writes words about a run takes such a record, so that none are written unchecked.
    """

    run: Path
    ledger: Ledger
    problems: tuple[str, ...] = ()

    def statement(self) -> Statement:
        """What may be said about the model. Nothing is promised if there is a problem."""
        return self.ledger.statement(unfinished=bool(self.problems))


def read_run(run: Path, *, unfinished: bool = False) -> RecordedRun:
    """The ledger of a run. It must be closed and describe the weights in `model/`.

    Other runs are refused. With `unfinished` they are read all the same, and the statement says so.
    """
    return checked_run(run, Ledger.read(run / "ledger.jsonl"), unfinished=unfinished)


def checked_run(run: Path, ledger: Ledger, *, unfinished: bool = False) -> RecordedRun:
    """The same where the ledger is read already."""
    problems = [*problems_of(run, ledger), *config_problems(run, ledger)]
    if problems and not unfinished:
        raise LedgerError(
            f"{run}: {problems[0]} No privacy statement can be made of it. Say --unfinished to "
            "read it all the same."
        )
    return RecordedRun(run=run, ledger=ledger, problems=tuple(problems))


def check_homes(homes: Sequence[Path], loaded: Sequence[Path] = ()) -> None:
    """Refuse a model whose past is not what the ledger of its own run says.

    The model's directory says what was spent on it; where the run's ledger lies beside it, the
    closing row must name just these files. The same holds for a directory of any other name inside
    the run, if the model was `loaded` from it. A model that was taken out of its run has no ledger.
    """
    for home in homes:
        if not (home / "ledger.jsonl").is_file():
            continue
        problems = problems_of(home, Ledger.read(home / "ledger.jsonl"))
        if problems:
            raise LedgerError(
                f"{home}: {problems[0]} What was spent on this model cannot be trusted, so it is "
                "not trained on. Restore the run's files, or start from another model."
            )
    for directory in loaded:
        home = home_of(directory)
        if home is None or directory == home / "model":
            continue
        end = Ledger.read(home / "ledger.jsonl").end
        if end is None or model_files(directory) != end["model_files"]:
            raise LedgerError(
                f"{directory} lies in a run and is not the model that the run closed with. What "
                "was spent on this model cannot be trusted, so it is not trained on. Start from "
                f"{home / 'model'}, or from another model."
            )


def problems_of(run: Path, ledger: Ledger) -> list[str]:
    """Why the ledger is not a finished record of the run's model; empty if it is one."""
    end = ledger.end
    if end is None:
        return ["the ledger has no closing row: the run did not finish, or rows were cut off."]
    written: dict[str, str] = end["model_files"]
    directory = model_directory(run)
    if directory is None:
        return [f"{run} holds no model, though its ledger is closed."] if written else []
    if directory.is_symlink() and directory != run:
        return [f"{directory} is a link: put the folder that it leads to in its place."]
    place = "" if is_export(run) else "model/"
    return [
        f"{place}{name} is not what the ledger's closing row names."
        for name in _changed(run, directory, written)
        if name not in rewritten_files(run, ledger)
    ]


def config_problems(run: Path, ledger: Ledger) -> list[str]:
    """Why the run's configuration is not the one that its ledger names; empty if it is, or gone."""
    path = run / "config.toml"
    named = ledger.bound_to.get("config")
    if named is None or not path.is_file() or file_digest(path) == named:
        return []
    return [f"{path} is not the configuration that the run was started with."]


def copy_problems(place: Path, ledger: Ledger) -> list[str]:
    """Why the weights in a trainer's output_dir are not those of its run; empty if none are there.

    A run that is not closed has no weights to compare with.
    """
    written: dict[str, str] = (ledger.end or {}).get("model_files", {})
    names = [path.name for path in sorted(place.iterdir())]
    weights = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in WEIGHTS)]
    if not written or not weights:
        return []
    found = {
        name: "link" if (place / name).is_symlink() else file_digest(place / name)
        for name in names
        if name in weights or name in written
    }
    others = [
        f"{place / name} is not the file that its run closed with."
        for name in found
        if found[name] != written.get(name)
    ]
    return others + [
        f"{place / name} is missing, which its run closed with."
        for name in sorted(written.keys() - found.keys())
        if any(fnmatch.fnmatchcase(name, p) for p in WEIGHTS)
    ]


def missing_rows(run: Path, ledger: Ledger) -> str | None:
    """What lies in the run and needs more steps than its ledger has; None if nothing does.

    A row is on disk before any weight of its step is visible, so rows were then cut off.
    """
    later = [
        path
        for path in sorted((run / "checkpoints").glob("step-*"))
        if path.name.removeprefix("step-").isdecimal()
        and int(path.name.removeprefix("step-")) > ledger.steps
    ]
    if later:
        return f"checkpoints/{later[0].name}"
    is_short = ledger.steps < ledger.plan.steps and not ledger.is_halted
    return "model" if (run / "model").exists() and is_short else None


def rewritten_files(run: Path, ledger: Ledger) -> list[str]:
    """The settings in an export that differ from the run's, because a base was named in them."""
    directory = model_directory(run)
    if ledger.end is None or directory is None or not is_export(run):
        return []
    changed = _changed(run, directory, ledger.end["model_files"])
    return [name for name in changed if name in REWRITTEN and (directory / name).is_file()]


def _changed(run: Path, directory: Path, written: dict[str, str]) -> list[str]:
    found = model_files(directory)
    if is_export(run):
        found = {name: digest for name, digest in found.items() if name not in EXPORTED_RECORD}
    return sorted(name for name in found.keys() | written if found.get(name) != written.get(name))


def model_directory(run: Path) -> Path | None:
    """Where the model of a run or of an export lies; None if there is none."""
    if (run / "model").is_dir():
        return run / "model"
    return run if is_export(run) else None


def is_export(directory: Path) -> bool:
    """Whether `userdp export` wrote the directory: the model's files lie beside the ledger."""
    has_model = any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))
    is_run = (directory / "model").is_dir()
    return has_model and not is_run and (directory / "ledger.jsonl").is_file()


def statement_file(statement: Statement) -> bytes:
    """The content of statement.json."""
    return (json.dumps(statement.to_json(), indent=1) + "\n").encode()


def is_statement_file(content: bytes, statement: Statement) -> bool:
    """Whether `content` is that of statement.json, byte for byte.

    Whoever wrote it may have had the run's key, and whoever reads it not. Then only the reader's
    statement says that the writer is not verified.
    """
    known = tuple(text for text in statement.cautions if text != UNVERIFIED)
    by_owner = dataclasses.replace(statement, cautions=known)
    return content in (statement_file(statement), statement_file(by_owner))


def run_of(model: Path) -> Path | None:
    """The directory of the run that `model` is, or is the `model/` of; None if there is none.

    An export is not a run: what a run keeps secret is not in it.
    """
    if (model / "ledger.jsonl").is_file():
        return None if is_export(model) else model
    home = model.resolve().parent
    is_model = model.is_dir() and model.resolve().name == "model"
    return home if is_model and (home / "ledger.jsonl").is_file() else None


def write_training_users(run: Path, digest: str, store: UserStore, homes: tuple[Path, ...]) -> None:
    """Write to the run's secret directory which users this and the earlier runs were trained on.

    Pseudonyms are keyed hashes: they name nobody without the store's key. Each list is marked with
    the key of the run's ledger; a list of an earlier run that does not have its mark is left out.
    """
    content = store.manifest["key_name"].encode() + b"\n" + b"".join(store.pseudonyms.to_pylist())
    _write_list(run, digest, content)
    for home in homes:
        for path in sorted((home / "secret" / "users").glob("*.bin")):
            found = _read_list(home, path.stem)
            if found is not None and not _users_file(run, path.stem).exists():
                _write_list(run, path.stem, found)


def shared_users(run: Path, held_out: UserStore) -> int | None:
    """How many users of `held_out` were trained on, in this run or an earlier one.

    None if that cannot be known: a list is missing, or ids were hidden under different keys or
    compared by different rules.
    """
    ledger = Ledger.read(run / "ledger.jsonl")
    digests = (ledger.run_digest, *(item.run for item in ledger.earlier))
    found = overlap(held_out, dict.fromkeys(digests, 1), (run,))
    return found.shared if found.is_known else None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many shared users were found, and whether every list was available."""

    shared: int
    is_known: bool


def overlap(store: UserStore, people: Mapping[str, int], homes: Sequence[Path]) -> Overlap:
    """Count the users who are in more than one group of people; those of `store` are group 0.

    `people` maps each run's digest to its group. `homes` are the directories where the runs' lists
    of users may lie.
    """
    groups: dict[int, set[bytes]] = {0: set(store.pseudonyms.to_pylist())}
    is_known = True
    for digest, group in people.items():
        users = _users_of(digest, homes, store.manifest["key_name"])
        is_known = is_known and users is not None
        groups.setdefault(group, set()).update(users or ())
    seen: set[bytes] = set()
    shared: set[bytes] = set()
    for users in groups.values():
        shared |= seen & users
        seen |= users
    return Overlap(shared=len(shared), is_known=is_known)


def _users_of(digest: str, homes: Sequence[Path], key_name: str) -> set[bytes] | None:
    """The pseudonyms of a run's users; None if no sound list of them under this key is there."""
    for home in homes:
        content = _read_list(home, digest)
        if content is None:
            continue
        written, _, users = content.partition(b"\n")
        if written == key_name.encode():
            return {
                users[start : start + PSEUDONYM_BYTES]
                for start in range(0, len(users), PSEUDONYM_BYTES)
            }
    return None


def _write_list(run: Path, digest: str, content: bytes) -> None:
    """Leave a list in `run`: the mark, and the content that it is of."""
    key = read_key(run / "ledger.jsonl")
    assert key is not None
    write_private(_users_file(run, digest), _mark(key, digest, content) + b"\n" + content)


def _read_list(home: Path, digest: str) -> bytes | None:
    """The content of a list; None if it is not there, or not as the run's owner wrote it."""
    path, key = _users_file(home, digest), read_key(home / "ledger.jsonl")
    if key is None or not path.is_file():
        return None
    written, _, content = path.read_bytes().partition(b"\n")
    return content if hmac.compare_digest(written, _mark(key, digest, content)) else None


def _mark(key: bytes, digest: str, content: bytes) -> bytes:
    # The run's digest is marked too, so that no list can take the place of another.
    return hmac.digest(key, f"userdp users {digest}\n".encode() + content, "sha256").hex().encode()


def _users_file(run: Path, digest: str) -> Path:
    return run / "secret" / "users" / f"{digest}.bin"


def discard(run: Path) -> None:
    """Delete the files of a run that has released nothing."""
    for name in ("checkpoints", "trackers", "secret"):
        shutil.rmtree(run / name, ignore_errors=True)
    # The ledger goes last: as long as it is there, the rest is a run's and may be deleted.
    for name in ("validation.jsonl", "run.json", "config.toml", "ledger.jsonl"):
        (run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # If the directory is not empty, it stays: the other files in it are not the run's.
        run.rmdir()
