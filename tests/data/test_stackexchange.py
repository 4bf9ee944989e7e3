from __future__ import annotations

import socket
from pathlib import Path

import pytest
from importing import bring_in, contents, reading

from shared import SHARED, needs_shared
from userdp.data.store import UserStore
from userdp.errors import InputError

POSTS = """\ufeff<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE posts SYSTEM 'posts.dtd'>
<posts>
  <row Id="1" PostTypeId="1" OwnerUserId="7" CreationDate="2011-10-11T19:42:20.713"
       Title="Which ale?" Tags="&lt;ale&gt;" Body="&lt;p&gt;I like &amp;amp; drink it.&lt;/p&gt;" />
  <row Id="2" PostTypeId="2" ParentId="1" OwnerUserId="8" Body="&lt;p&gt;This one.&lt;/p&gt;" />
  <row Id="3" PostTypeId="2" ParentId="1" Body="&lt;p&gt;Gone.&lt;/p&gt;" />
  <row Id="4" PostTypeId="5" OwnerUserId="8" Body="wiki" />
  <row Id="5" PostTypeId="1" OwnerUserId="9" Title="Why?" Tags="|a|b|" Body="" />
</posts>
"""
COMMENTS = """<?xml version="1.0" encoding="utf-8"?>
<comments>
  <row Id="1" PostId="2" Text="Indeed." UserId="10" />
  <row Id="2" PostId="3" Text="Who said that?" UserId="7" />
</comments>
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "Posts.xml").write_text(POSTS, encoding="utf-8")
    (folder / "Comments.xml").write_text(COMMENTS)
    (folder / "Users.xml").write_text("<users/>")
    return folder


def test_posts_and_comments_belong_to_their_owners(dump: Path, tmp_path: Path) -> None:
    result = bring_in(dump, tmp_path / "store")
    assert contents(UserStore.open(tmp_path / "store")) == [
        ("Which ale?\n\nI like & drink it.", [0]),
        ("This one.", [1]),
        ("Why?", [2]),
        ("Indeed.", [3]),
        ("Who said that?", [0]),
    ]
    assert result.skipped == {
        "no owner: deleted or community account": 1,
        "neither question nor answer": 1,
    }


def test_threads_belong_to_all_who_wrote_in_them(dump: Path, tmp_path: Path) -> None:
    bring_in(dump, tmp_path / "store", reading(threads=True))
    assert contents(UserStore.open(tmp_path / "store")) == [
        ("Which ale?\n\nI like & drink it.\n\nThis one.\n\nIndeed.\n\nWho said that?", [0, 1, 2]),
        ("Why?", [3]),
    ]


def test_tags_of_both_formats_can_be_put_into_the_text(dump: Path, tmp_path: Path) -> None:
    bring_in(dump / "Posts.xml", tmp_path / "store", reading(text="{tags}"))
    assert [text for text, _ in contents(UserStore.open(tmp_path / "store"))] == ["ale", "a b"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            '<!DOCTYPE p [<!ENTITY x SYSTEM "file:///etc/hostname">]><p><row Id="1"/></p>',
            r"line \d+: declares or uses an XML entity",
        ),
        (
            '<!DOCTYPE p [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><p><row Body="&b;"/></p>',
            r"line \d+: declares or uses an XML entity",
        ),
        ("<posts>\n<row Id='1'\n", r"line \d+: not well-formed XML"),
        ("<posts>\n<row Id='1'/>\n</posts>", "line 2: neither a post nor a comment"),
        ("<posts>\n<row PostTypeId='1' OwnerUserId='1' Body='x'/></posts>", "line 2: Id"),
    ],
)
def test_dangerous_or_broken_xml_is_refused_with_its_line(
    tmp_path: Path, document: str, message: str
) -> None:
    (tmp_path / "Posts.xml").write_text(document)
    with pytest.raises(InputError, match=rf"^Posts\.xml, {message}"):
        bring_in(tmp_path / "Posts.xml", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Posts.xml").write_text('<?xml version="1.0" encoding="utf-9"?><posts></posts>')
    with pytest.raises(InputError, match="an encoding that nobody knows"):
        bring_in(tmp_path / "Posts.xml", tmp_path / "store")


def test_thread_of_a_number_beyond_64_bits_is_refused_with_its_line(tmp_path: Path) -> None:
    row = f"<row Id='{2**63}' PostTypeId='1' OwnerUserId='1' Body='x'/>"
    (tmp_path / "Posts.xml").write_text(f"<posts>\n{row}</posts>")
    with pytest.raises(InputError, match=r"Posts\.xml, line 2: .* exceeds 64 bits"):
        bring_in(tmp_path / "Posts.xml", tmp_path / "store", reading(threads=True))


def test_endless_element_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "Posts.xml").write_bytes(b"<posts><row Body='" + b"x" * (40 << 20) + b"'/></posts>")
    with pytest.raises(InputError, match="an element longer than 32 MiB"):
        bring_in(tmp_path / "Posts.xml", tmp_path / "store")


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize(
    ("folder", "threads", "records", "users", "edges"),
    [
        ("beer", False, 2225, 781, 2225),
        ("beer", True, 663, 781, 2191),
        ("history_meta", False, 4905, 383, 4905),
        ("history_meta", True, 556, 383, 2531),
    ],
)
def test_real_dumps_give_the_counts_of_their_cleaned_twins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    threads: bool,
    records: int,
    users: int,
    edges: int,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    source = SHARED / "data/raw/stackexchange" / folder
    result = bring_in(source, tmp_path / "store", reading(threads=threads))
    assert (result.records, result.users, result.edges) == (records, users, edges)
