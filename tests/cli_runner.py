"""Run the command line in this process, as a shell would see it: exit code, stdout, stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from userdp import cli


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout, which must be exactly one JSON object on one line."""
        assert self.code == 0, self.err
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def userdp(*arguments: object) -> Result:
    """`userdp ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["userdp", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def answer(*arguments: object) -> dict[str, Any]:
    """The JSON of `userdp ARGUMENTS`. An error is raised here, not printed."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees the same `userdp`."""
    source = str(Path(cli.__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        timeout=120,
        **options,
    )
