"""What may leave a run, by an allow-list: a model as others load it, and the record behind it.

Everything in an export is either a file of the run, byte for byte, or made here from the run's
ledger and the caller's options. Files that the list does not name are refused, because nobody has
looked at what they say. Paths of this machine do not leave it either: they tell names of people and
work nowhere else.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from userdp.errors import InputError, LedgerError
from userdp.files.durable import new_directory
from userdp.history import ANCESTRY_FILE
from userdp.ledger.book import Ledger
from userdp.report.card import card_of_run
from userdp.runs.check import check_run
from userdp.runs.facts import HUB_NAME, RunFacts, is_local_base, read_facts
from userdp.runs.files import FREE_FILES, REWRITTEN, RecordedRun, statement_file
from userdp.statement import Statement

WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
# Settings are read by people and programs. A path in them would leave this machine.
SETTINGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    ANCESTRY_FILE,
)
# Words and templates come from the base model's tokenizer.
WORDS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
ALLOWED = WEIGHTS + SETTINGS + WORDS

# The fields of a ledger's rows that are known to be public, by the row's kind.
LEDGER_FIELDS = {
    "run": {"format", "plan", "event", "bound_to", "fixed_seed", "model_check", "data_cautions"}
    | {"nonce"},
    "earlier": {"run", "data", "plan", "event", "steps", "adjacency", "fixed_seed", "paid"}
    | {"people", "doubts"},
    "paid": {"what", "event"},
    "step": {"step"},
    "halt": {"steps"},
    "continued": {"steps", "first", "nonce"},
    "doubt": {"reason"},
    "end": {"steps", "event", "digests", "model_files", "people"},
}

NAMES_OF_A_BASE = frozenset({"_name_or_path", "name_or_path", "base_model_name_or_path"})
LICENSE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Where every file of an export comes from, and what may be said about the model."""

    origins: dict[str, str]
    statement: Statement


def export(run: Path, out: Path, *, base: str = "", license: str = "") -> Exported:
    """Write what may be published of a finished run to `out`, a new directory.

    `base` is the base model's name on the hub; an adapter that was trained on a local base needs
    it. `license` is the id of the licence, for the card.
    """
    if base and not HUB_NAME.fullmatch(base):
        raise InputError(f"--base {base!r} is not the name of a model on the hub, such as gpt2.")
    if license and not LICENSE_ID.fullmatch(license):
        raise InputError(f"--license {license!r} is not the id of a licence, such as apache-2.0.")
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: choose another output directory.")
    if out.resolve().is_relative_to(run.resolve()):
        raise InputError(
            f"{out} lies in the run, whose record names all files that belong to it: choose a "
            "directory outside of it."
        )
    found = check_run(run)
    if found.ledger is None or found.problems:
        raise LedgerError(f"{run}: {found.problems[0]} Such a run is not exported.")
    if not (run / "model").is_dir():
        raise LedgerError(f"{run} holds no model/: there is nothing to export.")
    facts = read_facts(run)
    pieces = _Pieces(run, found.ledger, facts, base)
    statement = found.ledger.statement()
    pieces.make("statement.json", statement_file(statement), "made from ledger.jsonl")
    record = RecordedRun(run=run, ledger=found.ledger)
    card = card_of_run(record, statement, base=pieces.named_base(), license=license)
    made_of = "made from ledger.jsonl, config.toml or run.json, validation.jsonl and the options"
    pieces.make("README.md", card.encode(), made_of)
    with new_directory(out) as partial:
        for name, content in pieces.contents.items():
            place = partial / name
            place.write_bytes(content)
            place.chmod(0o644)
        for name in pieces.copied:
            _copy(run / "model" / name, partial / name)
        partial.chmod(0o755)
        _check_unchanged(partial, pieces, found.ledger)
    return Exported(origins=pieces.origins, statement=statement)


class _Pieces:
    """The files of an export: weights are copied later, everything else is in memory."""

    def __init__(self, run: Path, ledger: Ledger, facts: RunFacts, base: str) -> None:
        self._base = base
        self._facts = facts
        self._private = _local_paths(run, facts)
        self._is_local = is_local_base(run, facts)
        self.contents: dict[str, bytes] = {}
        self.copied: list[str] = []
        self.origins: dict[str, str] = {}
        for path in sorted((run / "model").iterdir()):
            if path.name not in FREE_FILES:
                self._take(path)
        self._take_ledger(run / "ledger.jsonl")

    def make(self, name: str, content: bytes, origin: str) -> None:
        """Add a file with this content."""
        self._refuse_paths(name, content)
        self.contents[name] = content
        self.origins[name] = origin

    def named_base(self) -> str:
        """The base model by a name that others can use; empty if there is none."""
        return self._base or ("" if self._is_local else self._facts.model)

    def _take(self, path: Path) -> None:
        name = path.name
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED) or path.is_dir():
            raise InputError(
                f"model/{name} is not on the list of files that may be published: nobody has "
                "looked at what is in it. Train without it, or publish it yourself."
            )
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHTS):
            self._refuse_paths(name, _header(path))
            self.copied.append(name)
            self.origins[name] = f"model/{name}, byte for byte"
            return
        content = path.read_bytes()
        right = self._without_local_base(name, content) if name in REWRITTEN else content
        is_same = right == content
        changed = "byte for byte" if is_same else "with the base's name for a path of this machine"
        self.make(name, right, f"model/{name}, {changed}")

    def _without_local_base(self, name: str, content: bytes) -> bytes:
        """The settings with a base that works elsewhere."""
        settings = _settings(name, content)
        right = dict(settings)
        for key in NAMES_OF_A_BASE & settings.keys():
            is_adapter = name == "adapter_config.json"
            is_local = self._is_local or _is_local(str(settings[key]))
            is_usable = bool(settings[key]) and not is_local
            if self._base and (is_adapter or not is_usable):
                right[key] = self._base
            elif is_adapter and not is_usable:
                raise InputError(
                    "model/adapter_config.json names its base by a path of this machine, which "
                    "nobody else can load. Give --base NAME, the base's name on the hub."
                )
            elif not is_usable:
                del right[key]
        return content if right == settings else json.dumps(right, indent=2).encode() + b"\n"

    def _take_ledger(self, path: Path) -> None:
        content = path.read_bytes()
        for line in content.splitlines():
            row = cast("dict[str, Any]", json.loads(line))
            public = LEDGER_FIELDS.get(row["kind"], set[str]()) | {"kind", "tag", "hash"}
            if unknown := sorted(row.keys() - public):
                raise LedgerError(
                    f"{path}: rows of kind {row['kind']!r} hold {unknown[0]!r}, which is not on "
                    "the list of what may be published."
                )
        self.make(path.name, content, "ledger.jsonl, byte for byte")

    def _refuse_paths(self, name: str, content: bytes) -> None:
        """Refuse a file that tells where something lies on this machine."""
        # A tokenizer's words may look like any path, so only the run's own are looked for there.
        own, home = self._private
        sought = own if name in WORDS else (*own, *home)
        is_telling = any(path.encode() in content for path in sought)
        if is_telling or tells_a_path(name, content):
            raise InputError(
                f"{name} holds a path of this machine, which is nobody else's business. Take it "
                "out where it comes from, and train or export again."
            )


def tells_a_path(name: str, content: bytes) -> bool:
    """Whether a file of settings names a place on some machine."""
    return name in SETTINGS and any(map(_is_absolute, _strings(_settings(name, content))))


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        while piece := reading.read(2**22):
            writing.write(piece)
    target.chmod(0o644)


def _check_unchanged(directory: Path, pieces: _Pieces, ledger: Ledger) -> None:
    """What was written must be what the ledger names: files may change while they are read."""
    after = check_run(directory)
    if after.problems or after.ledger is None or after.ledger.head != ledger.head:
        problem = after.problems[0] if after.problems else "the ledger changed."
        raise LedgerError(f"the run changed while it was exported: {problem} Export it again.")
    assert sorted(path.name for path in directory.iterdir()) == sorted(pieces.origins)


def _header(path: Path) -> bytes:
    """The names and remarks in a file of weights."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(length)


def _local_paths(run: Path, facts: RunFacts) -> tuple[list[str], list[str]]:
    """Where the run, its data and its model lie, and where their owner is at home."""
    own = [run.absolute(), run.resolve(), Path(facts.store).absolute()]
    if facts.model and _is_local(facts.model):
        own.append(Path(facts.model).absolute())
    return [str(path) for path in own], [f"{Path.home()}/"]


def _is_local(name: str) -> bool:
    """Whether a model's name is a path, and not a name on the hub."""
    return not HUB_NAME.fullmatch(name) or Path(name).is_dir()


def _is_absolute(text: str) -> bool:
    is_windows = PureWindowsPath(text).is_absolute() and "\n" not in text
    return (text.startswith(("/", "~/")) and text.count("/") > 1) or is_windows


def _settings(name: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"model/{name} holds no settings, so what it says cannot be looked at.")
    return cast("dict[str, Any]", found)


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in cast("dict[str, Any]", data).values():
            yield from _strings(value)
    elif isinstance(data, list):
        for value in cast("list[Any]", data):
            yield from _strings(value)
