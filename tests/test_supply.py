"""What is installed: pinned by version and by hash, listed, and built with few permissions."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCKED = (ROOT / "constraints-hashes.txt").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def tool(name: str) -> ModuleType:
    """A script of `tools/`, imported."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lock, sbom = tool("lock"), tool("sbom")


def test_every_pin_has_hashes_and_nothing_else_has() -> None:
    entries = re.findall(r"^(\S+)==(\S+) \\\n((?:    --hash=\S+(?: \\)?\n)+)", LOCKED, re.MULTILINE)
    assert {name: version for name, version, _ in entries} == lock.pinned()
    for name, _, listed in entries:
        found = re.findall(r"--hash=sha256:([0-9a-f]{64})", listed)
        assert found == sorted(set(found)), name
        assert len(found) == listed.count("\n"), name


def test_no_line_of_the_lock_is_left_over() -> None:
    rest = re.sub(r"^#.*\n|^\S+==\S+ \\\n|^    --hash=sha256:[0-9a-f]{64}(?: \\)?\n", "", LOCKED,
                  flags=re.MULTILINE)  # fmt: skip
    assert rest == ""


@pytest.mark.parametrize("name", ["constraints-hashes.txt", "sbom.json", "tools/lock.py"])
def test_no_address_of_an_index_is_written_down(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()


PAGE = "".join(
    f'<a href="x/{file}#sha256={number:064x}" data-x="1">{file}</a>\n'
    for number, file in enumerate(
        [
            "some_part-1.2-py3-none-any.whl",
            "some_part-1.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "some_part-1.2-cp39-cp39-manylinux_2_17_x86_64.whl",
            "some_part-1.2-cp312-cp312-musllinux_1_2_x86_64.whl",
            "some_part-1.2.1-py3-none-any.whl",
            "some-part-1.2.tar.gz",
            "some-part-1.3.tar.gz",
            "some_part-1.2-1-cp310-abi3-macosx_11_0_arm64.whl",
        ]
    )
)


def test_wheels_of_the_version_for_our_machines_are_locked() -> None:
    assert [int(h, 16) for h in lock.hashes(PAGE, "some-part", "1.2")] == [0, 1, 7]


def test_a_source_archive_is_locked_only_where_there_is_no_wheel() -> None:
    assert [int(h, 16) for h in lock.hashes(PAGE, "some-part", "1.3")] == [6]
    assert lock.hashes(PAGE, "some-part", "1.4") == []


def test_the_list_of_parts_is_current() -> None:
    assert sbom.PLACE.read_text() == sbom.text(), "run `make sbom`"


def test_the_list_of_parts_names_every_pin_and_torch() -> None:
    listed = {part["name"]: part["version"] for part in sbom.sbom()["components"]}
    pinned = {lock.normalised(name): version for name, version in lock.pinned().items()}
    assert listed.items() >= pinned.items()
    assert listed.keys() - pinned.keys() == {"torch"}
    references = [part["bom-ref"] for part in sbom.sbom()["components"]]
    assert len(set(references)) == len(references)
    assert set(sbom.sbom()["dependencies"][0]["dependsOn"]) <= set(references)


def test_there_is_a_workflow() -> None:
    assert WORKFLOWS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_names_actions_by_commit(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^permissions:\n  contents: read\n\S*\n", text, re.MULTILINE)
    assert text.count("permissions:") == 1
    assert "write" not in text
    assert "pull_request_target" not in text
    assert "secrets." not in text
    for action in re.findall(r"uses:\s*(\S+)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
