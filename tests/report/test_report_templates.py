"""Templates of page and card: HTML is escaped, Markdown is not, and no name may be missing."""

from __future__ import annotations

import jinja2
import pytest

from userdp.report.templates import environment


def test_text_is_escaped_in_pages_and_left_as_it_is_in_cards() -> None:
    found = environment()
    escapes = found.autoescape
    assert callable(escapes)
    assert escapes("page.html.jinja")
    assert not escapes("card.md.jinja")


def test_a_name_that_is_missing_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="epsilon"):
        environment().from_string("{{ epsilon }}").render()


def test_every_template_can_be_read() -> None:
    found = environment()
    names = found.list_templates(filter_func=lambda name: name.endswith(".jinja"))
    assert {name.rsplit(".", 2)[1] for name in names} >= {"html", "md"}
    for name in names:
        assert found.get_template(name)
