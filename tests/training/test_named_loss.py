"""A loss of one's own that a configuration names: imported, bound into the run, and told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import userdp
from cli_runner import userdp as command
from userdp.config.file import load_config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.models.load import load_model
from userdp.runs.facts import read_facts
from userdp.streams import RunSecret
from userdp.training.configured import configured_loss
from userdp.training.from_config import train_from_config

ConfigFile = Callable[..., Path]
CODE = """
from userdp.losses import causal_lm_loss

def inner(losses):
    return FACTOR * losses

def helper(losses):
    return inner(losses)

def scaled(model, batch):
    return helper(causal_lm_loss(model, batch))

number = 3
"""
NAMED = 'record_loss = "losses_of_mine:scaled"'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Writes the module with this factor, as an editor would between two processes."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(factor: float) -> None:
        code = CODE.replace("FACTOR", str(factor))
        (tmp_path / "losses_of_mine.py").write_text(code)
        sys.modules.pop("losses_of_mine", None)
        # Else a file of the same second and size is taken from the cache of compiled code.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    yield write
    sys.modules.pop("losses_of_mine", None)


def test_a_named_loss_trains_as_the_same_function_does_from_python(
    module: Callable[[float], None], config_file: ConfigFile, tmp_path: Path
) -> None:
    module(2.0)
    path = config_file(data=NAMED, training='path = "plain"\nfixed_seed = 7')
    config = load_config(path)
    named = train_from_config(path, config, config.plan(), tmp_path / "named")
    model, tokenizer = load_model(config.model.path)
    own = userdp.train(
        model,
        tokenizer,
        UserStore.open(config.data.store),
        config.plan(),
        learning_rate=0.01,
        sequence_length=16,
        record_loss=configured_loss(config),
        settings=userdp.StepSettings(path="plain"),
        secret=RunSecret.fixed_for_tests(7),
        out=tmp_path / "own",
    )
    assert named.ledger.bound_to["task"] == own.ledger.bound_to["task"]
    assert named.ledger.bound_to["task"].startswith("causal, loss scaled ")
    assert read_facts(tmp_path / "named").record_loss == "losses_of_mine:scaled"
    assert read_facts(tmp_path / "own").record_loss == "scaled"
    for run, name in (("named", "losses_of_mine:scaled"), ("own", "scaled")):
        assert f"one of its own, {name}" in (tmp_path / run / "model" / "README.md").read_text()
    plain = load_config(config_file(name="plain.toml"))
    assert configured_loss(plain) is None


def test_a_run_does_not_go_on_with_a_loss_that_was_edited(
    module: Callable[[float], None], config_file: ConfigFile, tmp_path: Path
) -> None:
    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    module(2.0)
    path = config_file(data=NAMED, training='path = "plain"\nfixed_seed = 7\ncheckpoint_every = 1')
    config = load_config(path)
    with pytest.raises(KeyboardInterrupt):
        train_from_config(path, config, config.plan(), tmp_path / "run", on_step=stop)
    module(3.0)
    with pytest.raises(InputError, match="task"):
        train_from_config(path, config, config.plan(), tmp_path / "run", resume=True)
    module(2.0)
    train_from_config(path, config, config.plan(), tmp_path / "run", resume=True)


def test_commands_probe_and_tell_the_loss(
    module: Callable[[float], None],
    config_file: ConfigFile,
    held_out_store: Path,
    tmp_path: Path,
) -> None:
    module(2.0)
    path = config_file(data=NAMED)
    assert command("verify", path, "--json").json["safe"]
    run = tmp_path / "run"
    trained = command("train", path, "--out", run, "--json").json
    found = command("evaluate", run, held_out_store, "--json").json
    assert found["own_loss"] == "losses_of_mine:scaled"
    # What is measured is the task's loss: the same number, whatever was trained on.
    assert found["loss"] == pytest.approx(trained["loss"])
    said = command("evaluate", run, held_out_store).out
    assert "loss of its own (losses_of_mine:scaled)" in said


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("losses_of_mine", "record_loss"),
        ("losses of mine:scaled", "record_loss"),
        ("no_such_package.losses:scaled", "PYTHONPATH"),
        ("losses_of_mine:missing", "PYTHONPATH"),
        ("losses_of_mine:number", "is a int"),
    ],
)
def test_what_is_no_loss_is_refused_in_one_line(
    named: str,
    says: str,
    module: Callable[[float], None],
    config_file: ConfigFile,
    tmp_path: Path,
) -> None:
    module(2.0)
    path = config_file(data=f"record_loss = {json.dumps(named)}")
    for words in (("train", path, "--out", tmp_path / "run"), ("verify", path)):
        found = command(*words)
        assert found.code == 2
        assert says in found.err.strip().splitlines()[-1]
        assert not (tmp_path / "run").exists()
