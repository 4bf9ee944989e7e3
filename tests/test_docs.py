"""README and docs: short enough, every link and path is there, and the examples run."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import models_zoo
import userdp
from userdp.config.file import load_config

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

# Paths in backticks are meant from one of these folders.
BASES = (ROOT, ROOT / "src" / "userdp", ROOT / "tests", ROOT / "tests" / "redteam")
FOLDERS = {"src", "tests", "docs", "benchmarks", "examples"}
# What a run or a store holds; these are no files of the repository.
MADE = {"model/", "secret/", "tokens/"}
# Files in this package are being renamed; that it is there is all that is asked of them.
RENAMED = "clipping/"


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the heading of every relative link and picture."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, heading = target.partition("#")
            yield (page.parent / path).resolve() if path else page, heading


def anchors(page: Path) -> set[str]:
    """The headings, as links name them."""
    found = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def is_there(path: str) -> bool:
    """Whether some file or folder of the repository is meant by this path; stars match anything."""
    return any(next(base.glob(path.rstrip("/")), None) is not None for base in BASES)


def is_named(dotted: str) -> bool:
    """Whether `userdp.a.b` is a module, or a name in one."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), -1, -1):
        place = ROOT.joinpath("src", "userdp", *parts[:length])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            return length == len(parts) or parts[length] in file.read_text()
    return False


def test_readme_has_at_most_900_words() -> None:
    assert len(README.read_text().split()) <= 900


def test_demo_and_test_stand_at_the_top_of_the_readme() -> None:
    lines = README.read_text().splitlines()[:8]
    assert [line.split("#")[0].strip() for line in lines if line.startswith("    make")] == [
        "make demo",
        "make test",
    ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target, heading in links(page):
        assert target.exists(), target
        assert not heading or heading in anchors(target), (target.name, heading)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_in_backticks_exist(page: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        for word in code.split():
            path = word.partition("::")[0]
            if path.startswith("userdp."):
                name = re.match(r"[\w.]+", path)
                assert name, word
                assert is_named(name[0].rstrip(".")), word
            elif path.startswith((RENAMED, f"src/userdp/{RENAMED}")):
                assert is_there(RENAMED)
            elif re.fullmatch(r"[\w*./-]+\.py", path) or (
                re.fullmatch(r"[\w*./-]+", path)
                and (path.split("/")[0] in FOLDERS or path.endswith("/"))
                and "/" in path
                and path not in MADE
                and not path.startswith("run/")
            ):
                assert is_there(path), word


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"::(test_\w+)", page.read_text()):
        assert f"def {name}" in everything, name


def test_every_page_is_linked_from_another() -> None:
    linked = {target for page in PAGES for target, _ in links(page) if target != page}
    assert not [page.name for page in PAGES if page != README and page not in linked]


def test_the_ten_lines_of_the_readme_run(
    tmp_path: Path, train_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert block
    tokenizer = models_zoo.word_tokenizer()
    model: Any = models_zoo.gpt2(vocabulary=len(tokenizer), positions=128)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "models" / "smollm2")
    (tmp_path / "store").symlink_to(train_store)
    monkeypatch.chdir(tmp_path)
    # The example as it stands, but for its length.
    example = block[1].replace("num_users=5000", "num_users=5000, steps=2")
    assert example != block[1]
    names: dict[str, Any] = {}
    exec(compile(example, "<the ten lines>", "exec"), names)
    assert names["run"].statement.epsilon <= 8.0
    assert userdp.Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 2


@pytest.mark.parametrize("page", ["configuration.md", "bounding.md"])
def test_the_configuration_in_the_docs_is_valid(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text()
    block = re.search(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block
    path = tmp_path / "train.toml"
    path.write_text(block[1])
    assert load_config(path).privacy.epsilon == tomllib.loads(block[1])["privacy"]["epsilon"]


def test_the_picture_shows_the_measured_rows() -> None:
    program = ROOT / "docs" / "speed_picture.py"
    spec = importlib.util.spec_from_file_location("speed_picture", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.draw(json.loads(module.RESULTS.read_text()))
    assert drawn == (ROOT / "docs" / "speed.svg").read_text()
