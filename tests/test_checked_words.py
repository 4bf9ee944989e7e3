"""Words about a run are written of a checked run only, and nobody else's text stands among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from cli_runner import userdp
from recorded_run import write_run
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.report.card import card_of_run, model_card
from userdp.report.templates import cell
from userdp.runs.facts import base_name, read_facts
from userdp.runs.files import RecordedRun
from userdp.runs.state import restore_finished
from userdp.tasks.causal import CausalTask
from userdp.tasks.own_loss import OwnLoss

FACTS: dict[str, Any] = {
    "model": "gpt2",
    "store": "store",
    "sequence_length": 16,
    "optimizer": "AdamW",
    "learning_rate": 0.1,
    "schedule": "linear",
}
INJECTED = "x |\n| epsilon | 0.001 |\n| y `<b>"
LOSS = f"causal, loss helpful.<locals>.loss {'0' * 64}"


def python_run(path: Path, **facts: Any) -> Path:
    """A run that was not started from a configuration, and what it was made of."""
    run = write_run(path, bound_to={"task": LOSS})
    (run / "config.toml").unlink()
    (run / "run.json").write_text(json.dumps(FACTS | facts))
    return run


def trainers_folder(path: Path) -> tuple[Path, Path]:
    """The output_dir of a trainer, with the weights that it leaves there, and its run."""
    run = write_run(path / "userdp" / "run")
    for file in (run / "model").iterdir():
        shutil.copyfile(file, path / file.name)
    return path, run


def test_a_finished_run_with_other_weights_gets_no_words_when_it_is_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "statement.json").unlink()
    (run / "model" / "model.safetensors").write_bytes(b"others")
    before = (run / "model" / "README.md").read_bytes()
    with pytest.raises(LedgerError, match=r"model/model\.safetensors is not what the ledger's"):
        restore_finished(run, Ledger.read(run / "ledger.jsonl"), nn.Linear(1, 1))
    assert not (run / "statement.json").exists()
    assert (run / "model" / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "extra.safetensors", "config.json"],
)
def test_a_trainers_folder_with_other_weights_is_not_vouched_for(tmp_path: Path, name: str) -> None:
    out, run = trainers_folder(tmp_path / "out")
    assert userdp("account", out).code == 0
    found = userdp("ledger", "verify", out, "--json").json
    assert found["ok"]
    assert any("its run is" in note for note in found["notes"])
    (out / name).write_bytes(b"others")
    found = userdp("ledger", "verify", out, run, "--json")
    assert found.code == 2
    (problem,) = json.loads(found.out)["problems"]
    assert f"{out / name} is not the file that its run closed with" in problem
    refused = userdp("account", out)
    assert refused.code == 2
    assert f"Name the run itself, {run}" in refused.err
    assert userdp("account", run).code == 0
    for file in out.glob("*.safetensors"):
        file.unlink()
    assert userdp("account", out).code == 0, "no weights lie there, so only the run is meant"


def test_weights_that_lie_elsewhere_are_not_vouched_for(tmp_path: Path) -> None:
    out, _ = trainers_folder(tmp_path / "out")
    (out / "model.safetensors").unlink()
    (out / "model.safetensors.index.json").write_text('{"weight_map": {"x": "w/x.safetensors"}}')
    found = json.loads(userdp("ledger", "verify", out, "--json").out)
    assert not found["ok"]
    assert any("model.safetensors is missing" in problem for problem in found["problems"])


def test_text_in_what_a_run_was_made_of_adds_no_row_to_the_card(tmp_path: Path) -> None:
    more = {"optimizer": INJECTED, "schedule": INJECTED, "began": INJECTED}
    run = python_run(tmp_path / "run", model=f"/{INJECTED}", **more)
    files = userdp("report", run, "--json").json
    card, page = Path(files["card"]).read_text(), Path(files["html"]).read_text()
    assert sum(line.startswith("| epsilon |") for line in card.splitlines()) == 1
    assert "<b>" not in card + page
    assert "x &#124; &#124; epsilon &#124; 0.001 &#124; &#124; y &#96;&#60;b&#62;" in card
    assert cell("a\\|b") == "a&#92;&#124;b"


def test_a_loss_may_be_called_anything_and_the_card_stays_as_it_is(tmp_path: Path) -> None:
    class Odd:
        def __call__(self, *_: Any) -> Any: ...

    Odd.__qualname__ = INJECTED
    task = OwnLoss(task=CausalTask(pad_token=0), record_loss=Odd(), digest="0" * 64)
    assert task.loss_name == "x_epsilon_0.001_y_<b>"
    with pytest.raises(InputError, match="damaged"):
        read_facts(python_run(tmp_path / "run", record_loss=INJECTED))


def test_a_report_names_the_loss_of_the_ledger_whatever_was_deleted(tmp_path: Path) -> None:
    files = userdp("report", python_run(tmp_path / "run"), "--json").json
    card, page = Path(files["card"]).read_text(), Path(files["html"]).read_text()
    assert "| loss | one of its own, helpful.&#60;locals&#62;.loss, not that of the task |" in card
    assert "one of its own, helpful.&lt;locals&gt;.loss" in page


def test_a_report_refuses_a_configuration_that_was_edited(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "config.toml").open("a") as file:
        file.write("learning_rate = 0.5\n")
    refused = userdp("report", run)
    assert refused.code == 2
    assert "is not the configuration that the run was started with" in refused.err
    assert not (run / "MODEL_CARD.md").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "abc"),
        ("learning_rate", True),
        ("learning_rate", 10**400),
        ("ema", "x"),
        ("classes", "abc"),
        ("classes", ["a", 1]),
        ("gguf_file", 3),
        ("adapter_rank", 1.5),
        ("task", ["causal"]),
        ("record_loss", "a b"),
    ],
)
def test_a_malformed_fact_is_one_line_and_no_card_breaks(
    tmp_path: Path, name: str, value: Any
) -> None:
    run = python_run(tmp_path / "run", **{name: value})
    refused = userdp("report", run)
    assert refused.code == 2
    assert refused.err.startswith("error: ")
    assert "run.json: damaged. Restore it, or delete it." in refused.err
    # The end of a run writes what it can: its ledger is closed already.
    record = RecordedRun(run=run, ledger=Ledger.read(run / "ledger.jsonl"))
    assert "| optimizer |" not in card_of_run(record, record.statement())


def test_a_report_writes_through_no_link(tmp_path: Path) -> None:
    run, mine = write_run(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (run / "statement.json").unlink()
    for name in ("report.html", "MODEL_CARD.md", "statement.json"):
        (run / name).symlink_to(mine)
    assert userdp("report", run).code == 0
    assert mine.read_text() == "mine"
    (run / "model").rename(tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere" / "README.md").read_bytes()
    for words in (("report", run), ("report", run, "--unfinished")):
        userdp(*words)
        assert (tmp_path / "elsewhere" / "README.md").read_bytes() == before
    assert "is a link" in userdp("report", run).err


def test_the_name_of_a_base_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"tokenizer_config.json": b'{"is_local": true}'}
    run = write_run(tmp_path / "run", base="models/base", files=told)
    hub = write_run(tmp_path / "hub", files={"tokenizer_config.json": b'{"is_local": false}'})
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "gpt2").mkdir(parents=True)
        monkeypatch.chdir(folder)
        assert base_name(run, read_facts(run)) == "base"
        assert base_name(hub, read_facts(hub)) == "gpt2"
    card = model_card(Ledger.read(hub / "ledger.jsonl").statement(), None, base="of mine: x")
    assert "base_model" not in card, "a name that the hub cannot have is not given as one"
