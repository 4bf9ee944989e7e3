"""The blocks of docs/migration.md that use userdp run as they are printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_llama import make_llama, texts

import userdp

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def test_every_block_that_uses_userdp_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.chdir(tmp_path)
    path = str(make_llama(tmp_path / "llama"))
    classifier = torch.nn.Linear(3, 2)
    names: dict[str, Any] = {
        "userdp": userdp,
        "trl": trl,
        "peft": peft,
        "transformers": transformers,
        "path": path,
        "tokenizer": transformers.AutoTokenizer.from_pretrained(path),
        "dataset": texts(40),
        "classifier": classifier,
        "optimizer": torch.optim.SGD(classifier.parameters(), lr=0.1),
        "cross_entropy": torch.nn.functional.cross_entropy,
        "owners": [user for user in range(200) for _ in range(2)],
        "x": torch.randn(400, 3),
        "y": torch.zeros(400, dtype=torch.long),
    }
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    ours = [block for block in blocks if "userdp." in block]
    assert len(ours) == 3
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        for block in ours:
            exec(compile(block, "docs/migration.md", "exec"), names)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "plain" / "model.safetensors").is_file()
    assert names["step"].statement().guarantee


def test_the_table_of_arguments_says_what_the_code_says() -> None:
    from userdp.trainer.arguments import HARMLESS, MAPPED, REFUSED

    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    beginning = next(i for i, row in enumerate(rows) if "per_device" in row)
    table = rows[beginning : next(i for i, row in enumerate(rows) if "`packing`" in row) + 1]
    own = {"optimizers", "callbacks", "eval_dataset", "compute_loss_func", "data_collator"}
    for row in table:
        left, right = row.strip("| ").split(" | ")
        for name in set(re.findall(r"`(\w+)\W*\w*`", left)) - own:
            assert name not in HARMLESS, name
            assert (name in REFUSED) == ("refused" in right and name != "eval_strategy"), name
            assert name in REFUSED or name in MAPPED, name
