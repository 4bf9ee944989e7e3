"""One mail message: who owns it, and which of its words are the sender's own.

The rules follow Chua et al. 2024, App. B.1. Quoted lines, signatures and patches are cut, and at
least four words must remain. Forwarded messages are skipped, because they carry other people's
text. Messages in which some 20-gram of words occurs twice are skipped as well. Owners are the
sender and everyone in To, Cc and Bcc; with `--owners first`, the sender alone. Addresses are
compared in lower case.

An address that looks like a mailing list owns nothing. The address alone decides. List-ID and
List-Post are not read: the sender writes them, and could take the protection from a receiver.

Nothing in a message can end an import. What cannot be read is skipped and counted.
"""

from __future__ import annotations

import email
import email.header
import email.utils
import re
from dataclasses import dataclass
from datetime import UTC
from email.message import Message
from typing import Any, cast

from userdp.data.importers.markup import SILENT, plain_text
from userdp.data.record import Record, Skipped

REPEATED_WORDS = 20
# A shorter message is a command to a list server, or says nothing.
MIN_WORDS = 4

FORWARDED_SUBJECT = re.compile(r"\s*(fwd?|wg|tr)\s*:", re.IGNORECASE)
FORWARD_MARK = re.compile(
    r"^\s*-{2,}\s*(begin )?forwarded (message|by|from)\b|^begin forwarded message:", re.IGNORECASE
)
REPLY_MARK = re.compile(r"^\s*(-{3,}\s*original message\s*-{3,}|_{20,})\s*$", re.IGNORECASE)
QUOTED = re.compile(r"^ ?[A-Za-z]{0,3}>")
ATTRIBUTION = re.compile(r"(wrote|writes|said|schrieb|a \xe9crit)\s*:\s*$", re.IGNORECASE)
ATTRIBUTION_START = re.compile(r"^\s*(on|at|in|le|am|quoting|\*|>)\b", re.IGNORECASE)
TRAILER = re.compile(
    r"^(signed-off|acked|reviewed|tested|reported|suggested|helped|mentored|co-authored|cc)"
    r"(-by)?:\s.*[@<]",
    re.IGNORECASE,
)
PATCH_START = re.compile(r"^(diff -|Index: \S|--- \S|\+\+\+ \S|@@ -\d|(old|new) mode \d{6}$)")
PATCH_LINE = re.compile(
    r"^([-+ @\\\t=]|diff |index |Index: |new |deleted |old |similarity |rename |copy |Binary |$)"
)
DIFFSTAT = re.compile(r"^ \S.* \|\s+\d+ [+-]*$|^ \d+ files? changed")
SIGNATURE = re.compile(r"^--\s?$")
ADDRESS_IN_TEXT = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")

LIST_DOMAIN = re.compile(
    r"(^|\.)(lists?|groups|listserv|vger)\.|^(googlegroups\.com|groups\.io|yahoogroups\.com)$"
)
LIST_NAME = re.compile(
    r"-(list|lists|announce|devel|users|discuss|bounces|request|commits|owner)$"
    r"|^(undisclosed-recipients|no-?reply|do-?not-?reply|mailer-daemon|postmaster|listserv|majordomo)$"
)


@dataclass(frozen=True, kw_only=True)
class MailRules:
    """What counts as a record."""

    keep_forwarded: bool = False
    keep_repetitive: bool = False
    keep_lists: bool = False
    keep_short: bool = False


def record_of(raw: bytes, where: str, rules: MailRules) -> Record | Skipped:
    """The record in a message, or why there is none."""
    try:
        message = email.message_from_bytes(raw)
        owners = _owners(message, rules)
        if not owners:
            return Skipped("no sender")
        body, has_forwarded_part = _body(message)
        text = own_words(body)
        subject = _header(message, "subject")
        time = _time(message)
    except Exception:
        # The email package raises errors of a dozen kinds on broken messages.
        return Skipped("unreadable message")
    if not rules.keep_forwarded and (
        has_forwarded_part
        or FORWARDED_SUBJECT.match(subject)
        or any(FORWARD_MARK.match(line) for line in body.splitlines())
    ):
        return Skipped("forwarded message")
    if not text:
        return Skipped("no words of the sender")
    if not rules.keep_short and len(text.split()) < MIN_WORDS:
        return Skipped(f"fewer than {MIN_WORDS} words of the sender")
    if not rules.keep_repetitive and repeats_itself(text):
        return Skipped("repeats a 20-gram of words")
    return Record(text=text, owners=owners, where=where, time=time)


def own_words(body: str) -> str:
    """The body without quoted lines, their introductions, patches, trailers and signature.

    >>> own_words("On Monday Ann wrote:\\n> Hello?\\n\\nYes.\\n-- \\nBob")
    'Yes.'
    """
    kept: list[str] = []
    in_patch = False
    for line in body.splitlines():
        if SIGNATURE.match(line) or REPLY_MARK.match(line) or FORWARD_MARK.match(line):
            break
        if QUOTED.match(line):
            in_patch = False
            _drop_attribution(kept)
            continue
        # A patch ends with a line that cannot be part of one. Discussion may go on below it.
        in_patch = PATCH_START.match(line) is not None or (
            in_patch and PATCH_LINE.match(line) is not None
        )
        if in_patch or line == "---" or DIFFSTAT.match(line) or TRAILER.match(line):
            continue
        kept.append(line.rstrip())
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    return ADDRESS_IN_TEXT.sub("<email>", text)


def _drop_attribution(kept: list[str]) -> None:
    """Remove "On ... wrote:", on one line or two, and the blank lines after it."""
    end = len(kept)
    while end and not kept[end - 1].strip():
        end -= 1
    if end and ATTRIBUTION.search(kept[end - 1]):
        begin = end - 1
        if (
            begin
            and not ATTRIBUTION_START.match(kept[begin])
            and ATTRIBUTION_START.match(kept[begin - 1])
        ):
            begin -= 1
        del kept[begin:]


def repeats_itself(text: str) -> bool:
    """Whether some 20 consecutive words occur twice (Chua et al. 2024, App. B.1).

    >>> repeats_itself("the same twenty words " * 10)
    True
    """
    words = text.split()
    seen: set[tuple[str, ...]] = set()
    for i in range(len(words) - REPEATED_WORDS + 1):
        gram = tuple(words[i : i + REPEATED_WORDS])
        if gram in seen:
            return True
        seen.add(gram)
    return False


def _owners(message: Message[Any, Any], rules: MailRules) -> tuple[str, ...]:
    """The sender first, then the receivers, each once and without mailing lists."""
    owners: dict[str, None] = {}
    for field in ("from", "to", "cc", "bcc"):
        for address in _addresses(message, field):
            if rules.keep_lists or not is_list_address(address):
                owners.setdefault(address)
        if field == "from" and not owners:
            sender = _addresses(message, "sender")
            if not sender:
                return ()
            owners.setdefault(sender[0])
    return tuple(owners)


def _addresses(message: Message[Any, Any], field: str) -> list[str]:
    values = [_decoded(value) for value in message.get_all(field, [])]
    found: list[str] = []
    for value in values:
        # Archives write "ann at example.org (Ann)" against harvesters.
        value = re.sub(r"(?<=[\w.+-]) (?:at|AT) (?=[\w-]+\.)", "@", value)
        parsed = [address for _, address in email.utils.getaddresses([value])]
        if not all("@" in address for address in parsed):
            # If one address is broken, the parser loses others of the header. Then whatever looks
            # like an address is an owner: one too many is safe, one too few is not.
            parsed += [match[0] for match in ADDRESS_IN_TEXT.finditer(value)]
        for address in parsed:
            address = address.strip().strip("<>'\"").lower()
            if address and not re.search(r"\s", address) and ":;" not in address:
                found.append(address)
    return found


def is_list_address(address: str) -> bool:
    """Whether an address looks like a mailing list or a machine.

    >>> is_list_address("git@vger.kernel.org"), is_list_address("ann@example.org")
    (True, False)
    """
    name, _, domain = address.partition("@")
    return bool(LIST_DOMAIN.search(domain) or LIST_NAME.search(name))


def _header(message: Message[Any, Any], field: str) -> str:
    value = message.get(field)
    return "" if value is None else _decoded(value)


def _decoded(value: Any) -> str:
    """A header's text. Encoded words in unknown or wrong charsets are kept as they are."""
    try:
        text = str(email.header.make_header(email.header.decode_header(value)))
    except (LookupError, ValueError):
        text = str(value)
    return re.sub(r"\s+", " ", text)


def _time(message: Message[Any, Any]) -> int | None:
    try:
        date = email.utils.parsedate_to_datetime(_header(message, "date"))
        return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _body(message: Message[Any, Any]) -> tuple[str, bool]:
    """The text of the message, and whether another message is enclosed."""
    plain: list[str] = []
    html: list[str] = []
    enclosed = False
    waiting: list[Message[Any, Any]] = [message]
    while waiting:
        part = waiting.pop()
        kind = part.get_content_type()
        if kind == "message/rfc822":
            enclosed = True
        elif part.is_multipart():
            waiting.extend(reversed(cast("list[Message[Any, Any]]", part.get_payload())))
        elif part.get_content_disposition() != "attachment":
            if kind == "text/plain":
                plain.append(_text(part))
            elif kind == "text/html":
                html.append(plain_text(_text(part), without=SILENT | {"blockquote"}))
    return "\n".join(plain if any(text.strip() for text in plain) else html), enclosed


def _text(part: Message[Any, Any]) -> str:
    """A part's text, decoded with the first charset that works."""
    payload: Any = part.get_payload(decode=True)
    data: bytes = payload if isinstance(payload, bytes) else b""
    declared = part.get_content_charset() or "us-ascii"
    for charset in (declared, "utf-8"):
        try:
            return data.decode(charset).replace("\x00", "")
        except (LookupError, ValueError):
            continue
    return data.decode("cp1252", errors="replace").replace("\x00", "")
