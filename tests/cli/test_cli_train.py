"""`userdp train`, `evaluate`, `report`, `account RUN` end to end on a tiny model."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli_runner import Result, userdp
from stores import sentences
from userdp.data.store import write_store
from userdp.ledger.book import Ledger

WriteConfig = Callable[..., Path]

# The allow-list: all that may leave a run.
RUN_FILES = {"config.toml", "ledger.jsonl", "statement.json", "model", "secret", "checkpoints"}
RUN_FILES |= {"run.json", "validation.jsonl"}
REPORT_FILES = {"report.html", "MODEL_CARD.md"}
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "README.md",
    "userdp_ancestry.json",
}


def trained(config: Path, out: Path) -> dict[str, object]:
    return userdp("train", config, "--out", out, "--json").json


@pytest.fixture(scope="module")
def finished(shared_config_file: WriteConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    trained(shared_config_file(), run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, which a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


def test_json_has_the_keys_of_the_contract(config_file: WriteConfig, tmp_path: Path) -> None:
    data = trained(config_file(), tmp_path / "run")
    assert {"steps", "epsilon", "delta", "loss", "run"} <= set(data)
    assert data["steps"] == 4
    assert 7.9 < data["epsilon"] <= 8.0  # type: ignore[operator]
    assert data["delta"] == 1e-2
    assert data["run"] == str(tmp_path / "run")
    assert math.isfinite(data["loss"])  # type: ignore[arg-type]


def test_without_evaluation_users_there_is_no_loss(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    path = config_file()
    path.write_text(
        "".join(
            line + "\n"
            for line in path.read_text().splitlines()
            if not line.startswith("evaluation")
        )
    )
    assert trained(path, tmp_path / "run")["loss"] is None


def test_run_directory_holds_the_allow_list_and_nothing_else(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == RUN_FILES
    assert {path.name for path in (run / "model").iterdir()} <= MODEL_FILES


def test_ledger_and_statement_hold_no_loss_norm_or_cohort(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows[1:-1]] == [{"kind", "step", "tag", "hash"}] * 4
    assert set(rows[-1]) == {"kind", "steps", "event", "digests", "model_files", "people"} | {
        "tag",
        "hash",
    }
    statement = json.loads((run / "statement.json").read_text())
    assert set(statement) == {
        "guarantee",
        "sentence",
        "epsilon",
        "delta",
        "adjacency",
        "neighbours",
        "promise",
        "sampler",
        "mechanism",
        "noise",
        "steps",
        "num_users",
        "certified_by",
        "unit",
        "assumptions",
        "not_covered",
        "paid",
        "cautions",
        "planned_epsilon",
        "sampling",
        "earlier",
        "model_check",
        "fixed_seed",
        "unfinished",
        "doubts",
        "others",
        "epsilon_of_all",
        "as_if_epsilon",
        "mark",
        "record_level_epsilon",
        "hypothetical_epsilon",
    }
    # The run has a fixed seed: what was planned is told, and nothing is promised.
    assert statement["guarantee"] is False
    assert statement["epsilon"] is None
    assert 7.9 < statement["planned_epsilon"] <= 8.0


def test_nothing_private_is_printed(config_file: WriteConfig, tmp_path: Path) -> None:
    path = config_file()
    path.write_text(path.read_text().replace("evaluation =", "# evaluation ="))
    result = userdp("train", path, "--out", tmp_path / "run")
    assert result.code == 0
    # To the letter: the statement, where the run is, and the name of the stage.
    statement = Ledger.read(tmp_path / "run" / "ledger.jsonl").statement()
    assert result.out == f"{statement}\nrun: {tmp_path / 'run'}\n"
    assert result.err == "training\n"
    assert "epsilon=8" in result.out
    assert "fixed seed" in result.out


def test_fixed_seed_gives_the_same_run_bit_for_bit(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    path = config_file()
    first, second = (trained(path, tmp_path / name) for name in ("one", "two"))
    assert first["loss"] == second["loss"]
    assert (tmp_path / "one" / "ledger.jsonl").read_bytes() == (
        tmp_path / "two" / "ledger.jsonl"
    ).read_bytes()
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_a_seed_two_runs_differ_and_nothing_is_cautioned(
    config_file: WriteConfig, tmp_path: Path, train_store: Path
) -> None:
    path = config_file(training="")
    # A store that nothing was spent on yet.
    rewritten = path.read_text().replace(str(train_store), str(tmp_path / "own"))
    shutil.copytree(train_store, tmp_path / "own")
    (tmp_path / "own" / "population.json").unlink(missing_ok=True)
    path.write_text(rewritten)
    for name in ("one", "two"):
        trained(path, tmp_path / name)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((tmp_path / "one" / "statement.json").read_text())["cautions"] == []


@pytest.mark.parametrize(("dtype", "more"), [("float32", ""), ("bfloat16", "freeze_a = true")])
def test_lora_run_saves_the_adapter_alone_and_evaluates(
    config_file: WriteConfig, tmp_path: Path, held_out_store: Path, dtype: str, more: str
) -> None:
    path = config_file(model=f'dtype = "{dtype}"\n[model.lora]\nrank = 2\n{more}')
    data = trained(path, tmp_path / "run")
    assert math.isfinite(data["loss"])  # type: ignore[arg-type]
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    assert all("lora" in name for name in weights(tmp_path / "run"))
    # Both factors are released, also if one of them is as it was drawn.
    assert any("lora_A" in name for name in weights(tmp_path / "run"))
    evaluated = userdp("evaluate", tmp_path / "run", held_out_store, "--json").json
    assert evaluated["loss"] == pytest.approx(data["loss"], rel=1e-3)


@pytest.mark.slow
def test_record_sampling_trains(config_file: WriteConfig, tmp_path: Path) -> None:
    path = config_file()
    path.write_text(
        path.read_text()
        .replace("expected_cohort_size = 5", 'unit = "record"\nexpected_batch_size = 5')
        .replace("epsilon = 8.0", "noise_multiplier = 4.0")
    )
    trained(path, tmp_path / "run")
    account = userdp("account", tmp_path / "run", "--json").json
    assert account["unit"] == "record"


def test_non_private_run_says_no_guarantee_everywhere(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    path = config_file(
        privacy="noise_multiplier = 0.0\nclip_norm = inf\ndelta = 1e-2\nnon_private = true"
    )
    assert trained(path, tmp_path / "run")["epsilon"] is None
    assert userdp("account", tmp_path / "run", "--json").json["epsilon"] is None
    files = userdp("report", tmp_path / "run", "--json").json
    for name in ("html", "card"):
        text = Path(files[name]).read_text()
        assert "No privacy guarantee." in text
        assert "epsilon=" not in text
    assert json.loads(Path(files["statement"]).read_text())["guarantee"] is False


def test_account_of_a_run_reads_its_ledger(run: Path) -> None:
    data = userdp("account", run, "--json").json
    assert {"epsilon", "delta", "adjacency", "unit", "accountant", "certified_by"} <= set(data)
    assert 7.9 < data["epsilon"] <= 8.0
    assert data["steps"] == 4
    assert "4 steps" in userdp("account", run).out


def test_account_of_a_tampered_run_is_refused(run: Path) -> None:
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:2] + lines[3:]))
    for command in ("account", "report"):
        result = userdp(command, run)
        assert result.code == 2
        assert "line 3" in result.err


def test_report_mentions_epsilon_and_assumptions(run: Path) -> None:
    data = userdp("report", run, "--json").json
    assert {"html", "card", "statement"} <= set(data)
    statement = json.loads(Path(data["statement"]).read_text())
    for name in ("html", "card"):
        text = Path(data[name]).read_text()
        assert "epsilon=8" in text
        assert "delta=0.01" in text
        assert "hyper-parameters tuned on the same users" in text
        assert "add-remove" in text
        assert "fixed seed" in text
        assert "certified by" in text
        assert len([a for a in statement["assumptions"] if a.split("'")[0] in text]) >= 3
    html = Path(data["html"]).read_text()
    assert "<svg" in html
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert {path.name for path in run.iterdir()} == RUN_FILES | REPORT_FILES


@pytest.mark.slow
def test_report_can_be_written_again(run: Path) -> None:
    first = userdp("report", run, "--json").json
    before = Path(first["card"]).read_bytes()
    again = userdp("report", run, "--json").json
    assert Path(again["card"]).read_bytes() == before


def test_evaluate_a_run_and_a_bare_model(run: Path, base_model: Path, held_out_store: Path) -> None:
    for model in (run, base_model):
        data = userdp("evaluate", model, held_out_store, "--json").json
        assert {"loss", "perplexity", "accuracy_top1", "tokens", "users"} <= set(data)
        assert data["users"] == 5
        assert data["perplexity"] == pytest.approx(math.exp(data["loss"]))
        # A model of no run has no list of users to compare with.
        assert data["overlap_checked"] is (True if model == run else None)
    words = userdp("evaluate", run, held_out_store)
    assert "not covered by any privacy statement" in words.out


def test_evaluating_on_training_users_needs_an_explicit_word(run: Path, train_store: Path) -> None:
    refused = userdp("evaluate", run, train_store)
    assert refused.code == 2
    assert "training users too" in refused.err
    assert "--allow-overlap" in refused.err
    assert userdp("evaluate", run, train_store, "--allow-overlap").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [-3, 0, 1])
def test_evaluating_on_rows_too_short_to_predict_is_refused(
    run: Path, base_model: Path, held_out_store: Path, length: int
) -> None:
    for model in (run, base_model):
        refused = userdp("evaluate", model, held_out_store, "--sequence-length", length)
        assert refused.code == 2
        assert f"--sequence-length {length}: predicting takes at least 2 tokens" in refused.err


def test_training_with_overlapping_evaluation_users_is_refused(
    config_file: WriteConfig, tmp_path: Path, train_store: Path, held_out_store: Path
) -> None:
    path = config_file()
    path.write_text(path.read_text().replace(str(held_out_store), str(train_store)))
    result = userdp("train", path, "--out", tmp_path / "run")
    assert result.code == 2
    assert "training users too" in result.err
    # The way out is one that this command has.
    assert "[data] evaluation" in result.err
    assert "--" not in result.err
    assert not (tmp_path / "run").exists()


def test_stores_under_other_keys_are_noted(
    config_file: WriteConfig, tmp_path: Path, held_out_store: Path
) -> None:
    write_store(
        sentences(users=3, records_per_user=2, seed=5, prefix="c"),
        tmp_path / "other",
        key=b"y" * 32,
    )
    path = config_file()
    path.write_text(path.read_text().replace(str(held_out_store), str(tmp_path / "other")))
    result = userdp("train", path, "--out", tmp_path / "run")
    assert result.code == 0
    assert "cannot be" in result.err


@pytest.mark.parametrize(("declared", "times"), [(24, None), (400, "0.05"), (8, "2.5")])
def test_a_declared_number_far_from_the_stores_is_noted_to_the_owner_alone(
    config_file: WriteConfig, tmp_path: Path, declared: int, times: str | None
) -> None:
    path = config_file()
    declares = path.read_text().replace("num_users = 20", f"num_users = {declared}")
    path.write_text(declares.replace("delta = 1e-2", "delta = 2e-3"))
    result = userdp("train", path, "--out", tmp_path / "run", "--dry-run")
    assert result.code == 0
    assert ("the store has 20 users" in result.err) == (times is not None)
    if times is not None:
        assert f"about {times} times as large" in result.err
    for released in (tmp_path / "run").rglob("*"):
        if released.is_file():
            assert b"20 users" not in released.read_bytes()


def test_delta_above_one_over_n_is_refused_or_cautioned_where_nothing_is_promised(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    privacy = "noise_multiplier = 2.0\ndelta = 0.1\nclip_norm = 1.0"
    refused(
        userdp("train", config_file(privacy=privacy), "--out", tmp_path / "no"), "smaller delta"
    )
    path = config_file(privacy=f"{privacy}\nnon_private = true")
    result = userdp("train", path, "--out", tmp_path / "run", "--json")
    assert result.code == 0
    assert "caution: delta=0.1 is above 1/num_users" in result.err
    cautions = json.loads((tmp_path / "run" / "statement.json").read_text())["cautions"]
    assert any("above 1/num_users" in caution for caution in cautions)


def refused(result: Result, expected: str) -> None:
    assert result.code == 2, result
    assert expected in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_output_directory_of_another_run_is_refused(run: Path, config_file: WriteConfig) -> None:
    before = {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file()
    }
    refused(userdp("train", config_file(), "--out", run), "choose another output directory")
    after = {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file()
    }
    assert before == after


def test_output_that_is_a_file_is_refused(config_file: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(userdp("train", config_file(), "--out", tmp_path / "file"), "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"privacy": "delta = 1e-2\nclip_norm = 1.0"}, "exactly one"),
        ({"privacy": "epsilon = 8\nnoise_multiplier = 1\ndelta = 1e-2\nclip_norm = 1"}, "one of"),
        ({"privacy": "noise_multiplier = 0.0\ndelta = 1e-2\nclip_norm = 1.0"}, "protects nobody"),
        ({"privacy": "epsilom = 8.0\ndelta = 1e-2\nclip_norm = 1.0"}, "did you mean 'epsilon'"),
        ({"model": '[model.lora]\ntargets = "nothing"'}, "LoRA targets"),
        ({"training": 'device = "abacus"'}, "abacus"),
    ],
)
def test_wrong_configuration_is_refused_before_anything_is_written(
    config_file: WriteConfig, tmp_path: Path, change: dict[str, str], expected: str
) -> None:
    refused(userdp("train", config_file(**change), "--out", tmp_path / "run"), expected)
    assert not (tmp_path / "run").exists()


def test_store_changed_after_import_is_refused(
    config_file: WriteConfig, tmp_path: Path, train_store: Path
) -> None:
    copy = Path(shutil.copytree(train_store, tmp_path / "copy"))
    shutil.rmtree(copy / "tokens", ignore_errors=True)
    changed = next(p for p in sorted(copy.rglob("*")) if p.is_file() and b"w1 " in p.read_bytes())
    changed.write_bytes(changed.read_bytes().replace(b"w1 ", b"w2 ", 1))
    path = config_file()
    path.write_text(path.read_text().replace(str(train_store), str(copy)))
    refused(userdp("train", path, "--out", tmp_path / "run"), "changed since the import")
    assert not (tmp_path / "run").exists()


def test_records_of_several_owners_are_refused(
    config_file: WriteConfig, tmp_path: Path, train_store: Path
) -> None:
    source = tmp_path / "shared.jsonl"
    source.write_text('{"users": ["a", "b"], "text": "w1 w2"}\n{"users": ["c"], "text": "w3 w4"}\n')
    assert userdp("import", source, "--out", tmp_path / "shared").code == 0
    path = config_file()
    path.write_text(path.read_text().replace(str(train_store), str(tmp_path / "shared")))
    refused(userdp("train", path, "--out", tmp_path / "run"), "several owners")


def test_model_without_weights_is_refused(
    config_file: WriteConfig, tmp_path: Path, base_model: Path
) -> None:
    broken = Path(shutil.copytree(base_model, tmp_path / "broken"))
    for path in broken.glob("*.safetensors"):
        path.rename(broken / "pytorch_model.bin")
    path = config_file()
    path.write_text(path.read_text().replace(str(base_model), str(broken)))
    refused(userdp("train", path, "--out", tmp_path / "run"), "pickle")
    assert not (tmp_path / "run").exists()


def test_run_without_its_model_cannot_be_evaluated(run: Path, held_out_store: Path) -> None:
    shutil.rmtree(run / "model")
    refused(userdp("evaluate", run, held_out_store), "holds no model")


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "\n[model.lora]\nrank = 2"])
def test_personalize_a_run(
    lora: str, config_file: WriteConfig, tmp_path: Path, train_store: Path, held_out_store: Path
) -> None:
    run = tmp_path / "run"
    trained(config_file(model=lora), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    told = userdp("personalize", run, held_out_store, "--json").json
    assert {"loss_before", "loss_after", "users"} <= set(told)
    assert told["users"] == 5
    assert told["loss_after"] != told["loss_before"]
    assert ("many users at once" in told["tuned"]) == bool(lora)
    refused(userdp("personalize", run, train_store), "training users too")
    at_once = userdp("personalize", run, held_out_store, "--lora-rank", "2")
    if lora:
        refused(at_once, "has adapters already")
    else:
        assert "tuned: adapters, many users at once" in at_once.out
        assert "not covered by any privacy statement" in at_once.out
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_log_has_the_losses_and_json_before_and_after(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    path = config_file(training="fixed_seed = 7\nevaluate_every = 2")
    result = userdp("train", path, "--out", tmp_path / "run", "--json")
    rows = (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    losses = {row["step"]: row["loss"] for row in map(json.loads, rows)}
    assert list(losses) == [0, 2, 4]
    assert (result.json["loss_before"], result.json["loss"]) == (losses[0], losses[4])
    assert result.json["loss_may_be_released"] is True
    lines = [line for line in result.err.splitlines() if line.startswith("step")]
    assert [line.split(",")[0] for line in lines] == ["step 0/4", "step 2/4", "step 4/4"]
    assert all(
        f"held-out loss {loss:.4f}" in line
        for line, loss in zip(lines, losses.values(), strict=True)
    )
    assert "epsilon <= 8 of 8" in lines[-1]


def test_private_evaluation_users_are_marked_and_stay_in_the_secrets(
    config_file: WriteConfig, tmp_path: Path
) -> None:
    path = config_file(data="evaluation_private = true", training="fixed_seed = 7")
    result = userdp("train", path, "--out", tmp_path / "run")
    assert "not for release" in result.out
    assert not (tmp_path / "run" / "validation.jsonl").exists()
    assert (tmp_path / "run" / "secret" / "validation.jsonl").is_file()
