"""Plain text from HTML, for mail and forum posts. Blocks become line breaks; nothing is fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser

BLOCKS = frozenset(
    "address article blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre section table td "
    "th tr ul".split()
)
SILENT = frozenset({"script", "style", "head", "title"})


class _Stripper(HTMLParser):
    def __init__(self, without: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self._without = without
        self._silent = 0
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._without:
            self._silent += 1
        elif tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._without:
            self._silent = max(0, self._silent - 1)
        elif tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.pieces.append(data)


def plain_text(html: str, *, without: frozenset[str] = SILENT) -> str:
    """The text of an HTML fragment. Elements in `without` are left out with all they contain.

    >>> plain_text("<p>Two &lt; three.</p><ul><li>yes</li></ul>")
    'Two < three.\\n\\nyes'
    """
    stripper = _Stripper(without)
    stripper.feed(html)
    stripper.close()
    text = "".join(stripper.pieces).replace("\r\n", "\n").replace("\x00", "")
    return re.sub(r"[ \t]*\n\s*\n\s*", "\n\n", text).strip()
