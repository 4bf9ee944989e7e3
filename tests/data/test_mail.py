from __future__ import annotations

import gzip
import mailbox as stdlib_mailbox
from email.message import EmailMessage
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importing import Format, bring_in, reading

from shared import SHARED, needs_shared
from userdp.data.identity import DropRule
from userdp.data.importers.mail import MailRules, own_words, record_of, repeats_itself
from userdp.data.importers.mailbox import mbox_records
from userdp.data.record import Record, Skipped
from userdp.data.store import UserStore
from userdp.errors import InputError

HEAD = b"From: Ann <Ann@Example.org>\nTo: bob@example.org, cy@example.org\nSubject: hi\n"
BODY = "one two three four five\n"


def read(raw: bytes, rules: MailRules | None = None) -> Record | Skipped:
    return record_of(raw, "here", rules or MailRules())


def text_of(raw: bytes) -> str:
    item = read(raw)
    assert isinstance(item, Record), item
    return item.text


def test_owners_are_sender_then_receivers_without_lists() -> None:
    raw = HEAD + b"Cc: git@vger.kernel.org, dev <dev@lists.example.org>\n\n" + BODY.encode()
    item = read(raw)
    assert isinstance(item, Record)
    assert item.owners == ("ann@example.org", "bob@example.org", "cy@example.org")
    kept = read(raw, MailRules(keep_lists=True))
    assert isinstance(kept, Record)
    assert len(kept.owners) == 5


@pytest.mark.parametrize(
    "broken", [b"c(y <cy@example.org>,", b"d@x.org <cy@example.org>", b"<,cy@example.org"]
)
def test_one_broken_address_does_not_take_the_other_receivers_from_the_owners(
    broken: bytes,
) -> None:
    item = read(b"From: ann@example.org\nTo: bob@example.org, " + broken + b"\n\n" + BODY.encode())
    assert isinstance(item, Record)
    assert {"ann@example.org", "bob@example.org", "cy@example.org"} <= set(item.owners)


def test_quotes_signature_patch_trailers_and_attribution_are_cut() -> None:
    body = (
        "On Monday, Bob\nBob Builder wrote:\n> old words\n>> older\n\nMy own words here.\n"
        "Signed-off-by: Ann <ann@example.org>\n---\n file.c | 3 ++-\n 1 file changed\n\n"
        "diff --git a/file.c b/file.c\n--- a/file.c\n+++ b/file.c\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
        "And more words, to x@y.org.\n-- \nAnn\n"
    )
    assert own_words(body) == "My own words here.\n\nAnd more words, to <email>."


@pytest.mark.parametrize(
    "body",
    [
        "Top words.\n\n-----Original Message-----\nFrom: Bob\nsecret\n",
        "Top words.\n\n________________________________\nFrom: Bob\nsecret\n",
    ],
)
def test_everything_below_an_original_message_is_cut(body: str) -> None:
    assert own_words(body) == "Top words."


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"From: a@b.c\nSubject: FW: news\n\n", BODY),
        (b"From: a@b.c\nSubject: x\n\n", BODY + "---------- Forwarded message ---------\nhi\n"),
        (b"From: a@b.c\nSubject: x\n\n", "---------------------- Forwarded by Bob\n" + BODY),
    ],
)
def test_forwarded_messages_are_skipped_unless_asked_for(head: bytes, body: str) -> None:
    assert read(head + body.encode()) == Skipped("forwarded message")
    kept = read(head + body.encode(), MailRules(keep_forwarded=True, keep_short=True))
    assert kept != Skipped("forwarded message")


def test_repeated_twenty_words_are_found_and_nineteen_are_not() -> None:
    words = [f"w{i}" for i in range(20)]
    assert repeats_itself(" ".join([*words, "x", *words]))
    assert not repeats_itself(" ".join([*words[:19], "x", *words[:19]]))


@pytest.mark.parametrize(
    ("charset", "encoding"),
    [
        ("utf-8", "base64"),
        ("iso-8859-1", "quoted-printable"),
        ("koi8-r", "8bit"),
        ("utf-7", "7bit"),
    ],
)
def test_charsets_and_encodings_are_undone(charset: str, encoding: str) -> None:
    words = (
        "\u0441\u043b\u043e\u0432\u043e four five six" if charset == "koi8-r" else "\xe9t\xe9 a b c"
    )
    message = EmailMessage()
    message["From"] = "ann@example.org"
    message.set_content(words, charset=charset, cte=encoding)
    assert text_of(message.as_bytes()) == words


def test_html_alone_is_read_and_beside_plain_text_is_not() -> None:
    message = EmailMessage()
    message["From"] = "ann@example.org"
    message.set_content(
        "<p>one <b>two</b></p><blockquote>old</blockquote>three four", subtype="html"
    )
    assert text_of(message.as_bytes()) == "one two\nthree four"
    both = EmailMessage()
    both["From"] = "ann@example.org"
    both.set_content("plain words are here")
    both.add_alternative("<p>other</p>", subtype="html")
    both.add_attachment(b"secret", maintype="text", subtype="plain", filename="x.txt")
    assert text_of(both.as_bytes()) == "plain words are here"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe\x00",
        b"From:\n\nbody of four words\n",
        b"From: =?bogus?q?x?= <a@b.c>\nContent-Type: text/plain; charset=none-such\n\nw x y z\n",
        b"From: a@b.c\nContent-Type: multipart/mixed\n\nno boundary here at all\n",
        b"From: a@b.c\nContent-Type: multipart/mixed; boundary=x\n\n--x\n--x--\n",
        b"From: a@b.c\nContent-Transfer-Encoding: base64\n\n!!!!not base64 at all\n",
        b"From: a@b.c\nDate: yesterday-ish 99:99\n\none two three four\n",
        b"From: a@b.c\nContent-Type: ;;;=\n\none two three four\n",
        b"From: " + b"(" * 5000 + b"\n\none two three four\n",
    ],
)
def test_broken_messages_are_records_or_counted(raw: bytes) -> None:
    assert isinstance(read(raw), Record | Skipped)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([b"", HEAD, b"From: a@b.c\nContent-Type: "]))
def test_no_bytes_can_end_an_import(tail: bytes, head: bytes) -> None:
    item = read(head + tail)
    assert isinstance(item, Skipped) or item.text.strip()


def mbox_of(*messages: bytes) -> bytes:
    return b"".join(b"From x Wed Apr 13 22:02:37 2005\n" + message + b"\n" for message in messages)


def test_mbox_counts_every_message_and_takes_from_quoting_back(tmp_path: Path) -> None:
    path = tmp_path / "mail.mbox.gz"
    first = HEAD + b"\nwords before it stand\n\n>From here on there are more\nFrom the start\n"
    path.write_bytes(gzip.compress(mbox_of(first, HEAD + b"\n> only quoted\n", HEAD + b"\nyes\n")))
    items = list(mbox_records(path, MailRules()))
    assert isinstance(items[0], Record)
    assert "From here on there are more\nFrom the start" in items[0].text
    assert items[1:] == [
        Skipped("no words of the sender"),
        Skipped("fewer than 4 words of the sender"),
    ]


def test_mbox_without_empty_lines_between_messages_is_split_where_headers_follow(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mail.mbox"
    first = HEAD + b"\nwords of the first\nFrom noon at 12:30 until 2005 we wait\n"
    path.write_bytes(
        mbox_of(first).rstrip(b"\n") + b"\n" + mbox_of(HEAD + b"\nwords of the second\n")
    )
    texts = [item.text for item in mbox_records(path, MailRules()) if isinstance(item, Record)]
    assert texts == [
        "words of the first\nFrom noon at 12:30 until 2005 we wait",
        "words of the second",
    ]


def test_windows_line_ends_and_single_messages_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.mbox").write_bytes(mbox_of(HEAD + b"\n" + BODY.encode()).replace(b"\n", b"\r\n"))
    (tmp_path / "b.eml").write_bytes(HEAD + b"\n" + BODY.encode())
    result = bring_in([tmp_path / "a.mbox", tmp_path / "b.eml"], tmp_path / "store")
    assert (result.records, result.users) == (2, 3)


def test_standard_library_mailboxes_are_read(tmp_path: Path) -> None:
    messages: list[EmailMessage] = []
    for i in range(5):
        message = EmailMessage()
        message["From"] = f"user{i % 2}@example.org"
        message.set_content(f"this is message number {i}")
        messages.append(message)
    box = stdlib_mailbox.mbox(str(tmp_path / "a.mbox"))
    folder = stdlib_mailbox.Maildir(str(tmp_path / "maildir"))
    for message in messages:
        box.add(message)
        folder.add(message)
    box.close()
    assert bring_in(tmp_path / "a.mbox", tmp_path / "one").records == 5
    result = bring_in(tmp_path / "maildir", tmp_path / "two")
    assert (result.records, result.users) == (5, 2)


def test_tree_of_messages_as_enrons_does_not_follow_links(tmp_path: Path) -> None:
    inbox = tmp_path / "maildir" / "smith-j" / "inbox"
    inbox.mkdir(parents=True)
    (inbox / "1.").write_bytes(HEAD + b"X-Folder: inbox\n\n" + BODY.encode())
    (tmp_path / "outside").write_bytes(HEAD + b"\nstolen words of the outside\n")
    (inbox / "2.").symlink_to(tmp_path / "outside")
    (inbox / "notes").write_bytes(b"no headers at all here\n")
    result = bring_in(tmp_path / "maildir", tmp_path / "store", reading(format=Format.MAILDIR))
    assert (result.records, result.skipped) == (
        1,
        {"a link in a folder: not followed": 1, "not a message": 1},
    )


def test_a_file_that_is_no_mbox_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.mbox").write_text("just text\n")
    with pytest.raises(InputError, match=r"x\.mbox, line 1: not an mbox"):
        bring_in(tmp_path / "x.mbox", tmp_path / "store")


@pytest.mark.slow
@needs_shared
def test_git_list_agrees_with_its_cleaned_twin_within_two_percent(tmp_path: Path) -> None:
    mail = bring_in(
        SHARED / "data/raw/gitml_2005-04_05.mbox.gz",
        tmp_path / "mail",
        drop=DropRule(ids=frozenset({"git@vger.kernel.org"})),
    )
    twin = bring_in(SHARED / "data/gitml_2005-04_05.jsonl.gz", tmp_path / "twin")
    assert mail.records + sum(mail.skipped.values()) == 4311
    assert "unreadable message" not in mail.skipped
    assert abs(mail.records - twin.records) <= 0.02 * twin.records
    assert abs(mail.users - twin.users) <= 0.02 * twin.users
    assert UserStore.open(tmp_path / "mail").times is not None


@pytest.mark.slow
@needs_shared
def test_modern_mail_counts_every_message(tmp_path: Path) -> None:
    mail = bring_in(SHARED / "data/raw/gitml_2022-07.mbox.gz", tmp_path / "mail")
    assert mail.records + sum(mail.skipped.values()) == 2016
    assert "unreadable message" not in mail.skipped
    assert mail.records > 1900
