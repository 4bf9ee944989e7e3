"""The table of faults in docs/sharp_edges.md: all 28 rows, each with tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from shared import SHARED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sharp_edges.md"
GRADES = ("critical", "theoretical", "negligible")


@cache
def rows() -> list[list[str]]:
    """The cells of every numbered row."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The names of the tests that a file defines."""
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_all_28_rows_are_there_in_order() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, 29))
    assert all(len(row) == 5 for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_has_a_grade_and_tests_that_are_there(row: list[str]) -> None:
    _, fault, grade, here, named = row
    assert fault
    assert here
    assert grade.startswith(GRADES)
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
    assert tests
    assert named == ", ".join(f"`{path}::{name}`" for path, name in tests)
    for path, name in tests:
        assert name in defined_in(ROOT / path), name


def test_the_specification_has_no_row_more() -> None:
    specification = SHARED / "FAULTS.md"
    if not specification.is_file():
        pytest.skip("the specification is not beside this checkout")
    numbers = re.findall(r"^\| (\d+) \|", specification.read_text(), re.MULTILINE)
    assert len(numbers) == len(rows())
