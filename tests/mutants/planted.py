"""The planted faults: one-line changes to the source that break privacy, and who must notice.

A fault is data, in the `*.toml` files beside this one, a file for each area:

    [[mutant]]
    name = "the noise is half as large as it is priced"  # which property the fault breaks
    file = "noise/gaussian.py"                           # below src/userdp
    find = "return self.noise_multiplier * sensitivity"  # occurs exactly once in that file
    replace = "return self.noise_multiplier * sensitivity / 2"
    test = "tests/test_noise.py::test_standard_deviation_is_multiplier_times_sensitivity"
"""

from __future__ import annotations

import ast
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
KEYS = {"name", "file", "find", "replace", "test"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault, the test that must fail for it, and the area (data file) it is listed under."""

    area: str
    name: str
    file: str
    find: str
    replace: str
    test: str

    @property
    def module(self) -> str:
        """The module that the fault is planted in."""
        parts = Path(self.file).with_suffix("").parts
        return ".".join(("userdp", *(part for part in parts if part != "__init__")))


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Every planted fault of every area, in the order of the files."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            if entry.keys() != KEYS:
                raise ValueError(f"{path.name}: {entry.get('name')!r} has keys {sorted(entry)}.")
            found.append(Mutant(area=path.stem, **entry))
    return found


def stale(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why the fault can no longer be planted or noticed; None if it can."""
    source = root / "src" / "userdp" / mutant.file
    if not source.is_file():
        return f"src/userdp/{mutant.file} is not there"
    count = source.read_text(encoding="utf-8").count(mutant.find)
    if count != 1:
        return f"`find` occurs {count} times in src/userdp/{mutant.file}, not once"
    if mutant.find == mutant.replace:
        return "`replace` is the same as `find`"
    try:
        ast.parse(_mutated(mutant, source))
    except SyntaxError as error:
        return f"the changed file is no Python: {error.msg}"
    path, _, test = mutant.test.partition("::")
    # A doctest is collected from src, which would be imported instead of the changed copy.
    if not path.startswith("tests/") or not (root / path).is_file():
        return f"{path} is no test file"
    if f"def {test.partition('[')[0].rpartition('::')[2]}(" not in (root / path).read_text():
        return f"{path} has no such test"
    return None


def plant(mutant: Mutant, into: Path, root: Path = ROOT) -> None:
    """Copy the package below `into` with the fault in it; caches of compiled code stay behind."""
    shutil.copytree(
        root / "src" / "userdp", into / "userdp", ignore=shutil.ignore_patterns("__pycache__")
    )
    target = into / "userdp" / mutant.file
    target.write_text(_mutated(mutant, target), encoding="utf-8")


def _mutated(mutant: Mutant, source: Path) -> str:
    return source.read_text(encoding="utf-8").replace(mutant.find, mutant.replace)
