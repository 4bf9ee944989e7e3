"""The planted faults are still faults of this tree, and the runner tells caught from not caught."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import judge
import planted
import pytest
import run
from planted import Mutant

MUTANTS = planted.load()


@pytest.mark.parametrize("area", sorted({mutant.area for mutant in MUTANTS}))
def test_every_fault_can_still_be_planted_and_its_test_is_there(area: str) -> None:
    old = {m.name: planted.stale(m) for m in MUTANTS if m.area == area}
    assert {name: why for name, why in old.items() if why is not None} == {}


def test_every_fault_is_listed_once() -> None:
    names = Counter((mutant.area, mutant.name) for mutant in MUTANTS)
    changes = Counter((mutant.file, mutant.find, mutant.replace) for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []
    assert [change for change, count in changes.items() if count > 1] == []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function, and its tests."""
    # They need no plugin, and plugins take longer than the tests.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    package, tests = tmp_path / "src" / "userdp", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("FACTOR = 2\n\n\ndef double(x):\n    return FACTOR * x\n")
    (tests / "test_part.py").write_text(
        "import pytest\n"
        "from userdp.part import double\n\n\n"
        "def test_of_three():\n    assert double(3) == 6\n\n\n"
        "def test_of_nothing():\n    assert double(0) == 0\n\n\n"
        "@pytest.fixture\ndef four():\n    return double(2) if double(2) == 4 else 1 / 0\n\n\n"
        "def test_of_a_fixture(four):\n    assert four\n"
    )
    return tmp_path


def fault(**changes: str) -> Mutant:
    made = {
        "area": "here",
        "name": "triples",
        "file": "part.py",
        "find": "FACTOR = 2",
        "replace": "FACTOR = 3",
        "test": "tests/test_part.py::test_of_three",
    }
    return Mutant(**(made | changes))


@pytest.mark.parametrize(
    ("mutant", "verdict"),
    [
        (fault(), judge.CAUGHT),
        (fault(test="tests/test_part.py::test_of_nothing"), judge.SURVIVED),
        # Such faults fail without any test of what they break.
        (fault(replace="FACTOR = two"), judge.BROKEN),
        (fault(find="return FACTOR", replace="return FACTORS"), judge.BROKEN),
        (fault(test="tests/test_part.py::test_of_a_fixture"), judge.BROKEN),
        (fault(test="tests/test_part.py::test_of_four"), judge.BROKEN),
    ],
    ids=["caught", "survived", "no import", "no name", "no fixture", "no test"],
)
def test_fault_counts_as_caught_only_if_its_test_ran_and_failed(
    mutant: Mutant, verdict: str, project: Path
) -> None:
    assert run.try_out(mutant, project).verdict == verdict
    # The tree itself stays as it was.
    assert "FACTOR = 2" in (project / "src" / "userdp" / "part.py").read_text()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"find": "FACTOR = 5"}, "0 times"),
        ({"find": "FACTOR"}, "2 times"),
        ({"replace": "FACTOR = 2"}, "the same"),
        ({"replace": "FACTOR = ("}, "no Python"),
        ({"file": "gone.py"}, "not there"),
        ({"test": "tests/test_gone.py::test_of_three"}, "no test file"),
        ({"test": "tests/test_part.py::test_of_four"}, "no such test"),
        ({"test": "src/userdp/part.py::double"}, "no test file"),
    ],
    ids=str,
)
def test_stale_fault_is_named_with_the_reason(
    changes: dict[str, str], word: str, project: Path
) -> None:
    assert planted.stale(fault(), project) is None
    assert word in (planted.stale(fault(**changes), project) or "")
