"""Writes a run's report, from its ledger, what it was made of, and what may be released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import userdp
from userdp.files.durable import write_file
from userdp.ledger.book import Ledger
from userdp.names.tasks import Predicted, predicted
from userdp.plans.words import degree_of
from userdp.report import pictures
from userdp.report.card import card_of_run, data_name
from userdp.report.templates import environment
from userdp.runs.facts import RunFacts, base_name, own_loss, read_facts
from userdp.runs.files import read_run, statement_file
from userdp.runs.validation_curve import Point, released_curve
from userdp.statement import Statement, epsilon_text


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with paragraphs and a picture (SVG), for the page."""

    heading: str
    paragraphs: Sequence[str]
    picture: str = ""


@dataclass(frozen=True, kw_only=True)
class Strength:
    """How strong a guarantee is, in words and as the colour of its bar."""

    words: str
    colour: str


STRENGTHS = (
    Strength(words="strong protection", colour="#1f6f5c"),
    Strength(words="moderate protection", colour="#6d8f2a"),
    Strength(words="weak protection", colour="#c08a1c"),
    Strength(words="hardly any protection", colour="#c4622d"),
)
NO_STRENGTH = Strength(words="no guarantee", colour="#b4472e")


def strength(statement: Statement) -> Strength:
    """How strong the statement's guarantee is, by the degrees of its promise in words."""
    return STRENGTHS[degree_of(statement.epsilon)] if statement.guarantee else NO_STRENGTH


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where the parts of a report are."""

    html: Path
    card: Path
    statement: Path


def write_report(
    run: Path,
    *,
    title: str = "",
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
    base = base_name(run, facts)
    curve = released_curve(run)
    told = predicted(facts.task)
    statement = record.statement()
    sections = list(story)
    finite = [point for point in curve if point.loss is not None]
    if len(finite) > 1:
        sections.append(
            Section(
                heading="What it learned",
                paragraphs=[_learned(finite, told)],
                picture=pictures.validation_curve(finite, told.unit),
            )
        )
    spent: dict[str, Any] = {"paid": ledger.paid, "earlier": ledger.earlier}
    if statement.guarantee and ledger.steps:
        sections.append(
            _drawn(
                "What is left to an attacker",
                "No test for whether a given user's records were used, with this model or any of "
                "its intermediate versions in hand, can lie above the red line.",
                lambda: pictures.best_attack(ledger.plan, ledger.priced_steps, **spent),
            )
        )
    if statement.is_private and ledger.steps:
        sections.append(
            _drawn(
                "Epsilon as it was spent" if statement.guarantee else "Epsilon as planned",
                "Each step adds to the cost; the ledger holds one row for each.",
                lambda: pictures.epsilon_spent(ledger.plan, ledger.priced_steps, **spent),
            )
        )
    values = {
        "title": title or f"Privacy report: {base or 'a model'}, run {run.resolve().name}",
        "about": _about(facts, base, run, ledger),
        "strength": strength(statement),
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
    page = environment().get_template("page.html.jinja").render(values)
    card = card_of_run(record, statement).encode()
    write_file(files.html, page.encode())
    write_file(files.card, card)
    if (run / "model").is_dir() and not (run / "model").is_symlink():
        # Whoever uploads the directory uploads this card.
        write_file(run / "model" / "README.md", card)
    write_file(files.statement, statement_file(statement))
    return files


def _about(facts: RunFacts, base: str, run: Path, ledger: Ledger) -> list[tuple[str, str]]:
    """What the page is about. Of a path on this machine only the last name is told."""
    trained = "all weights"
    if facts.is_adapter:
        trained = f"LoRA, rank {facts.adapter_rank}" if facts.adapter_rank else "an adapter"
    data, loss = data_name(ledger), own_loss(ledger.bound_to, facts)
    fingerprint = f", fingerprint {data}" if data else ""
    told = [
        ("model", f"{base or 'not known'}; {trained}"),
        ("run", run.resolve().name),
        ("begun", facts.began),
        ("data", f"{Path(facts.store).name}{fingerprint}"),
        *([("loss", f"one of its own, {loss}")] if loss else []),
        ("optimizer", f"{facts.optimizer}, learning rate {facts.rate}"),
    ]
    return [(name, value) for name, value in told if value]


def _drawn(heading: str, words: str, draw: Callable[[], str]) -> Section:
    """A section with a picture of prices; without it, where numbers are too extreme to draw."""
    try:
        return Section(heading=heading, paragraphs=[words], picture=draw())
    except (ArithmeticError, ValueError):
        # The statement is priced by itself, and must not be lost with a picture.
        return Section(heading=heading, paragraphs=["No picture: its numbers cannot be computed."])


def _learned(curve: Sequence[Point], told: Predicted) -> str:
    first, last = curve[0], curve[-1]
    return (
        f"Loss a {told.unit} on {last.users:,} people who were not trained on: {first.loss:.4f} "
        f"after {first.step:,} steps, {last.loss:.4f} after {last.step:,}. "
        f"{told.right.capitalize()}: {last.accuracy_top1:.1%}, {first.accuracy_top1:.1%} before. "
        "No guarantee "
        "covers these people: whoever trained the model declared that they agree to the release of "
        "these numbers, or that their records are public."
    )
