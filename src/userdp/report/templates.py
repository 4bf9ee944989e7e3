"""The templates of page and card."""

from __future__ import annotations

import jinja2

# What would end a cell of a table, or begin a tag, a link or code.
_SIGNS = str.maketrans({sign: f"&#{ord(sign)};" for sign in "|`<>&[]\\"})


def cell(text: str) -> str:
    """Text as it stands in one cell of a table in Markdown, whatever is in it.

    >>> cell("mine |\\n| epsilon | 0.001")
    'mine &#124; &#124; epsilon &#124; 0.001'
    """
    return " ".join(text.split()).translate(_SIGNS)


def environment() -> jinja2.Environment:
    """Where templates are found. Text in HTML is escaped; a name that is missing is an error.

    In Markdown, what is not from the ledger's statement goes through the filter `cell`.
    """
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("userdp", "report"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    found.filters["cell"] = cell
    return found
