"""Stack Exchange dumps: `Posts.xml`, and `Comments.xml` if it is there.

A single post belongs to its owner. A whole thread (a question, its answers and all comments)
belongs to everyone who wrote in it. If the author deleted the account, the post has no owner and is
skipped, in threads too. Otherwise nobody would be protected for its words.

The XML is read as a stream of rows. Nothing it refers to is opened: a DOCTYPE is ignored, and
declared entities are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat

import pyarrow as pa
import pyarrow.parquet as pq

from userdp.data.engine import EngineName, engine_of
from userdp.data.importers.bounded import MAX_LINE_BYTES, pieces
from userdp.data.importers.columns import Columns, seconds_of, text_of
from userdp.data.importers.markup import plain_text
from userdp.data.record import Record, Skipped
from userdp.errors import InputError

QUESTION, ANSWER = "1", "2"
DEFAULT_TEXT = "{title}\n\n{body}"
STAGED_POSTS = 8192
NO_OWNER = Skipped("no owner: deleted or community account")

POST_SCHEMA = pa.schema(
    [
        ("thread", pa.int64()),
        ("kind", pa.int64()),
        ("id", pa.int64()),
        ("owner", pa.string()),
        ("text", pa.string()),
        ("time", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Post:
    """A question (kind 0), an answer (1) or a comment (2). `parent` is the post it belongs to.

    A post without an owner is not a record, but comments may belong to it.
    """

    kind: int
    id: int
    parent: int
    owner: str | None
    text: str
    time: int | None
    where: str

    def __repr__(self) -> str:
        return f"Post(<secret>, at {self.where})"


def records(sources: list[Path], columns: Columns) -> Iterator[Record | Skipped]:
    """Posts and comments by owner, in the order of the files."""
    for path in sources:
        for item in posts(path, columns):
            if isinstance(item, Skipped):
                yield item
            elif item.owner is None:
                yield NO_OWNER
            else:
                yield Record(text=item.text, owners=(item.owner,), where=item.where, time=item.time)


def thread_records(
    sources: list[Path], columns: Columns, scratch: Path
) -> Iterator[Record | Skipped]:
    """Whole threads, owned by all who wrote in them, in the order of the questions' ids.

    The engine groups the posts, so a dump need not fit into memory.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    staged = scratch / "posts.parquet"
    skipped: Counter[Skipped] = Counter()
    with pq.ParquetWriter(staged, POST_SCHEMA) as writer:
        rows: list[dict[str, Any]] = []
        for path in sources:
            for item in posts(path, columns):
                if isinstance(item, Skipped):
                    skipped[item] += 1
                    continue
                if max(abs(item.id), abs(item.parent)) >= 2**63:
                    raise InputError(f"{item.where}: Id, ParentId or PostId exceeds 64 bits.")
                if item.owner is None:
                    skipped[NO_OWNER] += 1
                rows.append(
                    {
                        "thread": item.id if item.kind == 0 else item.parent,
                        "kind": item.kind,
                        "id": item.id,
                        "owner": item.owner,
                        "text": item.text,
                        "time": item.time,
                    }
                )
                if len(rows) >= STAGED_POSTS:
                    writer.write_table(pa.Table.from_pylist(rows, POST_SCHEMA))
                    rows = []
        writer.write_table(pa.Table.from_pylist(rows, POST_SCHEMA))
    yield from skipped.elements()
    try:
        with engine_of(EngineName.DUCKDB, scratch) as engine:
            table = engine.add_parquet("posts", staged)
            yield from _grouped(engine.batches(_in_threads(table)))
    finally:
        staged.unlink()


def _in_threads(posts: Any) -> Any:
    """Posts by thread: the question, then answers and comments by time.

    The `thread` of a comment may be an answer. It is replaced by that answer's question, even if
    the answer has no owner.
    """
    import ibis

    answers = posts.filter(posts.kind == 1).select(answer=posts.id, question=posts.thread)
    joined = posts.left_join(answers, (posts.kind == 2) & (posts.thread == answers.answer))
    resolved = joined.mutate(thread=ibis.coalesce(joined.question, joined.thread))
    return (
        resolved.filter(resolved.owner.notnull())
        .order_by("thread", "kind", "time", "id")
        .select("thread", "kind", "owner", "text", "time")
    )


def _grouped(batches: Iterator[pa.RecordBatch]) -> Iterator[Record | Skipped]:
    current: int | None = None
    texts: list[str] = []
    owners: dict[str, None] = {}
    time: int | None = None

    def finish() -> Iterator[Record]:
        if texts:
            yield Record(
                text="\n\n".join(texts),
                owners=tuple(owners),
                where=f"thread {current}",
                time=time,
            )

    for batch in batches:
        for row in batch.to_pylist():
            if row["thread"] != current:
                yield from finish()
                current, texts, owners, time = row["thread"], [], {}, row["time"]
            texts.append(row["text"])
            owners.setdefault(row["owner"])
    yield from finish()


def posts(path: Path, columns: Columns) -> Iterator[Post | Skipped]:
    """The posts of `Posts.xml`, or the comments of `Comments.xml`."""
    template = columns.text or DEFAULT_TEXT
    for line, row in rows(path):
        where = f"{path.name}, line {line}"
        if "PostTypeId" in row:
            kind = {QUESTION: 0, ANSWER: 1}.get(row["PostTypeId"])
            if kind is None:
                yield Skipped("neither question nor answer")
                continue
            body, parent = plain_text(row.get("Body", "")), row.get("ParentId", "0")
        elif "PostId" in row:
            kind, body, parent = 2, row.get("Text", "").strip(), row["PostId"]
        else:
            raise InputError(f"{where}: neither a post nor a comment: no PostTypeId, no PostId.")
        owner = row.get("OwnerUserId") or row.get("UserId") or ""
        fields = {
            "title": row.get("Title", "").strip(),
            "body": body,
            "tags": " ".join(tags_of(row.get("Tags", ""))),
        }
        text = text_of(fields, template, where).strip()
        if not text:
            yield Skipped("empty text")
            continue
        try:
            number, parent_number = int(row["Id"]), int(parent)
        except (KeyError, ValueError):
            raise InputError(f"{where}: Id, ParentId or PostId is missing or no number.") from None
        yield Post(
            kind=kind,
            id=number,
            parent=parent_number,
            owner=None if owner in ("", "-1") else owner,
            text=text,
            time=seconds_of(row.get("CreationDate"), "CreationDate", where),
            where=where,
        )


def tags_of(cell: str) -> list[str]:
    """The tags of a question, in the old format or the new one.

    >>> tags_of("<ale><yeast>"), tags_of("|ale|yeast|")
    (['ale', 'yeast'], ['ale', 'yeast'])
    """
    return [tag for tag in re.split(r"[<>|]+", cell) if tag]


def rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The attributes of every `<row>` with its line, in bounded memory."""
    parser = expat.ParserCreate()
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    found: list[tuple[int, dict[str, str]]] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "row":
            found.append((parser.CurrentLineNumber, attributes))

    def refuse(*_: Any) -> None:
        raise InputError(
            f"{path.name}, line {parser.CurrentLineNumber}: declares or uses an XML entity; "
            "refused, for entities can read other files or grow without end."
        )

    parser.StartElementHandler = start
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    parser.ExternalEntityRefHandler = None
    fed = 0
    try:
        for piece in pieces(path):
            parser.Parse(piece, False)
            fed += len(piece)
            # Everything since the last event belongs to one unfinished element.
            if fed - max(0, parser.CurrentByteIndex) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path.name}, line {parser.CurrentLineNumber}: an element longer than "
                    f"{MAX_LINE_BYTES // 2**20} MiB."
                )
            yield from found
            found.clear()
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise InputError(f"{path.name}, line {error.lineno}: not well-formed XML.") from None
    except LookupError:
        raise InputError(
            f"{path.name}: declares an encoding that nobody knows. Write it in UTF-8."
        ) from None
    yield from found
