"""The `userdp` program: verbs as commands, one file per command.

stdout is the result, stderr the progress. Exit codes: 0 done, 2 wrong input, 3 privacy budget
exhausted, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

from typing import Annotated

import typer

import userdp
from userdp.cli import (
    account,
    bound,
    budget,
    calibrate,
    dictionary,
    duplicates,
    ending,
    evaluate,
    export,
    finalize,
    import_,
    ledger,
    personalize,
    plan,
    quantile,
    quickstart,
    report,
    split,
    stats,
    train,
    verify,
)

app = typer.Typer(
    name="userdp",
    cls=ending.Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"userdp {userdp.__version__}")
        raise typer.Exit


@app.callback()
def userdp_itself(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say which version this is.", callback=_say_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Fine-tune language models with user-level differential privacy."""


app.command("account")(account.account)
app.command("bound")(bound.bound)
app.command("budget")(budget.budget)
app.command("calibrate")(calibrate.calibrate)
app.command("dictionary")(dictionary.dictionary)
app.command("duplicates")(duplicates.duplicates)
app.command("evaluate")(evaluate.evaluate)
app.command("export")(export.export)
app.command("finalize")(finalize.finalize)
app.command("import")(import_.import_)
app.add_typer(ledger.app, name="ledger")
app.command("personalize")(personalize.personalize)
app.command("plan")(plan.plan)
app.command("quantile")(quantile.quantile)
app.command("quickstart")(quickstart.quickstart)
app.command("report")(report.report)
app.command("split")(split.split)
app.command("stats")(stats.stats)
app.command("train")(train.train)
app.command("verify")(verify.verify)


def main() -> None:
    """Run the program; our own errors become one line on stderr and their exit code."""
    # The name is looked up here, so that a test can put another program in its place.
    ending.end(lambda: app())
