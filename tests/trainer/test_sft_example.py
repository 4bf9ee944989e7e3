"""The example script of TRL becomes private by at most five changed lines, and both run."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from tiny_llama import chats, make_llama, write_lines

import userdp
from userdp.runs.check import check_run

EXAMPLES = Path(__file__).parents[2] / "examples"
BEFORE, PRIVATE = EXAMPLES / "sft_before.py", EXAMPLES / "sft_private.py"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_most_five_lines_change() -> None:
    before, private = (path.read_text().splitlines() for path in (BEFORE, PRIVATE))
    changes = [line for line in difflib.ndiff(before, private) if line[:2] in ("+ ", "- ")]
    added = [line for line in changes if line.startswith("+ ") and line[2:].strip()]
    removed = [line for line in changes if line.startswith("- ") and line[2:].strip()]
    assert len(added) <= 5
    assert len(removed) <= len(added)


@pytest.mark.parametrize("path", [PRIVATE, BEFORE], ids=lambda path: path.stem)
def test_the_script_leaves_an_adapter_that_loads_from_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    make_llama(tmp_path / "model")
    data = write_lines(tmp_path / "chats.jsonl", chats(40))
    with warnings.catch_warnings():
        # TRL warns about machines without an accelerator.
        warnings.simplefilter("ignore")
        monkeypatch.chdir(tmp_path)
        loaded(path).main("model", str(data), "out")
    if path == PRIVATE:
        assert check_run(tmp_path / "out" / "userdp" / "run").ok
        os.makedirs(tmp_path / "other")
        monkeypatch.chdir(tmp_path / "other")
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")


def test_userdp_imports_neither_trl_nor_datasets_nor_pandas() -> None:
    named = [
        (path.name, name)
        for path in Path(userdp.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
    ]
    assert named
    heavy = {"trl", "datasets", "pandas"}
    assert not [(file, name) for file, name in named if str(name).split(".")[0] in heavy]
