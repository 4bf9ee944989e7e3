"""Runs `userdp` commands in children that are killed at chosen points; all imports are paid once.

Every line of stdin is a JSON object: the arguments, and where the child is killed (nowhere if that
is null). Every line of stdout is one, too: the exit status (-9 if it was killed), and how often the
child came to each place that writes to the disk.

    {"args": ["train", ...], "place": "save", "number": 3, "half": true, "seconds": null}

Places are the calls of `os.write`, `os.fsync` and `os.replace`, by what is written: "save" (a
checkpoint), "ledger", "final" (the model and the closing of the run), "other". The child dies
before the call with this number; with `half`, after a write of half the bytes. `seconds` kills it
from outside after that time instead. `cwd` is where the child runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def place_of_call() -> str:
    """What the current call of a function of `os` writes."""
    if threading.current_thread().name == "userdp-checkpoint":
        return "save"
    frame = sys._getframe(2)
    found = "other"
    while frame is not None:
        file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
        name = frame.f_code.co_name
        if file == "runs/checkpoints.py":
            return "save"
        if file == "runs/record.py" and name == "finish":
            return "final"
        if file == "ledger/book.py" and name in ("charge_step", "go_on"):
            found = "ledger"
        frame = frame.f_back
    return found


def watch(kill: dict[str, Any], counts: Counter[str]) -> None:
    """Count the calls, and die at the chosen one."""

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            place = place_of_call()
            counts[place] += 1
            if place == kill["place"] and counts[place] == kill["number"]:
                if kill["half"] and real is write:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    write = os.write
    os.write, os.fsync, os.replace = watched(os.write), watched(os.fsync), watched(os.replace)


def child(command: dict[str, Any], report: Path) -> None:
    """Run one command and end."""
    from userdp import cli

    counts: Counter[str] = Counter()
    watch(command, counts)
    null = os.open(os.devnull, os.O_WRONLY)
    log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(null, 1)
    os.dup2(log, 2)
    os.chdir(command["cwd"])
    sys.argv = ["userdp", *command["args"]]
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    report.write_text(json.dumps(counts))
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve commands until stdin ends."""
    # Everything that is slow to import, before the first fork.
    import userdp.cli
    import userdp.evaluation
    import userdp.training.loop  # noqa: F401

    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "counts.json"
        for line in sys.stdin:
            command = json.loads(line)
            report.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                try:
                    child(command, report)
                finally:
                    os._exit(70)
            if command["seconds"] is not None:
                time.sleep(command["seconds"])
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            counts = json.loads(report.read_text()) if report.exists() else {}
            error = report.with_suffix(".log").read_text()[-2000:]
            answer = {"status": status, "counts": counts, "error": error}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
