"""Run one test against one changed copy of the package and say how it ended.

A fault counts as caught only if the test ran and failed. If the changed module cannot be imported,
the changed line has a name that does not exist, or the test breaks before its first line, nothing
was caught: any typing mistake would do that.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

import pytest

CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"
# What a typing mistake in a planted line raises.
MISTAKES = (ImportError, NameError, SyntaxError)


class Witness:
    """Counts the tests that ran and failed, and what failed around them."""

    def __init__(self) -> None:
        self.passed = self.failed = self.errors = self.mistakes = 0
        self.reason = ""

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Note what a test raised."""
        if call.when == "call" and call.excinfo is not None:
            self.mistakes += isinstance(call.excinfo.value, MISTAKES)
            self.reason = call.excinfo.typename

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test."""
        self.passed += report.when == "call" and report.passed
        self.failed += report.when == "call" and report.failed
        self.errors += report.when != "call" and report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be collected."""
        self.errors += report.failed

    @property
    def verdict(self) -> str:
        """What the counts mean for the planted fault; if it was caught, by which exception."""
        if self.errors or self.mistakes:
            return BROKEN
        if self.failed:
            return f"{CAUGHT} {self.reason}"
        return SURVIVED if self.passed else BROKEN


def judge(module: str, test: str, *, root: Path, source: Path, output: Path) -> None:
    """Run `test` of the tree at `root` on the package in `source`, in a process made for it.

    What is printed goes to `output`; its last line is the verdict.
    """
    # pytest collects garbage often. What the forked process brought along is none.
    gc.freeze()
    # Written line by line, so that it is complete whatever the test does to this process.
    with output.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.chdir(root)
        sys.path.insert(0, str(source))
        # Programs that the test starts shall see the same package. No compiled file is left behind:
        # it could be taken for that of the next fault.
        os.environ["PYTHONPATH"] = str(source)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        verdict = _verdict(module, test, source)
        sys.stdout.flush()
        file.write(f"\n{verdict}\n")


def _verdict(module: str, test: str, source: Path) -> str:
    try:
        found = importlib.import_module(module).__file__
    except Exception as error:
        print(f"{module} cannot be imported: {type(error).__name__}: {error}")
        return BROKEN
    if found is None or not Path(found).is_relative_to(source):
        print(f"{module} was imported from {found}, not from the changed copy.")
        return BROKEN
    witness = Witness()
    # One failure is enough, and slow tests may serve. What is imported already cannot be rewritten,
    # and need not be.
    options = ["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    pytest.main([*options, test], plugins=[witness])
    return witness.verdict
