"""Writes a run's report. Everything in it comes from the ledger and the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

import userdp
from userdp.config import Config, load_config
from userdp.report import pictures
from userdp.run_files import read_run, statement_file
from userdp.statement import Statement, epsilon_text


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with paragraphs and a picture (SVG), for the page."""

    heading: str
    paragraphs: Sequence[str]
    picture: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where the parts of a report are."""

    html: Path
    card: Path
    statement: Path


def write_report(
    run: Path,
    *,
    title: str = "Privacy report",
    story: Sequence[Section] = (),
    html: Path | None = None,
    unfinished: bool = False,
) -> ReportFiles:
    """Write report.html (or `html`), MODEL_CARD.md and statement.json into the run's directory.

    A run is refused if it is not closed or does not match the weights in `model/`. With
    `unfinished` it is reported all the same, and the report promises nothing.
    """
    record = read_run(run, unfinished=unfinished)
    ledger = record.ledger
    config = load_config(run / "config.toml")
    statement = record.statement()
    sections = list(story)
    spent: dict[str, Any] = {"paid": ledger.paid, "earlier": ledger.earlier}
    if statement.guarantee and ledger.steps:
        sections.append(
            Section(
                heading="What is left to an attacker",
                paragraphs=[
                    "No test for whether a given user's records were used, with this model or any "
                    "of its intermediate versions in hand, can lie above the red line."
                ],
                picture=pictures.best_attack(ledger.plan, ledger.steps, **spent),
            )
        )
    if statement.is_private and ledger.steps:
        sections.append(
            Section(
                heading="Epsilon as it was spent" if statement.guarantee else "Epsilon as planned",
                paragraphs=["Each step adds to the cost; the ledger holds one row for each."],
                picture=pictures.epsilon_spent(ledger.plan, ledger.steps, **spent),
            )
        )
    values = {
        "title": title,
        "statement": statement.to_json(),
        "epsilon": epsilon_text(statement.epsilon),
        "sections": sections,
        "version": userdp.__version__,
    }
    files = ReportFiles(
        html=html or run / "report.html",
        card=run / "MODEL_CARD.md",
        statement=run / "statement.json",
    )
    files.html.write_text(_environment().get_template("page.html.jinja").render(values))
    # A local directory's full path is not published, only its name.
    configured = config.model.path
    base = Path(configured).name if Path(configured).is_dir() else configured
    files.card.write_text(model_card(statement, config, base=base))
    files.statement.write_bytes(statement_file(statement))
    return files


def model_card(statement: Statement, config: Config, *, base: str, license: str = "") -> str:
    """The card of a model. Empty `base` and `license` are left out of it."""
    values = {
        "statement": statement.to_json(),
        "epsilon": epsilon_text(statement.epsilon),
        "version": userdp.__version__,
        "base": base,
        "license": license,
        "adapter": config.model.lora is not None,
        "sequence_length": config.data.sequence_length,
    }
    return _environment().get_template("card.md.jinja").render(values)


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("userdp", "report"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
