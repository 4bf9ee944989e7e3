"""Trains, accounts and reports with parts from an installed package; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cli_runner import userdp


def main() -> None:
    found = {}
    for config in sys.argv[1:]:
        run = Path(config).with_suffix("")
        trained = userdp("train", config, "--out", run, "--json")
        if trained.code:
            found[run.name] = {"error": trained.err}
            continue
        report = userdp("report", run, "--json").json
        found[run.name] = {
            "train": trained.json,
            "account": userdp("account", run, "--json").json,
            "card": Path(report["card"]).read_text(),
            "page": Path(report["html"]).read_text(),
            "plan": json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["plan"],
            "bound_to": json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["bound_to"],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
