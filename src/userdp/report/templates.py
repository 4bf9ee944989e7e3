"""The templates of page and card."""

from __future__ import annotations

import jinja2


def environment() -> jinja2.Environment:
    """Where templates are found. Text in HTML is escaped; a name that is missing is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("userdp", "report"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
