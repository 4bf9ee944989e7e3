"""`userdp import`: good sources, and every bad one of the fault list.

Held to behaviour: exit code 2, the file and the line named, no store written, and not a byte of a
record's text or of a user's id in what is printed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from cli_runner import Result, answer, python, userdp
from userdp.errors import InputError

TEXT = "zebracanary"
USER = "quokkacanary"


def line(user: object = USER, text: object = TEXT, **more: object) -> bytes:
    return json.dumps({"user": user, "text": text} | more).encode() + b"\n"


GOOD = line("ann") + line("bob") + line("ann")


def bad_import(folder: Path, content: bytes, *options: object, name: str = "data.jsonl") -> Result:
    """Import `content`, which must be refused and leave no store."""
    source = folder / name
    source.write_bytes(content)
    result = userdp("import", source, "--out", folder / "store", "--json", *options)
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert result.err.count("\n") == 1, "one line"
    assert TEXT not in result.err
    assert USER not in result.err.lower()
    # A new pseudonym key beside the store is no data and may stay.
    assert {path.name for path in folder.iterdir()} <= {name, "secret"}
    return result


BAD: dict[str, tuple[bytes, int]] = {
    "null user": (GOOD + line(None), 4),
    "empty user": (GOOD + line(""), 4),
    "blank user": (GOOD + line("  \t"), 4),
    "user missing": (GOOD + json.dumps({"text": TEXT}).encode() + b"\n", 4),
    "null in a list of owners": (GOOD + line([USER, None]), 4),
    "no owner in a list": (GOOD + line([]), 4),
    "user is a float": (line(1) + line(1.0), 2),
    "user is a boolean": (GOOD + line(True), 4),
    "user is an object": (GOOD + line({"id": USER}), 4),
    "user with an escaped NUL": (GOOD + line(USER + "\x00"), 4),
    "user with a lone surrogate": (GOOD + line("x").replace(b'"x"', b'"\\ud800"'), 4),
    "text missing": (GOOD + json.dumps({"user": USER}).encode() + b"\n", 4),
    "text is a number": (GOOD + line(text=17), 4),
    "text is null": (GOOD + line(text=None), 4),
    "text with an escaped NUL": (GOOD + line(text=TEXT + "\x00"), 4),
    "text with a lone surrogate": (GOOD + line(text="x").replace(b'"x"', b'"\\udfff"'), 4),
    "invalid UTF-8": (GOOD + line().replace(b"zebra", b"zebra\xff\xfe"), 4),
    "UTF-16": (line().decode().encode("utf-16"), 1),
    "raw NUL": (GOOD + line().replace(b"zebra", b"zebra\x00"), 4),
    "cut line": (GOOD + line()[:-8], 4),
    "not JSON": (GOOD + TEXT.encode() + b"\n" + GOOD, 4),
    "two objects on a line": (GOOD + line().strip() + line(), 4),
    "a list": (GOOD + json.dumps([USER, TEXT]).encode() + b"\n", 4),
    "a string": (GOOD + json.dumps(TEXT).encode() + b"\n", 4),
    "nested beyond reason": (GOOD + b"[" * 100_000 + b"\n", 4),
    "user is a number of 10,000 digits": (
        GOOD + line("x").replace(b'"x"', b"7" * 10_000),
        4,
    ),
    "columns of another name": (json.dumps({"who": USER, "what": TEXT}).encode() + b"\n", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_bad_line_is_refused_with_its_file_and_number(what: str, tmp_path: Path) -> None:
    content, number = BAD[what]
    result = bad_import(tmp_path, content)
    assert re.search(rf"data\.jsonl\b.*\bline {number}\b", result.err), result.err


def test_lines_without_user_are_counted(tmp_path: Path) -> None:
    result = bad_import(tmp_path, GOOD + line(None) + line("cy") + line("") + line(None))
    assert "line 4" in result.err
    assert re.search(r"\b3\b", result.err)


COLLISIONS = {
    "case": ("Quokka-A", "quokka-a"),
    "white space": ("quokka-b", " quokka-b "),
    "width": ("quokka-c", "\uff51uokka-c"),
    "ligature": ("quokka-fi", "quokka-\ufb01"),
    "sharp s": ("quokka-strasse", "quokka-stra\u00dfe"),
    "composition": ("quokka-\u00e9", "quokka-e\u0301"),
}


@pytest.mark.parametrize("what", COLLISIONS)
def test_ids_equal_after_normalisation_are_refused_until_the_caller_says(
    what: str, tmp_path: Path
) -> None:
    first, second = COLLISIONS[what]
    content = line(first) + line("someone else") + line(second)
    result = bad_import(tmp_path, content)
    assert "--ids merge" in result.err
    assert "--ids exact" in result.err
    assert "quokka" not in result.err.lower()
    source = tmp_path / "data.jsonl"
    merged = userdp("import", source, "--out", tmp_path / "m", "--ids", "merge", "--json").json
    exact = userdp("import", source, "--out", tmp_path / "e", "--ids", "exact", "--json").json
    assert (merged["users"], exact["users"]) == (2, 3)


def test_whole_numbers_are_ids(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(line(1) + line(2) + line(1))
    assert userdp("import", source, "--out", tmp_path / "s", "--json").json["users"] == 2


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    content = gzip.compress(b"".join(line(f"u{i}", os.urandom(40).hex()) for i in range(500)))
    result = bad_import(tmp_path, content[: len(content) // 2], name="data.jsonl.gz")
    assert "data.jsonl.gz" in result.err
    assert "gzip" in result.err


def test_corrupt_gzip_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"".join(line(f"u{i}") for i in range(500))))
    content[len(content) // 2] ^= 0xFF
    result = bad_import(tmp_path, bytes(content), name="data.jsonl.gz")
    assert "data.jsonl.gz" in result.err


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_source_without_records_is_refused(tmp_path: Path, content: bytes) -> None:
    bad_import(tmp_path, content)


def test_source_of_empty_texts_has_no_users_and_is_refused(tmp_path: Path) -> None:
    bad_import(tmp_path, line(text="") + line(text="  \n"))


def test_missing_source_is_refused(tmp_path: Path) -> None:
    result = userdp("import", tmp_path / "none.jsonl", "--out", tmp_path / "store")
    assert result.code == 2
    assert "none.jsonl" in result.err
    assert not (tmp_path / "store").exists()


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    result = bad_import(tmp_path, GOOD, name="data.docx")
    assert "--format" in result.err


def test_second_source_bad_imports_nothing_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "bad.jsonl").write_bytes(GOOD + b"{\n")
    result = userdp(
        "import", tmp_path / "good.jsonl", tmp_path / "bad.jsonl", "--out", tmp_path / "store"
    )
    assert result.code == 2
    assert re.search(r"bad\.jsonl\b.*\bline 4\b", result.err)
    assert not (tmp_path / "store").exists()


def test_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD)
    out = tmp_path / "store"
    out.mkdir()
    (out / "mine").write_text("mine")
    result = userdp("import", source, "--out", out)
    assert result.code == 2
    assert "exists" in result.err
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_key_that_is_none_is_refused(tmp_path: Path) -> None:
    source, key = tmp_path / "data.jsonl", tmp_path / "short.key"
    source.write_bytes(GOOD)
    key.write_bytes(b"short")
    result = userdp("import", source, "--out", tmp_path / "store", "--key", key)
    assert result.code == 2
    assert "short.key" in result.err
    assert not (tmp_path / "store").exists()


# VmHWM rather than ru_maxrss, which a child inherits from the process that started it.
HUGE = (
    "import re, sys\n"
    "from pathlib import Path\n"
    "from userdp.cli import main\n"
    "sys.argv = ['userdp', *sys.argv[1:]]\n"
    "try:\n"
    "    main()\n"
    "finally:\n"
    "    status = Path('/proc/self/status').read_text()\n"
    "    peak = int(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1])\n"
    "    print('peak', peak // 1024, file=sys.stderr)\n"
)

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc, which Linux has"
)


def _peak_megabytes(stderr: str) -> int:
    found = re.search(r"^peak (\d+)$", stderr, re.MULTILINE)
    assert found is not None, stderr
    return int(found[1])


@pytest.mark.slow
@needs_proc
def test_line_of_100_megabytes_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    with source.open("wb") as file:
        file.write(GOOD + b'{"user": "u", "text": "')
        for _ in range(100):
            file.write(b"z" * 2**20)
        file.write(b'"}\n')
    result = python(HUGE, "import", source, "--out", tmp_path / "store")
    assert result.returncode == 2
    assert re.search(r"data\.jsonl\b.*\bline 4\b", result.stderr)
    assert not (tmp_path / "store").exists()
    assert _peak_megabytes(result.stderr) < 1000


@needs_proc
def test_gzip_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    # Three megabytes that would be three gigabytes of one line.
    source = tmp_path / "data.jsonl.gz"
    bomb = gzip.compress(b"z" * 2**28, compresslevel=6)
    source.write_bytes(gzip.compress(GOOD + b'{"user": "u", "text": "') + bomb * 12)
    result = python(HUGE, "import", source, "--out", tmp_path / "store")
    assert result.returncode == 2
    assert "data.jsonl.gz" in result.stderr
    assert not (tmp_path / "store").exists()
    assert _peak_megabytes(result.stderr) < 2000


def test_json_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD + line("cy", "") + line(["ann", "dee"]))
    data = userdp("import", source, "--out", tmp_path / "store", "--json").json
    assert {"records", "users", "edges", "skipped", "fingerprint"} <= set(data)
    assert (data["records"], data["users"], data["edges"]) == (4, 3, 5)
    assert sum(data["skipped"].values()) == 1
    assert len(data["fingerprint"]) == 64


def test_import_says_what_it_did_in_words_and_names_nobody(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(line() + line("bob"))
    result = userdp("import", source, "--out", tmp_path / "store")
    assert result.code == 0
    assert "2 records of 2 users" in result.out
    assert TEXT not in result.out + result.err
    assert USER not in result.out + result.err


def test_a_new_key_lies_in_a_directory_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD)
    key = Path(userdp("import", source, "--out", tmp_path / "store", "--json").json["key"])
    assert key == tmp_path / "secret" / "store.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    # A failed import takes the key away that it made, and no other.
    assert userdp("import", source, "--out", tmp_path / "more", "--user", "nobody").code == 2
    assert list(key.parent.iterdir()) == [key]
    key.unlink()
    assert userdp("import", source, "--out", tmp_path / "more", "--user", "nobody").code == 2
    assert not key.parent.exists()


def test_a_store_is_its_owners_alone(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD)
    store = tmp_path / "store"
    assert userdp("import", source, "--out", store).code == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in store.rglob("*")}
    assert set(modes.values()) == {0o600}
    assert store.stat().st_mode & 0o777 == 0o700


def test_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD)
    userdp("import", source, "--out", tmp_path / "store", "--key", tmp_path / "ids.key")
    assert (tmp_path / "ids.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("options", "users", "edges"),
    [
        ((), 3, 4),
        (("--owners", "first"), 2, 2),
        (("--drop-user", "LIST@example.org"), 2, 3),
    ],
)
def test_owner_options(tmp_path: Path, options: tuple[str, ...], users: int, edges: int) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(line(["ann", "list@example.org"]) + line(["bob", "ann"]))
    data = userdp("import", source, "--out", tmp_path / "store", "--json", *options).json
    assert (data["users"], data["edges"]) == (users, edges)


def test_columns_can_be_named(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(b'{"who": "ann", "what": "hello", "text": 3}\n')
    data = userdp(
        "import",
        source,
        *("--out", tmp_path / "store"),
        *("--user", "who"),
        *("--text", "what"),
        "--json",
    ).json
    assert data["records"] == 1


def test_gzip_and_plain_give_the_same_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(GOOD))
    prints = {
        userdp(
            "import",
            tmp_path / name,
            "--out",
            tmp_path / name[0],
            "--key",
            tmp_path / "k",
            "--json",
        ).json["fingerprint"]
        for name in ("a.jsonl", "b.jsonl.gz")
    }
    assert len(prints) == 1


def test_failed_import_leaves_no_key_either(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"user": "a", "text": "x"}\n{"user": "a", "t\n')
    with pytest.raises(InputError, match="line 2"):
        answer("import", tmp_path / "data.jsonl", "--out", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_unknown_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.unknown").write_text("x")
    with pytest.raises(InputError, match="format cannot be told"):
        answer("import", tmp_path / "data.unknown", "--out", tmp_path / "store")
    with pytest.raises(InputError, match="no such file"):
        answer("import", tmp_path / "none.jsonl", "--out", tmp_path / "store")


def test_an_import_that_skips_everything_says_why(tmp_path: Path) -> None:
    content = line(text=" ") * 3 + line(text="a")
    refused = bad_import(tmp_path, content, "--drop-user", USER)
    assert "Skipped 3: empty text, 1: no owner left." in refused.err
