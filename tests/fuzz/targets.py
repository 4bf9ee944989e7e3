"""What is fuzzed: every reader of a file that comes from outside.

A reader may raise `InputError` and nothing else, and its message may not hold a record's text. The
cases in `found` once made a reader fail; they are tried first, always.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from importing import bring_in, reading

from fuzz.inputs import SECRET, VALUES, edited, edited_json, json_bytes
from userdp.accounting import events
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.config.file import load_config
from userdp.data.array_files import file_digest
from userdp.data.record import Record
from userdp.data.sources import Reading
from userdp.data.store import UserStore, write_store
from userdp.files.chain import canonical
from userdp.files.remembered import mark
from userdp.history import ANCESTRY_FILE, read_history
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid, read_paid
from userdp.runs.checkpoints import Checkpoints, Moment

Read = Callable[[Path, Any], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader: `read(folder, value)` writes the value where it belongs and reads it."""

    name: str
    inputs: st.SearchStrategy[Any]
    read: Read
    found: tuple[Any, ...] = ()


def _imported(name: str, **choice: Any) -> Read:
    """Import a file of this name."""

    def read(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        bring_in(folder / name, folder / "store", reading(**choice) if choice else Reading())

    return read


# Sources


def _line(user: Any, text: Any = SECRET, **more: Any) -> bytes:
    return json_bytes({"user": user, "text": text} | more) + b"\n"


JSONL = (
    _line("ann") + _line("bob") + _line("ann"),
    _line(["ann", "bob"]) + _line(["bob"]),
    _line(1) + _line(2),
    b"".join(
        _line("ann", [{"role": "user", "content": SECRET}, {"from": "bot", "value": "hi"}])
        for _ in range(2)
    ),
)
ODD_LINES = st.lists(
    edited_json([json.loads(line) for good in JSONL for line in good.splitlines()]), max_size=3
).map(lambda rows: b"".join(json_bytes(row) + b"\n" for row in rows))
TIMED = _line("ann", time="2020-01-02") + _line("bob", time=1971) + _line("ann", time=None)

CSV = (
    f'user,text\nann,{SECRET}\nbob,"{SECRET}, and\nmore"\n'.encode(),
    f"\ufeffuser,text,time\r\nann,{SECRET},2020\r\n".encode(),
)


def _parquet(table: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    return sink.getvalue()


PARQUET = (
    _parquet({"user": ["ann", "bob"], "text": [SECRET, SECRET]}),
    _parquet({"user": [[1, 2], [2]], "text": [SECRET, SECRET]}),
    _parquet({"user": ["a"], "text": [[{"role": "user", "content": SECRET}]]}),
)
COLUMNS = st.dictionaries(
    st.sampled_from(["user", "text", "author"]), st.lists(VALUES, min_size=2, max_size=2)
)


def _odd_parquet(columns: dict[str, list[Any]]) -> bytes:
    """A Parquet file of these columns, as far as they have a type."""
    kept: dict[str, Any] = {}
    for name, cells in columns.items():
        try:
            kept[name] = pa.array(cells)
            _parquet({name: kept[name]})
        except (pa.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):
            kept.pop(name, None)
    return _parquet(kept)


MBOX = (
    b"From ann@x.org Mon Jan  6 10:00:00 2020\nFrom: Ann <ann@x.org>\nTo: bob@x.org\n"
    b"Date: Mon, 6 Jan 2020 10:00:00 +0000\nMessage-ID: <1@x.org>\n\n"
    + f"one two three four five {SECRET}\n\n".encode()
    + b"From bob@x.org Mon Jan  6 11:00:00 2020\nFrom: bob@x.org\nTo: ann@x.org\n"
    b'Content-Type: multipart/alternative; boundary="b"\n\n--b\nContent-Type: text/plain; '
    b"charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n"
    + f"six seven eight nine {SECRET}=\n\n--b--\n".encode(),
    b"From a Mon Jan  6 10:00:00 2020\nFrom: =?utf-8?b?YQ==?= <a@x>\n"
    b"Content-Type: text/html; charset=latin-1\nContent-Transfer-Encoding: base64\n\n"
    + b"PHA+emVicmEgY2FuYXJ5IG9uZSB0d28gdGhyZWU8L3A+\n",
)
POSTS = (
    b'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n'
    b'<row Id="1" PostTypeId="1" OwnerUserId="7" Title="t" Tags="&lt;a&gt;" '
    b'CreationDate="2020-01-02T03:04:05.678" '
    + f'Body="&lt;p&gt;{SECRET}&lt;/p&gt;" />\n'.encode()
    + b'<row Id="2" PostTypeId="2" ParentId="1" OwnerUserId="8" Body="b" />\n</posts>\n',
)
DIALOGUE = (
    f"Ann:\n{SECRET}\n\nBob:\nNothing.\n".encode(),
    f"Ann: {SECRET}\nBob: Nothing.\n".encode(),
)
STATE = {
    "_data_files": [{"filename": "data.arrow"}],
    "_indices_data_files": None,
    "_split": "train",
}


def _saved_dataset(folder: Path, value: Any) -> None:
    (folder / "saved").mkdir(exist_ok=True)
    (folder / "saved" / "state.json").write_bytes(json_bytes(value))
    table = pa.table({"user": ["ann"], "text": [SECRET]})
    with pa.OSFile(str(folder / "saved" / "data.arrow"), "wb") as sink:  # noqa: SIM117
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    bring_in(folder / "saved", folder / "store")


# Stores, selections


def _store(folder: Path, edit: Callable[[Any], Any]) -> None:
    """A store whose manifest is `edit` of what was written."""
    records = [Record(SECRET, ("ann",), "x"), Record(SECRET, ("bob",), "x")]
    write_store(records, folder / "store", key=bytes(32))
    manifest = folder / "store" / "manifest.json"
    manifest.write_bytes(json_bytes(edit(json.loads(manifest.read_bytes()))))
    opened = UserStore.open(folder / "store")
    opened.verify()
    assert opened.cautions == ()
    assert opened.texts_of(np.array([1])) == [SECRET]


IN_MANIFEST = "format records users edges fingerprint key_name fingerprint_key text_kind history"
MANIFEST_EDITS = st.one_of(
    VALUES.map(lambda new: lambda old: new),
    st.dictionaries(st.sampled_from([*IN_MANIFEST.split(), "sizes", "sha256"]), VALUES).map(
        lambda new: lambda old: old | new
    ),
    st.sampled_from([*IN_MANIFEST.split(), "sizes", "sha256"]).map(
        lambda name: lambda old: {key: value for key, value in old.items() if key != name}
    ),
    st.dictionaries(st.sampled_from(["users.arrow", "../x", "times.npy"]), VALUES).map(
        lambda new: lambda old: old | {"sizes": old["sizes"] | new}
    ),
)


EDGES = Edges.from_lists([[0], [0, 1], [1]], num_users=2)


def _npz(**arrays: Any) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **{name: np.asarray(value) for name, value in arrays.items()})
    return sink.getvalue()


SELECTION = {
    "multiplicity": np.array([1, 0, 1], np.int64),
    "max_records_per_user": 1,
    "realised_bound": 1,
    "method": "greedy",
    "edges_digest": EDGES.digest(),
    "guarantee": True,
}
ODD_ARRAYS = st.one_of(
    st.none(),
    st.integers(-5, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-3, 3), max_size=4),
    st.sampled_from([np.zeros((2, 2)), np.zeros(0), np.array(["a"]), np.array([1 + 2j])]),
)


def _odd_npz(good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    changed = st.dictionaries(st.sampled_from(sorted(good)), ODD_ARRAYS, max_size=2)

    def packed(odd: dict[str, Any]) -> bytes:
        try:
            return _npz(**(good | odd))
        except (ValueError, OverflowError, TypeError):
            return _npz(**good)

    return changed.map(packed)


def _selection(folder: Path, content: bytes) -> None:
    (folder / "selection.npz").write_bytes(content)
    selection = Selection.load(folder / "selection.npz")
    selection.check(EDGES)
    selection.check_user_by_user(EDGES)


def _edges(folder: Path, content: bytes) -> None:
    (folder / "edges.npz").write_bytes(content)
    Edges.load(folder / "edges.npz")


# What was spent

GAUSSIAN = {"type": "GaussianDpEvent", "noise_multiplier": 2.0}
EVENTS = [
    GAUSSIAN,
    {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": GAUSSIAN},
    {"type": "SelfComposedDpEvent", "event": GAUSSIAN, "count": 3},
    {"type": "ComposedDpEvent", "events": [GAUSSIAN, GAUSSIAN]},
    {
        "type": "MixtureOfGaussiansDpEvent",
        "standard_deviation": 2.0,
        "sensitivities": [0.0, 1.0],
        "sampling_probs": [0.5, 0.5],
    },
]
PAID = [{"format": 1, "what": "a look", "event": event, "value": 3.0} for event in EVENTS]


def _plan() -> Plan:
    return Plan.sample_users(
        num_users=100,
        expected_cohort_size=10,
        group_size=2,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-3,
    )


PLAN = _plan()
EARLIER = [
    Earlier(
        run="r",
        data="d",
        plan=PLAN.to_json(),
        event=PLAN.event(2),
        steps=2,
        adjacency=PLAN.adjacency,
        fixed_seed=False,
        paid=(Paid(what="a look", event=events.from_json(GAUSSIAN)),),
    ).to_json()
]


def _paid(folder: Path, value: Any) -> None:
    (folder / "look.json").write_bytes(value if isinstance(value, bytes) else json_bytes(value))
    PLAN.check_paid([read_paid(folder / "look.json")])


def _ancestry(folder: Path, value: Any) -> None:
    content = value if isinstance(value, bytes) else json_bytes(value)
    (folder / ANCESTRY_FILE).write_bytes(content)
    found = read_history(folder)
    assert found is not None
    PLAN.check_paid([], earlier=[Earlier.from_json(entry) for entry in found.entries])


def _ledger_lines(folder: Path) -> bytes:
    path = folder / "ledger.jsonl"
    ledger = Ledger.create(PLAN, path=path, bound_to={"data": "abc"}, fixed_seed=False)
    for _ in range(2):
        ledger.charge_step()
    ledger.finish({"final_weights": "def"})
    return path.read_bytes()


def _ledger(folder: Path, edit: list[tuple[int, int, bytes]]) -> None:
    """A ledger with edits (place, length, new bytes); places count modulo its size."""
    content = _ledger_lines(folder)
    for place, length, new in edit:
        at = place % (len(content) + 1)
        content = content[:at] + new + content[at + length :]
    (folder / "ledger.jsonl").write_bytes(content)
    Ledger.read(folder / "ledger.jsonl").statement(unfinished=True)


LEDGER_EDITS = st.lists(
    st.tuples(
        st.integers(0, 2**14),
        st.sampled_from([0, 1, 2, 40, 10**6]),
        st.binary(max_size=3) | st.sampled_from([b"\n", b"{}\n", b"[]\n", b"null\n", b"\x00"]),
    ),
    max_size=3,
)

# Checkpoints


def _checkpoint(folder: Path, value: tuple[str, bool, bytes]) -> None:
    """A checkpoint in which a file has other content, with or without the owner's mark on it."""
    name, marked, content = value
    checkpoints = Checkpoints(folder, bytes(32))
    state = {"optimizer": {"lr": 0.1, "state": {0: torch.ones(2)}}, "betas": (0.9, None)}
    checkpoints.save(Moment(step=1, head="abc", weights={"w": torch.ones(3)}, state=state))
    checkpoints.wait()
    (place,) = folder.glob("step-*")
    (place / name).write_bytes(content)
    if marked and name != "manifest.json":
        manifest = json.loads((place / "manifest.json").read_bytes())
        manifest["sha256"][name] = file_digest(place / name)
        manifest["mark"] = mark(bytes(32), manifest)
        (place / "manifest.json").write_text(canonical(manifest) + "\n")
    checkpoints._load(place)


TREE = {"items": [["a", {"float": "0x1p-3"}], [{"tuple": [0]}, {"tensor": "tensor0"}]]}
CHECKPOINT_FILES = st.tuples(
    st.sampled_from(["weights.safetensors", "state.safetensors", "state.json", "manifest.json"]),
    st.booleans(),
    edited([json_bytes(TREE), b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
    | edited_json([TREE]).map(json_bytes),
)

# Configurations

CONFIG: dict[str, Any] = {
    "data": {"store": "s", "sequence_length": 16},
    "model": {"path": "m", "lora": {"rank": 2}},
    "privacy": {
        "num_users": 20,
        "expected_cohort_size": 5,
        "group_size": 2,
        "noise_multiplier": 2.0,
        "delta": 1e-2,
        "clip_norm": 1.0,
        "clipping": "flat",
        "paid": [],
    },
    "training": {"steps": 4, "learning_rate": 0.1},
}


def _toml(value: Any) -> str:
    """TOML of a JSON value; what TOML cannot hold is written as a string."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value if isinstance(value, str) else "null")


def _config_text(value: Any) -> bytes:
    if not isinstance(value, dict):
        return b"x = " + _toml(value).encode("utf-8", "replace")
    lines = [f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()]
    return "\n".join(lines).encode("utf-8", "replace")


def _config(folder: Path, content: bytes) -> None:
    (folder / "run.toml").write_bytes(content)
    load_config(folder / "run.toml").plan()


# A reader of checkpoints joins this list when there is one.
TARGETS = [
    Target(
        name="jsonl",
        inputs=edited(JSONL) | ODD_LINES,
        read=_imported("d.jsonl"),
        found=(
            JSONL[0]
            + b'[{"": "\\u001f\\u001f", "0": -100000000000000000, '
            + b'"\\u0080\\ud800\\udc00": null}]\n',
        ),
    ),
    Target(
        name="jsonl-with-times",
        inputs=edited([TIMED]) | ODD_LINES,
        read=_imported("d.jsonl", time="time"),
    ),
    Target(
        name="jsonl-by-template",
        inputs=edited(JSONL) | ODD_LINES,
        read=_imported("d.jsonl", user="{user}/{site}", text="{text}!"),
    ),
    Target(
        name="gzip",
        inputs=edited([gzip.compress(JSONL[0], mtime=0)]),
        read=_imported("d.jsonl.gz"),
    ),
    Target(name="csv", inputs=edited(CSV), read=_imported("d.csv")),
    Target(
        name="csv-by-template",
        inputs=edited(CSV),
        read=_imported("d.csv", user="{user}", text="{text} {text}"),
    ),
    Target(
        name="parquet",
        inputs=edited(PARQUET) | COLUMNS.map(_odd_parquet),
        read=_imported("d.parquet"),
    ),
    Target(
        name="saved-dataset",
        inputs=edited_json([STATE]),
        read=_saved_dataset,
        found=tuple(STATE | {"_data_files": [{"filename": name}]} for name in ("\ud800", "\0")),
    ),
    Target(name="mbox", inputs=edited(MBOX), read=_imported("d.mbox")),
    Target(
        name="stackexchange",
        inputs=edited(POSTS),
        read=_imported("Posts.xml"),
        found=(b'<?xml version="1.0" encoding="NaNutf-8"?>\n<posts></posts>',),
    ),
    Target(name="threads", inputs=edited(POSTS), read=_imported("Posts.xml", threads=True)),
    Target(name="dialogue", inputs=edited(DIALOGUE), read=_imported("d.txt")),
    Target(name="manifest", inputs=MANIFEST_EDITS, read=_store, found=(lambda old: {"format": 3},)),
    Target(
        name="selection",
        inputs=edited([_npz(**SELECTION)]) | _odd_npz(SELECTION),
        read=_selection,
        found=(
            _npz(**(SELECTION | {"realised_bound": math.inf})),
            _npz(**(SELECTION | {"max_records_per_user": math.inf})),
        ),
    ),
    Target(
        name="edges",
        inputs=edited([_npz(indptr=[0, 1, 2], indices=[0, 1], n_users=2)])
        | _odd_npz({"indptr": [0, 1, 2], "indices": [0, 1], "n_users": 2}),
        read=_edges,
        # A version of zip that nobody has, and more users than memory.
        found=(
            _npz(indptr=[0], indices=[], n_users=2).replace(b"PK\1\2-\3-", b"PK\1\2-\3{", 1),
            _npz(indptr=[0, 1, 2], indices=[0, 1], n_users=2**36),
        ),
    ),
    Target(
        name="paid",
        inputs=edited_json(PAID) | edited([json_bytes(item) for item in PAID]),
        read=_paid,
        found=(
            PAID[1] | {"event": EVENTS[1] | {"event": GAUSSIAN | {"noise_multiplier": []}}},
            PAID[1] | {"event": EVENTS[1] | {"event": 0.5}},
            PAID[2] | {"event": EVENTS[2] | {"count": 10**400}},
            b"[" * 100_000,
        ),
    ),
    Target(
        name="ancestry",
        inputs=edited_json([{"format": 2, "runs": EARLIER}])
        | edited([json_bytes({"format": 2, "runs": EARLIER})]),
        read=_ancestry,
        found=(
            {"format": 2, "runs": [EARLIER[0] | {"plan": {}}]},
            {
                "format": 2,
                "runs": [EARLIER[0] | {"event": GAUSSIAN | {"noise_multiplier": 10**400}}],
            },
            b"[" * 100_000,
        ),
    ),
    Target(name="ledger", inputs=LEDGER_EDITS, read=_ledger),
    Target(
        name="checkpoint",
        inputs=CHECKPOINT_FILES,
        read=_checkpoint,
        found=(
            ("state.json", True, b"[" * 100_000),
            ("state.json", True, b'{"float": "0x1p9999"}'),
        ),
    ),
    Target(
        name="configuration",
        inputs=edited_json([CONFIG]).map(_config_text) | edited([_config_text(CONFIG)]),
        read=_config,
        found=(b"[data]\nstore = " + b"[" * 2000, b"data = " + b"9" * 5000),
    ),
]
