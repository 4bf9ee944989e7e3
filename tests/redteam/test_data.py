"""Attacks through preprocessing: one user who leaves must not change what others contribute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_runner import userdp
from stores import KEY
from userdp.data.duplicates import ACROSS_USERS_CAUTION
from userdp.data.identity import IdRule, normalise
from userdp.data.record import Record
from userdp.data.split import write_subset
from userdp.data.store import UserStore, write_store
from userdp.errors import InputError


def stored(path: Path, records: list[Record]) -> Path:
    write_store(records, path, key=KEY)
    return path


def users_and_texts(path: Path) -> set[tuple[bytes, str]]:
    """Every edge of a store, as the pair of a pseudonym and a text."""
    store = UserStore.open(path)
    names = store.pseudonyms.to_pylist()
    record = np.repeat(np.arange(store.num_records), store.users_per_record())
    return {
        (names[user], store.text(int(number)))
        for number, user in zip(record, store.record_users.tolist(), strict=True)
    }


def test_a_user_who_quotes_everybody_removes_nobodys_records(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in rng.integers(0, 400, size=20)) for _ in range(50)]
    others = [Record(text, (f"u{i}",), "here") for i, text in enumerate(texts)]
    # Imported first, so that the copies would be everybody else's.
    quotes = [Record(text, ("target",), "here") for text in texts]
    left: dict[str, set[tuple[bytes, str]]] = {}
    for name, records in (("with", quotes + others), ("without", others)):
        out = tmp_path / f"{name}-unique"
        found = userdp("duplicates", stored(tmp_path / name, records), "--out", out, "--json").json
        assert found["cautions"] == []
        left[name] = users_and_texts(out)
    assert len(left["without"]) == 50
    assert left["without"] < left["with"]
    assert len({user for user, _ in left["with"] - left["without"]}) == 1


def test_one_users_absence_changes_no_other_users_side(tmp_path: Path) -> None:
    records = [Record(f"text {i}", (f"u{i}",), "here") for i in range(1000)]
    train: dict[str, set[tuple[bytes, str]]] = {}
    for name, some in (("with", records), ("without", records[1:])):
        sides = ("--train", tmp_path / f"{name}-train", "--held-out", tmp_path / f"{name}-held")
        assert userdp("split", stored(tmp_path / name, some), *sides).code == 0
        train[name] = users_and_texts(tmp_path / f"{name}-train")
    assert train["without"] == {(user, text) for user, text in train["with"] if text != "text 0"}


def test_a_quote_between_public_text_and_another_user_removes_only_itself(tmp_path: Path) -> None:
    """The target's record is like the public text and like a user's; theirs is not like both."""
    rng = np.random.default_rng(1)
    text = [f"w{n}" for n in rng.integers(0, 5000, size=200)]
    public = tmp_path / "public.jsonl"
    public.write_text(f'{{"text": "{" ".join(text)}"}}\n')
    bridge = Record(" ".join(["one"] * 20 + text[20:]), ("target",), "here")
    user = Record(" ".join(["two"] * 40 + text[40:]), ("user",), "here")
    for name, records in (("with", [bridge, user]), ("without", [user])):
        out = tmp_path / f"{name}-unique"
        store = stored(tmp_path / name, records)
        assert userdp("duplicates", store, "--against", public, "--out", out).code == 0
        assert {text for _, text in users_and_texts(out)} == {user.text}


@pytest.mark.parametrize("adjacency", ["add-remove", "replace", "fixed-graph-zero-out"])
def test_a_quantile_of_records_with_several_owners_is_refused(
    tmp_path: Path, adjacency: str
) -> None:
    """X owns records with everybody: without X all 300 counts change, and none has a price."""
    own = [Record(f"own {i}", (f"u{i}",), "here") for i in range(300)]
    shared = [
        Record(f"shared {i} {j}", ("X", f"u{i}"), "here") for i in range(300) for j in range(3)
    ]
    price = tmp_path / "paid.json"
    options = ("--epsilon", 0.5, "--adjacency", adjacency, "--out", price)
    result = userdp("quantile", stored(tmp_path / "with", own + shared), *options)
    assert (result.code, result.out) == (2, "")
    assert "several owners" in result.err
    assert "userdp stats" in result.err
    assert not price.exists()
    assert userdp("quantile", stored(tmp_path / "without", own), *options).code == 0


@pytest.mark.parametrize("epsilon", [3.0001, 0.50001])
def test_the_price_of_a_look_is_never_printed_below_what_it_is(
    tmp_path: Path, epsilon: float
) -> None:
    store = stored(tmp_path / "store", [Record(f"own {i}", (f"u{i}",), "here") for i in range(9)])
    exact = userdp("quantile", store, "--epsilon", epsilon, "--json").json["epsilon"]
    words = userdp("quantile", store, "--epsilon", epsilon).out
    printed = float(words.split("(epsilon=")[1].split(",")[0])
    assert epsilon * 0.99 < exact <= printed


def test_a_run_on_records_removed_across_users_says_so_in_its_statement(
    tmp_path: Path, config_file: Callable[..., Path], train_store: Path
) -> None:
    removed = tmp_path / "removed"
    assert userdp("duplicates", train_store, "--across-users", "--out", removed).code == 0
    config = config_file()
    config.write_text(config.read_text().replace(str(train_store), str(removed)))
    assert userdp("train", config, "--out", tmp_path / "run").code == 0
    told = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert ACROSS_USERS_CAUTION in told["cautions"]
    assert ACROSS_USERS_CAUTION in userdp("account", tmp_path / "run").out


@pytest.mark.parametrize(
    "spelling",
    [
        *("ann\u200b", "\ufeffann", "a\u00adnn", "ann\u2060", "\u200dANN"),
        *("ann\ufe0f", "a\ufe00nn", "ann\U000e0100", "an\u034fn", "ann\u3164", "ann\uffa0"),
        *("ann\u2800", "ann\u180b", "ann\u180f", "ann\x7f", "\x1bann", "a\x01nn", "ann\u0085"),
        *("ann\U000e0fff", "\ufff0ann", " ann\u2800 ", "\u3164 ann"),
    ],
)
def test_an_id_with_characters_that_nobody_sees_is_the_same_person(spelling: str) -> None:
    # One person under two ids would be clipped twice.
    assert normalise(spelling) == normalise("ann")


def imported(folder: Path, content: bytes, *options: str, name: str = "data.jsonl") -> Path:
    """Import a file under the one key, so that users can be compared between stores."""
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "ids.key").write_bytes(KEY)
    result = userdp(
        "import",
        folder / name,
        *("--out", folder / "store", "--key", folder / "ids.key"),
        *options,
    )
    assert result.code == 0, result
    return folder / "store"


def json_lines(*records: dict[str, object]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


OTHERS: list[dict[str, object]] = [
    {"user": f"u{i}", "author": f"team{i % 2}", "text": f"words {i}"} for i in range(4)
]


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize(
    # `lines`: by place, the first line by which two columns have been seen.
    ("names", "stray", "lines"),
    [
        (("user",), {"author": "target", "text": "mine"}, {0: 2, 2: 3, 4: 5}),
        (
            ("user",),
            {"user": "target", "author": "target", "text": "mine"},
            {0: 1, 2: 3, 4: 5},
        ),
        (("user",), {"user": "target", "text": "mine", "body": "mine"}, {0: 1, 2: 3, 4: 5}),
        (("user", "author"), {"author": "target", "text": "mine"}, {0: 2, 2: 1, 4: 1}),
    ],
)
def test_no_record_chooses_the_columns_of_others(
    tmp_path: Path,
    names: tuple[str, ...],
    stray: dict[str, object],
    lines: dict[int, int],
    place: int,
) -> None:
    """Wherever it stands, a record with another column is no reason to read others by that one."""
    others = [{name: record[name] for name in (*names, "text")} for record in OTHERS]
    content = json_lines(*others[:place], stray, *others[place:])
    (tmp_path / "data.jsonl").write_bytes(content)
    result = userdp("import", tmp_path / "data.jsonl", "--out", tmp_path / "store")
    assert result.code == 2
    assert "Name the right one with --" in result.err
    assert "target" not in result.err
    assert re.search(rf"data\.jsonl, line {lines[place]}: '\w+' and '\w+' ", result.err)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_named_column_is_the_same_for_all_whatever_one_record_holds(
    tmp_path: Path, place: int
) -> None:
    others = [{"user": record["user"], "text": record["text"]} for record in OTHERS]
    stray: dict[str, object] = {"user": "target", "author": "u0", "text": "mine", "body": "other"}
    named = ("--user", "user", "--text", "text")
    alone = users_and_texts(imported(tmp_path / "alone", json_lines(*others), *named))
    content = json_lines(*others[:place], stray, *others[place:])
    both = users_and_texts(imported(tmp_path / "with", content, *named))
    assert len(alone) == 4
    assert alone < both
    assert {text for _, text in both - alone} == {"mine"}


CHAT: list[dict[str, str]] = [{"role": "user", "content": "mine"}]


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("column", ["text", "body", "content", "message", "messages"])
@pytest.mark.parametrize(("most", "stray"), [("words", CHAT), (CHAT, "words")])
def test_no_record_says_whether_the_texts_of_others_are_chats(
    tmp_path: Path, column: str, most: object, stray: object, place: int
) -> None:
    """Chats and plain texts in one column are refused, whichever comes first."""
    others: list[dict[str, object]] = [{"user": f"u{i}", column: most} for i in range(4)]
    content = json_lines(*others[:place], {"user": "target", column: stray}, *others[place:])
    (tmp_path / "data.jsonl").write_bytes(content)
    result = userdp("import", tmp_path / "data.jsonl", "--out", tmp_path / "store")
    assert result.code == 2
    # The first line that differs from those before it.
    assert f"data.jsonl, line {place + 1 if place else 2}: field {column!r} is " in result.err
    assert "mine" not in result.err
    assert "words" not in result.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"List-Id: <bob.example.org>",
        b"List-Post: <mailto:bob@example.org>",
        b"List-ID: Bob <bob.example.org>\nPrecedence: list",
    ],
)
def test_a_senders_header_takes_no_receiver_from_the_owners(tmp_path: Path, header: bytes) -> None:
    head = b"From x Wed Apr 13 22:02:37 2005\nFrom: ann@example.org\nTo: bob@example.org\n"
    body = b"\n\nfour words about bob\n"
    plain = imported(tmp_path / "plain", head.rstrip(b"\n") + body, name="a.mbox")
    marked = imported(tmp_path / "marked", head + header + body, name="a.mbox")
    assert len(users_and_texts(plain)) == 2
    assert users_and_texts(marked) == users_and_texts(plain)
    # Who runs the import says which addresses are lists.
    declared = imported(
        tmp_path / "declared", head + header + body, "--drop-user", "bob@example.org", name="a.mbox"
    )
    assert len(users_and_texts(declared)) == 1


def test_an_id_is_compared_the_same_however_often_it_is_normalised() -> None:
    # What is unseen may stand between two characters that NFKC and case folding make one.
    assert normalise("jose\u200b\u0301") == normalise("jos\u00e9")
    assert normalise("\u0391\u03aa\u0301\u0394") == normalise("\u03b1\u0390\u03b4")
    for number in (*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE1000)):
        once = normalise(f"a{chr(number)}\u0301")
        assert normalise(once) == once


ODD_CELLS = ["so", "so ", " so", "so\t", "so\u00a0", "\u200bso \u200b", "so\ufe0f", "S\u00f6"]
"""Cells of a template's id, which two readers must read alike."""


def users_of(source: Path, out: Path, *options: str) -> list[bytes]:
    """The pseudonym of each record's owner, in the order of the source."""
    key = out.parent / "ids.key"
    columns = ("--user", "{site}/{id}", "--ids", "merge")
    result = userdp("import", source, "--out", out, "--key", key, *columns, *options)
    assert result.code == 0, result.err
    store = UserStore.open(out)
    names = store.pseudonyms.to_pylist()
    return [names[user] for user in store.record_users.tolist()]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("odd", ["none", "time", "row"])
def test_both_readers_give_the_same_ids(tmp_path: Path, kind: str, odd: str) -> None:
    rows = [
        {"site": cell, "id": f"{number} ", "text": "a b c", "date": "2020-01-01"}
        for number in range(3)
        for cell in ODD_CELLS
    ]
    plain, strange = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    if kind == "jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows)
        # A duplicate key is for the careful reader to judge, and so is a lone surrogate.
        last = '{"site": "so", "id": "0", "x": "\\ud800", "text": "old", "text": "d e f"}\n'
    else:
        lines = [",".join(f'"{cell}"' for cell in row.values()) for row in rows]
        content = "\n".join(["site,id,text,date", *lines]) + "\n"
        last = 'so,0,"d\ne f",2020-01-01\r\n'
    plain.write_text(content, newline="")
    strange.write_text(content + (last if odd == "row" else ""), newline="")
    options = ("--time", "date") if odd == "time" else ()
    fast, careful = users_of(plain, tmp_path / "a"), users_of(strange, tmp_path / "b", *options)
    assert careful[: len(rows)] == fast
    # Two sites, and three ids in each.
    assert len(set(fast)) == 6
    assert len(set(careful)) == 6


@pytest.mark.parametrize("cell", ["1.0", "true", "[1]", '{"a": 1}'])
@pytest.mark.parametrize("options", [(), ("--time", "date")])
def test_a_template_takes_strings_and_whole_numbers_only(
    tmp_path: Path, cell: str, options: tuple[str, ...]
) -> None:
    source = tmp_path / "a.jsonl"
    good = '{"site": "so", "id": 1, "text": "a b", "date": "2020-01-01"}\n'
    source.write_text(good * 2 + good.replace('"id": 1', f'"id": {cell}'))
    told = userdp("import", source, "--out", tmp_path / "s", "--user", "{site}/{id}", *options)
    assert told.code == 2
    assert "a.jsonl, line 3: field 'id' must hold user ids as strings or whole numbers" in told.err


def test_overlap_with_a_store_of_exact_ids_is_unknown(tmp_path: Path) -> None:
    records = [Record("a b c", ("Ann",), "here"), Record("d e f", ("Bob",), "here")]
    stores: dict[IdRule, UserStore] = {}
    for rule in IdRule:
        write_store(records, tmp_path / rule, key=KEY, id_rule=rule)
        stores[rule] = UserStore.open(tmp_path / rule)
    assert stores[IdRule.REFUSE].shares_users_with(stores[IdRule.MERGE]) == 2
    # Their pseudonyms are of "Ann" and of "ann": no match would say nothing.
    assert stores[IdRule.REFUSE].shares_users_with(stores[IdRule.EXACT]) is None
    # A part of a store can be compared with whatever the store can be compared with.
    for rule in IdRule:
        write_subset(stores[rule], np.arange(1), tmp_path / f"part {rule}")
        assert UserStore.open(tmp_path / f"part {rule}").shares_users_with(stores[rule]) == 1


@pytest.mark.parametrize("forget_mark", [False, True])
def test_cautions_cannot_be_taken_away_with_their_file(tmp_path: Path, forget_mark: bool) -> None:
    whole = UserStore.open(stored(tmp_path / "whole", [Record("a b c", ("ann",), "here")]))
    whole.verify()
    write_subset(whole, np.arange(1), tmp_path / "part", cautions=["removed across users"])
    (tmp_path / "part" / "history.json").unlink()
    path = tmp_path / "part" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sizes"]["history.json"], manifest["sha256"]["history.json"]
    if forget_mark:
        del manifest["history"]
    path.write_text(json.dumps(manifest))
    part = UserStore.open(tmp_path / "part")
    with pytest.raises(InputError, match="taken away with the cautions"):
        part.verify()
    # A store that is made from it would have no cautions either.
    with pytest.raises(InputError, match="taken away with the cautions"):
        write_subset(part, np.arange(1), tmp_path / "again")
