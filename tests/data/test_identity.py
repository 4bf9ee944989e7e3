from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userdp.data.identity import (
    DropRule,
    IdRule,
    key_name,
    load_or_create_key,
    normalise,
    pseudonym,
)
from userdp.errors import InputError

# Letters, digits, punctuation, symbols and white space, without the blank of Braille.
SEEN = st.text(st.characters(categories=["L", "N", "P", "S", "Z"], exclude_characters="\u2800"))
UNSEEN = st.sampled_from("\u200b\u00ad\ufe0f\u034f\u3164\u2800\u180b\x00\x1b\x7f\U000e0100")


@given(SEEN)
def test_normalising_is_the_stated_rule(raw_id: str) -> None:
    if any(mark in unicodedata.normalize("NFKD", raw_id) for mark in "\u115f\u1160"):
        return
    compared = raw_id
    for _ in range(4):
        folded = unicodedata.normalize("NFKC", compared).casefold()
        compared = re.sub(r"\s+", " ", folded).strip()
    assert normalise(raw_id) == compared


@given(st.text(), st.text(), UNSEEN)
def test_what_is_not_seen_never_makes_another_person(before: str, after: str, sign: str) -> None:
    assert normalise(before + sign + after) == normalise(before + after)
    assert normalise(normalise(before + sign)) == normalise(before)


def test_width_case_and_space_do_not_make_two_people() -> None:
    assert len({normalise(name) for name in ("Ann", " ann", "\uff21nn", "ANN\t")}) == 1


def test_pseudonyms_differ_by_key_and_do_not_show_the_id() -> None:
    first, second = pseudonym("ann", b"1" * 32), pseudonym("ann", b"2" * 32)
    assert first != second
    assert b"ann" not in first
    names = {key_name(key, rule) for key in (b"1" * 32, b"2" * 32) for rule in IdRule}
    # Refusing and merging compare ids alike.
    assert len(names) == 4


def test_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ids.key"
    key = load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert load_or_create_key(path) == key
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="expected 32 bytes"):
        load_or_create_key(path)


def test_drop_rule_takes_ids_and_patterns_and_refuses_a_broken_one() -> None:
    drop = DropRule(ids=frozenset({"List@x.org"}), matching=r".*-bot")
    assert [drop(name) for name in ("list@X.org", "Build-Bot", "bot")] == [True, True, False]
    with pytest.raises(InputError, match="no regular expression"):
        DropRule(matching="(")
