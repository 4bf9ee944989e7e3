from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importing import KEY, contents

from userdp.data.identity import DropRule, IdRule, Pseudonyms, normalise, pseudonym
from userdp.data.record import Record, Skipped, batches_of
from userdp.data.store import UserStore, write_batches, write_store
from userdp.errors import InputError

owners = st.lists(st.sampled_from(["ann", "Ann", "bob", " bob", "cy", "list", "dot"]), max_size=5)
records = st.lists(
    st.tuples(st.sampled_from(["hi", "", " \n", "\u00a0", "text"]), owners), max_size=12
)


def plain(
    items: list[tuple[str, list[str]]], rule: IdRule, first_only: bool
) -> tuple[list[tuple[str, list[int]]], list[bytes]]:
    """The oracle: one record at a time, with dictionaries."""
    numbers: dict[str, int] = {}
    kept: list[tuple[str, list[int]]] = []
    for text, names in items:
        compared = [name if rule is IdRule.EXACT else normalise(name) for name in names]
        compared = list(dict.fromkeys(name for name in compared if normalise(name) != "list"))
        if not text.strip() or not compared:
            continue
        chosen = compared[:1] if first_only else compared
        kept.append((text, [numbers.setdefault(name, len(numbers)) for name in chosen]))
    return kept, [pseudonym(name, KEY) for name in numbers]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(items=records, rule=st.sampled_from([IdRule.MERGE, IdRule.EXACT]), first_only=st.booleans())
def test_relational_grouping_equals_plain_dictionaries(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[tuple[str, list[str]]],
    rule: IdRule,
    first_only: bool,
) -> None:
    out = tmp_path_factory.mktemp("write") / "store"
    expected, pseudonyms = plain(items, rule, first_only)

    def run() -> None:
        result = write_batches(
            batches_of(Record(text, tuple(names), "here") for text, names in items),
            out,
            pseudonyms=Pseudonyms.under(KEY),
            id_rule=rule,
            first_owner_only=first_only,
            drop=DropRule(ids=frozenset({"LIST"})),
        )
        assert result.records + sum(result.skipped.values()) == len(items)

    if not expected:
        with pytest.raises(InputError, match="nothing to import"):
            run()
        assert not out.exists()
        return
    run()
    store = UserStore.open(out)
    assert contents(store) == expected
    assert store.pseudonyms.to_pylist() == pseudonyms
    for user in range(store.num_users):
        owned = [i for i, (_, numbers) in enumerate(expected) if user in numbers]
        assert store.records_of(user).tolist() == owned
    assert store.texts_of(np.arange(store.num_records)[::-1]) == [
        text for text, _ in reversed(expected)
    ]


def test_fingerprint_depends_on_content_and_key_and_not_on_batches(tmp_path: Path) -> None:
    items = [Record(f"text {i}", (f"user {i % 7}",), "here") for i in range(100)]
    whole = write_store(items, tmp_path / "a", key=KEY)
    pieces = (batch for item in items for batch in batches_of([item]))
    cut = write_batches(pieces, tmp_path / "b", pseudonyms=Pseudonyms.under(KEY))
    assert whole.fingerprint == cut.fingerprint
    assert write_store(items, tmp_path / "e", key=b"x" * 32).fingerprint != whole.fingerprint
    moved = write_store([*items[1:], items[0]], tmp_path / "c", key=KEY)
    assert moved.fingerprint != whole.fingerprint
    regrouped = [Record(item.text, ("one",), "here") for item in items]
    assert write_store(regrouped, tmp_path / "d", key=KEY).fingerprint != whole.fingerprint


def test_collision_is_refused_with_its_place_and_without_the_id(tmp_path: Path) -> None:
    items = [Record("a", ("Zoe",), "line 1"), Record("b", ("other", "zoe"), "line 2")]
    with pytest.raises(InputError, match=r"^line 2: .*--ids merge") as caught:
        write_store(items, tmp_path / "store", key=KEY)
    assert "zoe" not in str(caught.value).lower()
    assert not list(tmp_path.iterdir())


def test_dropped_ids_may_be_spelled_in_many_ways(tmp_path: Path) -> None:
    items = [Record("a", ("LIST", "ann"), "1"), Record("b", ("list", "ann"), "2")]
    result = write_store(items, tmp_path / "s", key=KEY, drop_users=frozenset({"List"}))
    assert (result.users, result.edges) == (1, 2)


def test_skipped_items_are_counted_by_reason(tmp_path: Path) -> None:
    items = [Skipped("spam"), Record("a", ("ann",), "1"), Skipped("spam"), Record("b", (), "2")]
    result = write_store(items, tmp_path / "store", key=KEY)
    assert result.skipped == {"spam": 2, "no owner left": 1}


def test_error_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Record]:
        yield Record("a", ("ann",), "1")
        raise InputError("broken")

    with pytest.raises(InputError, match="broken"):
        write_store(failing(), tmp_path / "store", key=KEY)
    assert not list(tmp_path.iterdir())


def test_changed_file_is_found(tmp_path: Path) -> None:
    write_store([Record("some text", ("ann",), "1")], tmp_path / "store", key=KEY)
    store = UserStore.open(tmp_path / "store")
    store.verify()
    users = tmp_path / "store" / "users.arrow"
    content = bytearray(users.read_bytes())
    content[len(content) // 2] ^= 1
    users.write_bytes(content)
    with pytest.raises(InputError, match=r"users\.arrow: changed since the import"):
        store.verify()
    users.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"users\.arrow: missing or changed"):
        UserStore.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["records.arrow", "record_users.npy", "user_records.npy"])
def test_any_changed_byte_of_content_is_found(tmp_path: Path, name: str) -> None:
    items = [Record("unmistakable", (f"user {i}",), "1") for i in range(50)]
    write_store(items, tmp_path / "store", key=KEY)
    path = tmp_path / "store" / name
    content = bytearray(path.read_bytes())
    position = content.find(b"unmistakable") if name == "records.arrow" else len(content) - 8
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="changed since the import"):
        UserStore.open(tmp_path / "store").verify()


def test_stores_under_one_key_can_be_compared_and_under_two_not(tmp_path: Path) -> None:
    for name, key, users in (("a", KEY, "xy"), ("b", KEY, "yz"), ("c", b"y" * 32, "xy")):
        write_store([Record("t", (user,), "1") for user in users], tmp_path / name, key=key)
    first, second, third = (UserStore.open(tmp_path / name) for name in "abc")
    assert first.shares_users_with(second) == 1
    assert first.shares_users_with(third) is None


def test_ids_are_in_no_file_of_the_store(tmp_path: Path) -> None:
    secret = "unmistakable-id@example.org"
    write_store([Record("some text", (secret,), "1")], tmp_path / "store", key=KEY)
    for path in (tmp_path / "store").iterdir():
        assert secret.encode() not in path.read_bytes()


def test_cohort_of_users_comes_in_one_pass(tmp_path: Path) -> None:
    items = [Record(f"{i}", (f"user {i * i % 11}",), "1") for i in range(200)]
    write_store(items, tmp_path / "store", key=KEY)
    store = UserStore.open(tmp_path / "store")
    users = np.array([3, 0, 3, 5])
    indptr, found = store.records_of_users(users, at_most=4)
    for i, user in enumerate(users):
        assert found[indptr[i] : indptr[i + 1]].tolist() == store.records_of(user)[:4].tolist()
