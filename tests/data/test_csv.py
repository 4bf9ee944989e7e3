from __future__ import annotations

import csv as stdlib_csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importing import bring_in, contents, reading

from userdp.data.importers import csv
from userdp.data.importers.columns import Columns
from userdp.data.store import UserStore
from userdp.errors import InputError

HEAD, GOOD = b"user,text\n", b"ann,hello\n"

FAULTS: dict[str, tuple[bytes, str]] = {
    "too many fields": (b"a,b,c\n", "line 3002: 3 fields, but the header has 2"),
    "too few fields": (b"a\n", "line 3002: 1 fields, but the header has 2"),
    "NUL byte": (b"a,x\x00y\n", "line 3002: contains a NUL byte"),
    "invalid UTF-8": (b"a,\xff\n", "line 3002: not valid UTF-8"),
    "no user": (b",text\n", r"line 3002: column 'user' is empty, as in 1 line\(s\)"),
    "id of a program without one": (b"nan,text\n", r"line 3002: column 'user' is empty, as in 1"),
    "decimal id": (b"1.0,text\n", "line 3002: column 'user' must hold user ids as words or whole"),
    "open quote": (b'a,"text\n', "line 3002: not valid CSV"),
    "other case": (b"ANN,t\n", "line 3002: .*spelled differently"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_the_middle_names_file_and_line(tmp_path: Path, fault: str) -> None:
    line, message = FAULTS[fault]
    (tmp_path / "data.csv").write_bytes(HEAD + GOOD * 3000 + line + GOOD * 3000)
    with pytest.raises(InputError, match=message) as caught:
        bring_in(tmp_path / "data.csv", tmp_path / "store")
    assert str(caught.value).startswith("data.csv, line ")
    assert not (tmp_path / "store").exists()


def test_two_columns_for_one_purpose_are_refused_until_one_is_named(tmp_path: Path) -> None:
    source = tmp_path / "data.csv"
    source.write_bytes(b"user,author,text\nann,bob,hello\n")
    with pytest.raises(InputError, match=r"line 1: 'user' and 'author' .*--user COLUMN"):
        bring_in(source, tmp_path / "store")
    assert bring_in(source, tmp_path / "store", reading(user="author")).users == 1


cell = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(cell.map(lambda text: "u" + text), cell), min_size=1, max_size=12))
def test_what_python_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    written = io.StringIO(newline="")
    stdlib_csv.writer(written, quoting=stdlib_csv.QUOTE_ALL).writerows([("user", "text"), *rows])
    (folder / "data.csv").write_bytes(written.getvalue().encode())
    found = [
        pair
        for batch in csv.batches(folder / "data.csv", Columns(), folder)
        for pair in zip(batch.owners.to_pylist(), batch.texts.to_pylist(), strict=True)
    ]
    assert found == rows


def test_tsv_gzip_templates_and_missing_columns(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv.gz"
    path.write_bytes(gzip.compress(b"site\tid\ttitle\tbody\nx\t1\tT\tB\nx\t2\t\tC\n"))
    bring_in(path, tmp_path / "store", reading("{site}:{id}", "{title}{body}"))
    assert contents(UserStore.open(tmp_path / "store")) == [("TB", [0]), ("C", [1])]
    with pytest.raises(InputError, match="there is no column 'nobody'"):
        bring_in(path, tmp_path / "other", reading("nobody", "body"))
    with pytest.raises(InputError, match="no user column among"):
        bring_in(path, tmp_path / "other", reading(None, "body"))


@pytest.mark.parametrize(
    "cell", ["nan", "NaN", "<NA>", "null", "None", " nan ", "1.0", "-3.", "inf"]
)
@pytest.mark.parametrize("user", ["user", "{site}/{user}"])
@pytest.mark.parametrize("time", [None, "time"])
def test_both_readers_refuse_the_same_ids(
    tmp_path: Path, cell: str, user: str, time: str | None
) -> None:
    row = f"so,{cell},2020,words\n"
    (tmp_path / "data.csv").write_text("site,user,time,text\nso,1,2020,words\n" + row)
    # With a time, the careful reader reads the whole file; without it, DuckDB does.
    with pytest.raises(InputError, match=r"line 3: column"):
        bring_in(tmp_path / "data.csv", tmp_path / "store", reading(user=user, time=time))


def test_words_that_only_look_like_a_missing_id_are_ids(tmp_path: Path) -> None:
    cells = ["Nan", "nancy", "1e5", "none", "NA", "v1.0", "1.0.0", "10"]
    (tmp_path / "data.csv").write_text("user,text\n" + "".join(f"{c},words\n" for c in cells))
    assert bring_in(tmp_path / "data.csv", tmp_path / "store").users == len(cells)


def test_a_file_without_a_header_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("ann,I saw you yesterday\nbob,and then\n")
    with pytest.raises(InputError, match="2 columns, not all of them with a name") as caught:
        bring_in(tmp_path / "data.csv", tmp_path / "store")
    assert "ann" not in str(caught.value)
