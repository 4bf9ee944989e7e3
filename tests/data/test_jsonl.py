from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importing import bring_in, contents, reading

from userdp.data.importers import jsonl
from userdp.data.importers.columns import Columns
from userdp.data.record import ImportBatch
from userdp.data.store import UserStore
from userdp.errors import InputError

GOOD = b'{"user": "ann", "text": "hello"}\n'

FAULTS: dict[str, tuple[bytes, str]] = {
    "cut line": (b'{"user": "bob", "text": "hello\n', "line 3001: not valid JSON"),
    "two objects": (GOOD.strip() + GOOD, "line 3001: not valid JSON"),
    "array": (b"[1, 2]\n", "line 3001: not a JSON object"),
    "NUL byte": (b'{"user": "bob", "text": "a\x00b"}\n', "line 3001: contains a NUL byte"),
    "escaped NUL": (b'{"user": "bob", "text": "a\\u0000b"}\n', "line 3001: .* contains a NUL"),
    "invalid UTF-8": (b'{"user": "bob", "text": "\xff"}\n', "line 3001: not valid UTF-8"),
    "bad elsewhere": (b'{"user": "b", "text": "t", "x": "\xff"}\n', "3001: not valid UTF-8"),
    "lone surrogate": (b'{"user": "bob", "text": "\\ud800"}\n', "line 3001: .* lone surrogate"),
    "null user": (b'{"user": null, "text": "t"}\n' * 2, r"3001: .*missing, null .* in 2 line\(s\)"),
    "no user": (b'{"text": "t"}\n', "line 3001: field 'user' is missing"),
    "blank user": (b'{"user": " ", "text": "t"}\n', r"line 3001: .* as in 1 line\(s\)"),
    "fractional user": (b'{"user": 1.0, "text": "t"}\n', "3001: .* whole numbers, not float"),
    "true user": (b'{"user": true, "text": "t"}\n', "3001: .* whole numbers, not bool"),
    "no text": (b'{"user": "bob"}\n', "line 3001: field 'text' is missing or not a string"),
    "numeric text": (b'{"user": "bob", "text": 5}\n', "3001: .*missing or not a string"),
    "other case": (b'{"user": "ANN", "text": "t"}\n', "line 3001: .*spelled differently"),
    "long line": (b'{"user": "bob", "text": "' + b"x" * (33 << 20) + b'"}\n', "3001: longer than"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_the_middle_names_file_and_line_and_leaves_nothing(
    tmp_path: Path, fault: str
) -> None:
    line, message = FAULTS[fault]
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD * 3000 + line + GOOD * 3000)
    with pytest.raises(InputError, match=message) as caught:
        bring_in(source, tmp_path / "store")
    assert str(caught.value).startswith("data.jsonl, line ")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD * 100_000)
    (tmp_path / "data.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"data\.jsonl\.gz, line \d+: the gzip stream is trunc"):
        bring_in(tmp_path / "data.jsonl.gz", tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
@pytest.mark.parametrize("filling", [b"\x00" * (1 << 20), GOOD * 40_000])
def test_decompression_bomb_is_refused_in_little_memory(tmp_path: Path, filling: bytes) -> None:
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(200):
            file.write(filling)
    # The kernel's own count of this program alone: that of children takes in what forked them.
    script = """
import pathlib, sys
from userdp.cli import main
sys.argv = ["userdp", "import", "bomb.jsonl.gz", "--out", "store"]
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    print(status.split("VmHWM:")[1].split()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "bomb.jsonl.gz, line" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bomb.jsonl.gz"]
    assert 2**14 < int(done.stdout) < 2 * 2**20


def test_spellings_that_duckdb_cannot_read_are_still_imported(tmp_path: Path) -> None:
    """A byte order mark, owners now in a list and now alone: the careful reader takes over."""
    source = tmp_path / "data.jsonl"
    source.write_bytes(
        b"\xef\xbb\xbf"
        + b'{"users": ["ann"], "text": "one"}\n\n  \n'
        + b'{"users": "bob", "text": "two"}\n'
        + b'{"users": [7, "ann"], "text": "three"}'
    )
    bring_in(source, tmp_path / "store")
    assert contents(UserStore.open(tmp_path / "store")) == [
        ("one", [0]),
        ("two", [1]),
        ("three", [2, 0]),
    ]


def test_one_owner_first_and_a_list_later_is_read(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text('{"user": "ann", "text": "a"}\n{"user": ["bob", "ann"], "text": "b"}\n')
    bring_in(source, tmp_path / "store")
    assert contents(UserStore.open(tmp_path / "store")) == [("a", [0]), ("b", [1, 0])]


def test_numbers_and_strings_with_the_same_digits_are_one_user(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text('{"user": 7, "text": "a"}\n{"user": "7", "text": "b"}\n')
    assert bring_in(source, tmp_path / "store").users == 1


lines = st.lists(
    st.fixed_dictionaries(
        {
            "users": st.lists(
                st.text(
                    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
                )
                .filter(lambda name: bool(name.strip()))
                .map(lambda name: "u" + name),
                min_size=1,
                max_size=3,
            ),
            "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
        }
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=25, deadline=None)
@given(lines=lines, ascii_only=st.booleans())
def test_fast_reader_equals_careful_reader(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, object]], ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    path = folder / "data.jsonl"
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=ascii_only) + "\n" for line in lines),
        encoding="utf-8",
    )
    fast: list[tuple[str, tuple[str, ...]]] = []
    for batch in jsonl.batches(path, Columns(), folder):
        fast += as_pairs(batch)
    careful = [(record.text, record.owners) for record in jsonl.records(path)]
    assert fast == careful


def as_pairs(batch: ImportBatch) -> list[tuple[str, tuple[str, ...]]]:
    owners = [batch.decode(cell) for cell in batch.owners.to_pylist()]
    pairs: list[tuple[str, tuple[str, ...]]] = []
    begin = 0
    for text, count in zip(batch.texts.to_pylist(), batch.owner_counts.tolist(), strict=True):
        pairs.append((text, tuple(owners[begin : begin + count])))
        begin += count
    return pairs


def test_templates_join_columns(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(
        '{"play": "Hamlet", "who": 1, "title": "T", "body": "B"}\n'
        '{"play": "Hamlet", "who": 2, "body": "C"}\n'
    )
    bring_in(source, tmp_path / "store", reading("{play}/{who}", "{title}\\n{body}"))
    assert contents(UserStore.open(tmp_path / "store")) == [("T\nB", [0]), ("\nC", [1])]


def test_a_json_file_is_read_by_its_lines_where_it_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("posts.json", "folder/posts.jsonl"):
        (tmp_path / name).write_bytes(GOOD)
    # What lies beside the data describes it.
    (tmp_path / "folder" / "about.json").write_text('{"license": "none"}')
    for source in ("posts.json", "folder"):
        bring_in(tmp_path / source, tmp_path / f"{source} store")
        assert contents(UserStore.open(tmp_path / f"{source} store")) == [("hello", [0])]


def test_chats_keep_roles_and_refuse_plain_text_between_them(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    chat = '{"user": "ann", "messages": [{"role": "user", "content": "hi"}]}\n'
    source.write_text(chat)
    bring_in(source, tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    assert store.manifest["text_kind"] == "chat"
    assert json.loads(store.text(0)) == [{"role": "user", "content": "hi"}]
    source.write_text(chat + '{"user": "ann", "messages": "hi"}\n')
    with pytest.raises(InputError, match=r"line 2: .* not a list of chat messages"):
        bring_in(source, tmp_path / "other")


@pytest.mark.parametrize("column", ["text", "body", "content", "message", "messages", "talk"])
def test_a_column_of_any_name_holds_chats_or_texts_but_not_both(
    tmp_path: Path, column: str
) -> None:
    chat = json.dumps({"user": "ann", column: [{"role": "user", "content": "hi"}]}) + "\n"
    plain = json.dumps({"user": "bob", column: "hi"}) + "\n"
    source = tmp_path / "data.jsonl"
    choice = reading(text=column) if column == "talk" else reading()
    for kind, line in (("chat", chat), ("plain", plain)):
        source.write_text(line * 2)
        bring_in(source, tmp_path / kind, choice)
        assert UserStore.open(tmp_path / kind).manifest["text_kind"] == kind
    for lines_ in (chat + plain, plain + chat):
        source.write_text(lines_)
        with pytest.raises(InputError, match=r"data\.jsonl, line 2: .* Import the two apart"):
            bring_in(source, tmp_path / "other", choice)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "t"}\n{"user": "a", "text": "t"}\n', r"line 1: field 'user' .* 1 line\(s\)"),
        ('{"user": "a"}\n{"user": "a", "text": "t"}\n', "line 1: field 'text' is missing"),
        ('{"user": null, "text": "t"}\n' * 2, r"line 1: field 'user' .* 2 line\(s\)"),
        ('{"user": "a", "text": null}\n' * 2, "line 1: field 'text' is missing"),
        ('{"text": "t"}\n' * 2, "line 1: no user column among"),
        ('{"user": "a"}\n{"author": "a"}\n{"user": "a", "text": "t"}\n', "line 2: 'user' and"),
    ],
)
def test_a_first_record_without_a_column_is_refused_by_its_line(
    tmp_path: Path, content: str, message: str
) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(content)
    with pytest.raises(InputError, match=message):
        bring_in(source, tmp_path / "store")


def test_a_column_that_is_null_does_not_rival_another(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text('{"user": null, "author": "a", "text": "t", "body": null}\n' * 3)
    assert bring_in(source, tmp_path / "store").users == 1


@pytest.mark.parametrize("time", ["true", "Infinity", "NaN", "1e99", '"' + "9" * 99 + '"'])
def test_time_that_cannot_be_read_is_refused_by_its_line(tmp_path: Path, time: str) -> None:
    source = tmp_path / "data.jsonl"
    good = '{"user": "a", "text": "x", "when": 1999}\n'
    source.write_text(good + '{"user": "b", "text": "x", "when": ' + time + "}\n" + good)
    with pytest.raises(InputError, match="line 2: field 'when' is no time"):
        bring_in(source, tmp_path / "store", reading(time="when"))


def test_times_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(
        '{"user": "a", "text": "x", "when": "1970-01-01T00:00:09"}\n{"user": "a", "text": "y"}\n'
    )
    bring_in(source, tmp_path / "store", reading(time="when"))
    times = UserStore.open(tmp_path / "store").times
    assert times is not None
    assert times[0] == 9
    assert times[1] < 0


def test_names_that_look_like_patterns_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a[1]*?'"
    folder.mkdir()
    (folder / "d[2].jsonl").write_bytes(GOOD * 3)
    bring_in(folder / "d[2].jsonl", folder / "store")

    def careful(*_: object, **__: object) -> None:
        raise AssertionError("the fast reader gave up")

    monkeypatch.setattr(jsonl, "records", careful)
    assert bring_in(folder / "d[2].jsonl", folder / "again").records == 3
