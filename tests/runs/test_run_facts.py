"""Runs from Python are reported, evaluated, exported and given up like those from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import userdp as library
from cli_runner import userdp
from userdp.budget.debits import settle_given_up
from userdp.errors import InputError
from userdp.names.quantisation import GGUF_FILE
from userdp.runs.facts import has_facts, read_facts


@pytest.fixture(scope="module", params=["adapter", "whole"])
def run(
    request: pytest.FixtureRequest,
    base_model: Path,
    train_store: Path,
    held_out_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A finished run of the ten lines in the README."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    lora = library.Lora(rank=2) if request.param == "adapter" else None
    model, tokenizer = library.load_model(base_model, lora=lora)
    plan = library.Plan.sample_users(
        num_users=20,
        expected_cohort_size=5,
        group_size=2,
        steps=2,
        clip_norm=1.0,
        epsilon=8.0,
        delta=1e-2,
    )
    library.train(
        model,
        tokenizer,
        library.UserStore.open(train_store),
        plan,
        learning_rate=0.02,
        sequence_length=16,
        validation=library.Validation(store=library.UserStore.open(held_out_store)),
        out=out,
    )
    return out


def test_a_python_run_says_what_it_was_made_of(
    run: Path, base_model: Path, train_store: Path
) -> None:
    facts = read_facts(run)
    assert not (run / "config.toml").exists()
    assert (facts.model, facts.store) == (str(base_model.resolve()), str(train_store.resolve()))
    assert facts.sequence_length == 16
    assert (facts.optimizer, facts.learning_rate, facts.schedule) == ("AdamW", 0.02, "linear")
    assert facts.adapter_rank == (2 if "adapter" in str(run) else None)


def test_a_python_run_is_evaluated_with_its_own_length(run: Path, held_out_store: Path) -> None:
    found = userdp("evaluate", run, held_out_store, "--json").json
    (last,) = [
        point
        for point in map(json.loads, (run / "validation.jsonl").read_text().splitlines())
        if point["step"] == 2
    ]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert found["tokens"] == last["tokens"]


def test_a_python_run_has_a_report_and_a_card(run: Path, base_model: Path) -> None:
    files = userdp("report", run, "--json").json
    card, page = (Path(files[name]).read_text() for name in ("card", "html"))
    assert "AdamW, learning rate 0.02, schedule linear" in card
    assert "at most 16 tokens" in card
    assert ("LoRA adapters of rank 2" in card) == ("adapter" in str(run))
    assert "| loss a token |" in card
    for text in (card, page):
        assert str(base_model) not in text
        assert base_model.name in text
    facts = read_facts(run)
    title = page.split("<h1>")[1].split("</h1>")[0]
    assert title == "Privacy report: base, run run"
    for said in (facts.began, "AdamW, learning rate 0.02", "prefers-color-scheme: dark"):
        assert said in page
    assert page.count("<svg") == 3, "loss, attack and epsilon"


def test_a_python_run_is_exported_without_paths_of_this_machine(run: Path, tmp_path: Path) -> None:
    found = userdp("export", run, "--out", tmp_path / "out", "--base", "org/base", "--json").json
    assert "run.json" not in found["files"]
    assert "validation.jsonl" not in found["files"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| loss a token |" in card
    assert str(Path.home()) not in card


def test_a_python_run_names_the_people_it_was_counted_for(run: Path) -> None:
    assert settle_given_up(run)


def test_without_facts_it_is_said_which_file_is_missing(tmp_path: Path) -> None:
    assert not has_facts(tmp_path)
    with pytest.raises(InputError, match=r"neither config\.toml nor run\.json"):
        read_facts(tmp_path)
    for content in ("", "[]", '{"model": 1}', '{"more": 2}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(InputError, match="damaged"):
            read_facts(tmp_path)


def test_a_base_from_a_gguf_file_is_named_with_its_file(
    base_model: Path, train_store: Path, tmp_path: Path
) -> None:
    model, tokenizer = library.load_model(base_model, lora=library.Lora(rank=2))
    # What `load_model` leaves on a model that it has read from such a file.
    setattr(model.get_base_model(), GGUF_FILE, "weights.gguf")  # type: ignore[operator]
    plan = library.Plan.sample_users(
        num_users=20,
        expected_cohort_size=5,
        group_size=2,
        steps=1,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    store = library.UserStore.open(train_store)
    options = {"learning_rate": 0.02, "sequence_length": 16}
    library.train(model, tokenizer, store, plan, out=tmp_path / "run", **options)
    facts = read_facts(tmp_path / "run")
    assert facts is not None
    assert facts.gguf_file == "weights.gguf"
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert 'gguf_file="weights.gguf")' in card
