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
from userdp.data.record import BAD_LINE, BAD_TEXT, BAD_TIME, BAD_USER, ImportBatch, Record
from userdp.data.store import UserStore
from userdp.errors import InputError

GOOD = b'{"user": "ann", "text": "hello"}\n'

FAULTS: dict[str, tuple[bytes, str]] = {
    "cut line": (b'{"user": "bob", "text": "hello\n', BAD_LINE),
    "two objects": (GOOD.strip() + GOOD, BAD_LINE),
    "array": (b"[1, 2]\n", BAD_LINE),
    "NUL byte": (b'{"user": "bob", "text": "a\x00b"}\n', BAD_LINE),
    "escaped NUL": (b'{"user": "bob", "text": "a\\u0000b"}\n', BAD_TEXT),
    "invalid UTF-8": (b'{"user": "bob", "text": "\xff"}\n', BAD_LINE),
    "bad elsewhere": (b'{"user": "b", "text": "t", "x": "\xff"}\n', BAD_LINE),
    "lone surrogate": (b'{"user": "bob", "text": "\\ud800"}\n', BAD_TEXT),
    "null user": (b'{"user": null, "text": "t"}\n', BAD_USER),
    "no user": (b'{"text": "t"}\n', BAD_USER),
    "blank user": (b'{"user": " ", "text": "t"}\n', BAD_USER),
    "fractional user": (b'{"user": 1.0, "text": "t"}\n', BAD_USER),
    "true user": (b'{"user": true, "text": "t"}\n', BAD_USER),
    "user in a list and a bad one": (b'{"user": ["bob", 1.5], "text": "t"}\n', BAD_USER),
    "no text": (b'{"user": "bob"}\n', BAD_TEXT),
    "numeric text": (b'{"user": "bob", "text": 5}\n', BAD_TEXT),
    "chat between texts": (b'{"user": "b", "text": [{"role": "a", "content": "b"}]}\n', BAD_TEXT),
}


@pytest.mark.parametrize("place", [0, 3000])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_skipped_and_counted_and_all_others_are_kept(
    tmp_path: Path, fault: str, place: int
) -> None:
    line, reason = FAULTS[fault]
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD * place + line + GOOD * 3000)
    result = bring_in(source, tmp_path / "store")
    assert (result.records, result.users, result.skipped) == (place + 3000, 1, {reason: 1})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"user": "ANN", "text": "t"}\n', "line 3002: .*spelled differently"),
        (b'{"user": "bob", "text": "' + b"x" * (33 << 20) + b'"}\n', "line 3002: longer than"),
    ],
    ids=["other case", "long line"],
)
def test_what_concerns_the_whole_file_names_file_and_line_and_leaves_nothing(
    tmp_path: Path, line: bytes, message: str
) -> None:
    source = tmp_path / "data.jsonl"
    # The skipped line counts too, so the place is still right.
    source.write_bytes(GOOD * 3000 + b'{"user": 1.5, "text": "t"}\n' + line + GOOD * 3000)
    with pytest.raises(InputError, match=message) as caught:
        bring_in(source, tmp_path / "store")
    assert str(caught.value).startswith("data.jsonl, line ")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


@pytest.mark.parametrize("bad", ["1.5", "true", '" "', '"\\u0000"', "{}"])
def test_record_with_one_bad_id_is_skipped_for_all_its_owners(tmp_path: Path, bad: str) -> None:
    """Kept under the others, it would not be protected for the person behind the bad id."""
    source = tmp_path / "data.jsonl"
    good = '{"users": ["ann", "bob"], "text": "t"}\n'
    source.write_text(good + '{"users": ["ann", ' + bad + '], "text": "t"}\n' + good)
    result = bring_in(source, tmp_path / "store")
    assert (result.records, result.edges, result.skipped) == (2, 4, {BAD_USER: 1})


def test_nothing_but_faults_is_refused_with_the_reasons(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(GOOD * 3 + b"{\n")
    with pytest.raises(InputError, match=rf"no record was found; 3 skipped: {BAD_USER}; 1 skipped"):
        bring_in(source, tmp_path / "store", reading(user="who"))
    source.write_bytes(b"{\n" * 2)
    with pytest.raises(InputError, match=rf"no record was found; 2 skipped: {BAD_LINE}"):
        bring_in(source, tmp_path / "store")


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD * 100_000)
    (tmp_path / "data.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"data\.jsonl\.gz, line \d+: the gzip stream is trunc"):
        bring_in(tmp_path / "data.jsonl.gz", tmp_path / "store")
    assert not (tmp_path / "store").exists()


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
    items = list(jsonl.records(path))
    careful = [(item.text, item.owners) for item in items if isinstance(item, Record)]
    assert len(careful) == len(items)
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


def test_chats_keep_roles_and_plain_text_between_them_is_skipped(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    chat = '{"user": "ann", "messages": [{"role": "user", "content": "hi"}]}\n'
    source.write_text(chat)
    bring_in(source, tmp_path / "store")
    store = UserStore.open(tmp_path / "store")
    assert store.manifest["text_kind"] == "chat"
    assert json.loads(store.text(0)) == [{"role": "user", "content": "hi"}]
    plain = '{"user": "bob", "messages": "hi"}\n'
    for name, lines_ in (("last", chat + plain), ("first", plain + chat)):
        source.write_text(lines_)
        assert bring_in(source, tmp_path / name).skipped == {BAD_TEXT: 1}
        assert UserStore.open(tmp_path / name).manifest["text_kind"] == "chat"


def test_a_column_of_another_name_holds_chats_or_texts_but_not_both(tmp_path: Path) -> None:
    chat = '{"user": "ann", "talk": [{"role": "user", "content": "hi"}]}\n'
    plain = '{"user": "bob", "talk": "hi"}\n'
    source = tmp_path / "data.jsonl"
    source.write_text(chat * 2)
    bring_in(source, tmp_path / "store", reading(text="talk"))
    assert UserStore.open(tmp_path / "store").manifest["text_kind"] == "chat"
    for lines_ in (chat + plain, plain + chat):
        source.write_text(lines_)
        with pytest.raises(InputError, match=r"data\.jsonl, line 2: .* import them apart"):
            bring_in(source, tmp_path / "other", reading(text="talk"))


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


@pytest.mark.parametrize(
    "time", ['"soon"', "true", "Infinity", "NaN", "1e99", '"' + "9" * 99 + '"']
)
def test_time_that_cannot_be_read_skips_that_record_alone(tmp_path: Path, time: str) -> None:
    source = tmp_path / "data.jsonl"
    good = '{"user": "a", "text": "x", "when": 1999}\n'
    source.write_text(good + '{"user": "b", "text": "x", "when": ' + time + "}\n" + good)
    result = bring_in(source, tmp_path / "store", reading(time="when"))
    assert (result.records, result.skipped) == (2, {BAD_TIME: 1})


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
