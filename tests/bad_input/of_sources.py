"""Sources that cannot be imported."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq

from bad_input.making import GOOD, TEXT, USER, Bad, Place, imported, record

CSV = f"user,text\nann,{TEXT}\n".encode()


def _bomb(place: Place) -> Sequence[object]:
    one = record() * 2000
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        for _ in range(1200):
            file.write(one)
    return ("import", place.write("data.jsonl.gz", packed.getvalue()), "--out", "store")


def _long_line(place: Place) -> Sequence[object]:
    line = b'{"user": "ann", "text": "' + TEXT.encode() * (100 * 2**20 // len(TEXT)) + b'"}\n'
    return ("import", place.write("data.jsonl", GOOD + line), "--out", "store")


@cache
def _parquet(user: object = USER, text: object = TEXT) -> bytes:
    table = pa.table({"user": ["ann", user] if user != 1.5 else [1.0, 1.5], "text": [TEXT, text]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _renamed_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"writer": ["ann"], "words": [TEXT]}), sink)
    return sink.getvalue()


def _saved_dataset(place: Place) -> Sequence[object]:
    place.write("outside.arrow", GOOD)
    state = {"_data_files": [{"filename": "../outside.arrow"}], "_indices_data_files": None}
    place.write("saved/state.json", json.dumps(state))
    return ("import", place.folder / "saved", "--out", "store")


def _broken_dataset(content: str) -> Bad:
    def make(place: Place) -> Sequence[object]:
        place.write("saved/state.json", content)
        return ("import", place.folder / "saved", "--out", "store")

    return Bad(name=f"a saved dataset with {content or 'nothing'}", make=make, says="state.json")


def _tar(place: Place) -> Sequence[object]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo("../../escaped.jsonl")
        info.size = len(GOOD)
        archive.addfile(info, io.BytesIO(GOOD))
    return ("import", place.write("data.tar", packed.getvalue()), "--out", "store")


def _zip(place: Place) -> Sequence[object]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("../escaped.jsonl", GOOD)
    named = place.write("data.jsonl.zip", packed.getvalue())
    return ("import", named, "--out", "store")


def _only_links(place: Place) -> Sequence[object]:
    target = place.write("elsewhere.jsonl", GOOD)
    (place.folder / "sources").mkdir()
    (place.folder / "sources" / "data.jsonl").symlink_to(target)
    return ("import", "sources", "--format", "jsonl", "--out", "store")


def _dangling(place: Place) -> Sequence[object]:
    (place.folder / "data.jsonl").symlink_to(place.folder / "nowhere")
    return ("import", "data.jsonl", "--out", "store")


def _two_formats(place: Place) -> Sequence[object]:
    place.write("sources/data.jsonl", GOOD)
    place.write("sources/data.csv", CSV)
    return ("import", "sources", "--out", "store")


def _existing(place: Place) -> Sequence[object]:
    place.write("store/kept", "kept")
    return ("import", place.write("data.jsonl", GOOD), "--out", "store")


def _below_a_file(place: Place) -> Sequence[object]:
    place.write("file", "kept")
    return ("import", place.write("data.jsonl", GOOD), "--out", "file/store")


def _key_is_a_folder(place: Place) -> Sequence[object]:
    (place.folder / "key").mkdir()
    return ("import", place.write("data.jsonl", GOOD), "--out", "store", "--key", "key")


POSTS = f'<posts><row Id="1" PostTypeId="1" OwnerUserId="7" Title="t" Body="{TEXT}"/></posts>'

TABLE: list[Bad] = [
    # JSON Lines
    imported("null user", "line 4: field 'user'", GOOD + record(None)),
    imported("empty user", "line 4: field 'user'", GOOD + record("")),
    imported("blank user", "line 4: field 'user'", GOOD + record(" \u200b\t")),
    imported("three ids missing", "as in 3 line(s)", GOOD + record(None) * 2 + record("")),
    imported("a null among owners", "line 4: field 'user'", GOOD + record([USER, None])),
    imported("no owners", "line 4: field 'user'", GOOD + record([])),
    imported("ids 1 and 1.0", "line 2: field 'user'", record(1) + record(1.0)),
    imported("an id that is true", "line 4: field 'user'", GOOD + record(True)),
    imported("an id that is an object", "line 4: field 'user'", GOOD + record({"id": USER})),
    imported("an id with NUL", "line 4: field 'user'", GOOD + record(USER + "\x00")),
    imported("ids equal but for case", "spelled differently", record(USER) + record(USER.upper())),
    imported("ids equal but for width", "spelled differently", record("ann") + record("\uff41nn")),
    imported("ids equal but for blanks", "spelled differently", record(USER) + record(f" {USER} ")),
    imported("text missing", "line 4: field 'text'", GOOD + b'{"user": "ann"}\n'),
    imported("text is a number", "line 4: field 'text'", GOOD + record(text=17)),
    imported("text with a lone surrogate", "line 4", GOOD + record(text=TEXT + "\ud800")),
    imported("invalid UTF-8", "line 4: not valid UTF-8", GOOD + record().replace(b"zeb", b"\xff")),
    imported("a NUL byte", "line 4: contains a NUL", GOOD + record().replace(b"zeb", b"\x00")),
    imported("UTF-16", "data.jsonl, line 1", record().decode().encode("utf-16")),
    imported("a cut line", "line 4: not valid JSON", GOOD + record()[:-8]),
    imported("plain text", "line 1: not valid JSON", TEXT.encode() + b"\n"),
    imported("a list", "line 4: not a JSON object", GOOD + json.dumps([TEXT]).encode()),
    imported("one list of all", "jq -c '.[]' data.json", b"[" + record() + b"]", file="data.json"),
    imported("an object of lines", "line 1: not valid JSON. Each line", b'{\n"user": "ann"\n}\n'),
    imported("a list of strings", "line 1: field 'text' is a list of strings", record(text=[TEXT])),
    imported(
        "strings after text", "line 4: field 'text' is a list of str", GOOD + record(text=[""])
    ),
    imported(
        "a list of strings with a label",
        "line 1: field 'text' is a list of strings",
        record(text=[TEXT], mood="good"),
        "--label",
        "mood",
    ),
    imported("nested beyond reason", "line 4: not valid JSON", GOOD + b"[" * 100_000 + b"\n"),
    imported("a number of 10,000 digits", "line 1", b'{"user": ' + b"7" * 10_000 + b"}\n"),
    imported("no known column", "The columns are who, what", b'{"who": "ann", "what": "x"}\n'),
    imported("two user columns", "--user COLUMN", GOOD + record(author=USER)),
    imported("chats after texts", "Import the two apart", GOOD + record(text=[{"role": "a"}])),
    imported("a column that is not there", "The columns are user, text.", GOOD, "--user", "poster"),
    imported("no record", "no record was found", b"\n\n"),
    imported("empty texts only", "no record", record(text="") + record(text=" ")),
    imported("nobody left", "no record", record(), "--drop-user", USER),
    imported("a pattern that is none", "no regular expression", GOOD, "--drop-matching", "("),
    imported("a time that is none", "line 1: field 'when'", record(when=TEXT), "--time", "when"),
    imported("threads of no forum", "--threads is for", GOOD, "--threads"),
    Bad(name="a line of 100 MB", make=_long_line, says="line 4: longer than 32 MiB"),
    # Compressed and packed
    Bad(name="a decompression bomb", make=_bomb, says="decompression bomb"),
    imported(
        "a cut gzip", "truncated or corrupt", gzip.compress(GOOD * 50)[:-20], file="d.jsonl.gz"
    ),
    imported(
        "a gzip with a wrong byte",
        "truncated or corrupt",
        gzip.compress(GOOD * 50, mtime=0)[:-8] + b"\x00" * 8,
        file="d.csv.gz",
    ),
    Bad(name="a tar archive", make=_tar, says="the format cannot be told"),
    Bad(name="a zip archive", make=_zip, says="data.jsonl.zip, line 1"),
    # CSV
    imported("CSV without a user", "line 3: column 'user' is empty", CSV + b",x\n", file="d.csv"),
    imported("CSV id nan", "line 3: column 'user' is empty", CSV + b"nan,x\n", file="d.csv"),
    imported(
        "CSV ids 1 and 1.0", "line 3: column 'user' must", b"user,text\n1,x\n1.0,y\n", file="d.csv"
    ),
    imported("ragged CSV", "line 3: 3 fields", CSV + f"ann,{TEXT},x\n".encode(), file="d.csv"),
    imported("short CSV", "line 3: 1 fields", CSV + TEXT.encode(), file="d.csv"),
    imported(
        "an open quote", "line 3: not valid CSV", CSV + f'ann,"{TEXT}\n'.encode(), file="d.csv"
    ),
    imported("semicolons", "a semicolon", CSV.replace(b",", b";"), file="d.csv"),
    imported("tabs in a .csv", "a tab", CSV.replace(b",", b"\t"), file="d.csv"),
    imported("commas in a .tsv", "a comma", CSV, file="d.tsv"),
    imported(
        "another CSV column",
        "The columns are user, text. Did you mean 'user'?",
        CSV,
        "--user",
        "usr",
        file="d.csv",
    ),
    imported("CSV without a header", "2 columns", f"{USER},it is {TEXT}\n".encode(), file="d.csv"),
    imported("a CSV column twice", "the same name", b"user,text,user\na,b,c\n", file="d.csv"),
    imported("invalid UTF-8 in CSV", "line 3: not valid UTF-8", CSV + b"ann,\xff\n", file="d.csv"),
    imported("NUL in CSV", "line 3: contains a NUL", CSV + b"ann,\x00\n", file="d.csv"),
    # Parquet and saved datasets
    imported("Parquet without a user", "row 2: column 'user'", _parquet(None), file="d.parquet"),
    imported("Parquet with an empty user", "row 2: column", _parquet(""), file="d.parquet"),
    imported("Parquet with decimal ids", "whole numbers", _parquet(1.5), file="d.parquet"),
    imported(
        "Parquet without a text", "row 2: column 'text'", _parquet(text=None), file="d.parquet"
    ),
    imported("a cut Parquet", "truncated", _parquet()[:-20], file="d.parquet"),
    imported("no Parquet", "not a Parquet file", GOOD, file="d.parquet"),
    imported(
        "other columns", "The columns are writer, words", _renamed_parquet(), file="d.parquet"
    ),
    Bad(name="a dataset that points out of itself", make=_saved_dataset, says="outside of itself"),
    _broken_dataset("{"),
    _broken_dataset("[]"),
    _broken_dataset("{}"),
    _broken_dataset('{"_data_files": [1]}'),
    # Mail, forums, dialogues, repositories
    imported("no mbox", "line 1: not an mbox", TEXT.encode(), file="d.mbox"),
    imported("an empty mbox", "no record", b"\n", file="d.mbox"),
    imported(
        "an external entity",
        "XML entity",
        b'<!DOCTYPE p [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + POSTS.encode(),
        file="Posts.xml",
    ),
    imported("cut XML", "not well-formed", POSTS.encode()[:-9], file="Posts.xml"),
    imported("no forum", "neither a post nor", b"<p>\n<row Id='1'/></p>", file="Posts.xml"),
    imported(
        "a post without a number",
        "no number",
        POSTS.replace('"1"', '"x"', 1).encode(),
        file="Posts.xml",
    ),
    imported("a monologue", "no speaker", TEXT.encode(), file="d.txt"),
    imported("a file for git", "is a folder", GOOD, "--format", "git"),
    # Places
    Bad(
        name="no source",
        make=lambda place: ("import", "nowhere.jsonl", "--out", "store"),
        says="no file matches",
    ),
    imported("an unknown suffix", "the format cannot be told", GOOD, file="data.docx"),
    Bad(name="a folder of links", make=_only_links, says="Links in a folder are not followed"),
    Bad(name="a link to nothing", make=_dangling, says="data.jsonl: no such file"),
    Bad(name="a folder of two formats", make=_two_formats, says="Give --format"),
    Bad(name="a store that is there", make=_existing, says="store exists"),
    Bad(
        name="a store below a file",
        make=_below_a_file,
        says="file/secret/store.key: Not a directory",
    ),
    Bad(name="a key that is a folder", make=_key_is_a_folder, says="key: Is a directory"),
]
