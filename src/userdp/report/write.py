"""Writes a run's report. Everything in it comes from the ledger and the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import userdp
from userdp.report import pictures
from userdp.report.card import data_name, model_card
from userdp.report.templates import environment
from userdp.run_facts import read_facts
from userdp.run_files import read_run, statement_file
from userdp.statement import epsilon_text
from userdp.validation_curve import released_curve


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
    facts = read_facts(run)
    # A local directory's full path is not published, only its name.
    base = Path(facts.model).name if Path(facts.model).is_dir() else facts.model
    curve = released_curve(run)
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
    files.html.write_text(environment().get_template("page.html.jinja").render(values))
    card = model_card(statement, facts, base=base, curve=curve, data=data_name(ledger))
    files.card.write_text(card)
    if (run / "model").is_dir():
        # Whoever uploads the directory uploads this card, and not an empty one.
        (run / "model" / "README.md").write_text(card)
    files.statement.write_bytes(statement_file(statement))
    return files
