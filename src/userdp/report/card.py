"""The card of a model: what is promised, what it is for, how well it does, how to load it.

No model is saved without a card, and no card leaves out the mark of its run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import userdp
from userdp.ledger.book import Ledger
from userdp.names.tasks import Predicted, predicted
from userdp.report.templates import environment
from userdp.runs.facts import HUB_NAME, RunFacts, base_name, known_facts, own_loss
from userdp.runs.files import RecordedRun
from userdp.runs.validation_curve import Point, released_curve
from userdp.statement import Statement, epsilon_text


def card_of_run(
    record: RecordedRun, statement: Statement, *, base: str | None = None, license: str = ""
) -> str:
    """The card of a run's model, from what the run's directory says.

    `statement` is the record's own; who writes a card needs it elsewhere, and it takes long to
    price. `base` is the base model's name; by default the one that the run knows.
    """
    run, ledger = record.run, record.ledger
    facts = known_facts(run)
    if base is None:
        base = "" if facts is None else base_name(run, facts)
    return model_card(
        statement,
        facts,
        base=base,
        license=license,
        curve=released_curve(run),
        last_step=ledger.steps,
        data=data_name(ledger),
        loss=own_loss(ledger.bound_to, facts),
    )


def model_card(
    statement: Statement,
    facts: RunFacts | None,
    *,
    base: str,
    license: str = "",
    curve: Sequence[Point] = (),
    last_step: int | None = None,
    data: str = "",
    loss: str = "",
) -> str:
    """The card of a model. What is empty is left out of it, or said to be missing.

    `facts` is None where nobody wrote them down. `curve` holds the points that may be released.
    `last_step` is the step of the released weights: a run that halted is stated with all its
    planned steps. `data` is the public name of the training data. `loss` names one of one's own.
    """
    # A model is described by a point of its own weights only.
    before, after = (
        next((point for point in curve if point.step == step), None)
        for step in (0, statement.steps if last_step is None else last_step)
    )
    told = predicted("" if facts is None else facts.task)
    values = {
        "statement": statement.to_json(),
        "epsilon": epsilon_text(statement.epsilon),
        "version": userdp.__version__,
        "base": base,
        "license": license,
        "facts": facts,
        "loader": "" if facts is None else _loader(facts),
        "data": data,
        "loss": loss,
        "names_hub": HUB_NAME.fullmatch(base) is not None,
        "after": after,
        "quality": [] if after is None else quality(before, after, told),
        "unit": told.unit,
    }
    return environment().get_template("card.md.jinja").render(values)


def _loader(facts: RunFacts) -> str:
    """The class of transformers, or of peft for an adapter, that loads the model."""
    head = {"masked": "MaskedLM", "classification": "SequenceClassification"}.get(
        facts.task, "CausalLM"
    )
    if facts.is_adapter:
        return "AutoPeftModel" if facts.task == "masked" else f"AutoPeftModelFor{head}"
    return f"AutoModelFor{head}"


def quality(before: Point | None, after: Point, told: Predicted) -> list[tuple[str, str, str]]:
    """What was measured, in words: its name, before training, and after it."""

    def row(name: str, form: str, value: Callable[[Point], float | None]) -> tuple[str, str, str]:
        found = [None if point is None else value(point) for point in (before, after)]
        began, ended = ("-" if one is None else format(one, form) for one in found)
        return name, began, ended

    found = [
        row(f"loss a {told.unit}", ".4f", lambda point: point.loss),
        row("perplexity", ",.2f", lambda point: point.perplexity),
        row(told.right, ".1%", lambda point: point.accuracy_top1),
        row("loss, mean over users", ".4f", lambda point: point.mean_user_loss),
        row("loss, worst tenth of users", ".4f", lambda point: point.worst_decile_loss),
    ]
    return [line for line in found if told.has_perplexity or line[0] != "perplexity"]


def data_name(ledger: Ledger) -> str:
    """The keyed fingerprint of the training data, which is public; empty if there is none."""
    return ledger.bound_to.get("data", "")[:16]
