"""Fuzzing that follows which code an input reaches, by atheris, which has to be installed first.

A program of its own, for atheris takes over the process. It feeds bytes to the readers of files
that `targets` has, and stops at the first input that comes out as anything but a refusal.

Run: python tests/fuzz/guided.py TARGET -max_total_time=60
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Hunt with the target named first; the other arguments are libFuzzer's."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "data")]
    atheris: Any = importlib.import_module("atheris")
    # What numba compiles cannot be followed: it is there before the readers are.
    importlib.import_module("userdp.bounding.selection")
    with atheris.instrument_imports(include=["userdp"]):
        targets: Any = importlib.import_module("fuzz.targets")
        judge = importlib.import_module("fuzz.test_fuzz").judge
    name = sys.argv.pop(1)
    (target,) = (target for target in targets.TARGETS if target.name == name)
    atheris.Setup(sys.argv, lambda data: judge(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
