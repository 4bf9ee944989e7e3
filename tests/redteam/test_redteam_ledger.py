"""The record of a run under attack: cut, edited, forged, charged in memory, or of other weights."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runner import userdp
from tiny import make_model, make_store
from userdp import Ledger, Plan, PrivateStep, UserIndex
from userdp.errors import LedgerError
from userdp.files import chain
from userdp.runs.files import read_run
from userdp.runs.record import RunRecord


def small_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 40,
        "expected_cohort_size": 20,
        "group_size": 2,
        "steps": 20,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(**(settings | changes))


def small_ledger(directory: Path, *, steps: int = 2, finish: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "ledger.jsonl"
    ledger = Ledger.create(small_plan(), path=path, bound_to={"data": "x"}, fixed_seed=False)
    for _ in range(steps):
        ledger.charge_step()
    if finish:
        ledger.finish({"final_weights": "y"})
    ledger.close()
    return path


CONFIG = """[data]
store = "{root}/store"
sequence_length = 16
[model]
path = "{root}/base"
[privacy]
num_users = 20
expected_cohort_size = 10
group_size = 2
clip_norm = 1.0
noise_multiplier = {noise}
delta = 1e-3
[training]
steps = 3
path = "plain"
{more}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store, a model and a finished run of it."""
    found = tmp_path_factory.mktemp("ledger")
    make_store(found / "store", [2] * 20)
    make_model(found / "base")
    (found / "run.toml").write_text(CONFIG.format(root=found, noise=2.0, more=""))
    data = userdp("train", found / "run.toml", "--out", found / "run", "--json").json
    assert data["guarantee"] is True
    return found


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(root / "run", tmp_path / "run"))


def test_every_edited_byte_is_found_with_and_without_the_key(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=1)
    content = path.read_bytes()
    assert Ledger.read(path).is_finished
    for with_key in (True, False):
        if not with_key:
            chain.key_path(path).unlink()
        for position in range(len(content)):
            edited = bytearray(content)
            # A tab for a space is the same JSON, and still not the byte that was written.
            edited[position] = ord("\t") if edited[position] == ord(" ") else edited[position] ^ 1
            path.write_bytes(bytes(edited))
            with pytest.raises(LedgerError):
                Ledger.read(path)


def test_every_cut_of_the_tail_is_found(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=1)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(LedgerError):
            read_run(tmp_path)


def test_a_cut_ledger_promises_nothing_even_when_asked_for(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=5)
    whole = Ledger.read(path).statement()
    assert whole.guarantee
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    statement = read_run(tmp_path, unfinished=True).statement()
    assert Ledger.read(path).steps == 3
    assert not statement.guarantee
    assert statement.promise == ""
    assert "unfinished" in statement.sentence
    assert statement.to_json()["epsilon"] is None
    # The whole plan is priced, however many of its steps are left in the record.
    assert statement.epsilon == whole.epsilon
    assert not Ledger.read(path).statement().guarantee


def forged(path: Path) -> None:
    """Seven times the noise, and every hash computed again: what anyone can do without the key."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["plan"]["noise"]["noise_multiplier"] = 7.0
    for row in (rows[0], rows[-1]):
        row["event"]["event"]["event"]["noise_multiplier"] = 7.0
    before, lines = "", []
    for row in rows:
        del row["hash"]
        before = row["hash"] = chain.chained(before, row)
        lines.append(json.dumps(row, sort_keys=True) + "\n")
    path.write_text("".join(lines))


def test_a_forged_ledger_is_found_by_the_key_and_unverified_without(tmp_path: Path) -> None:
    path = small_ledger(tmp_path)
    assert Ledger.read(path).is_verified
    assert not any("not verified" in one for one in Ledger.read(path).statement().cautions)
    forged(path)
    with pytest.raises(LedgerError, match="not written with the run's key"):
        Ledger.read(path)
    chain.key_path(path).unlink()
    cautions = Ledger.read(path).statement().cautions
    assert any("not verified" in caution for caution in cautions)


def test_another_runs_key_does_not_verify(tmp_path: Path) -> None:
    path, other = small_ledger(tmp_path / "a"), small_ledger(tmp_path / "b")
    chain.key_path(path).write_bytes(chain.key_path(other).read_bytes())
    with pytest.raises(LedgerError, match="run's key"):
        Ledger.read(path)


def test_secrets_of_a_run_are_its_owners_alone_and_not_in_the_model(run: Path, root: Path) -> None:
    files = [path for path in (root / "run" / "secret").rglob("*") if path.is_file()]
    # The key of the noise, the key of the ledger, the list of users, and the sums of the steps.
    assert len(files) == 4
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    key = chain.read_key(run / "ledger.jsonl")
    assert key is not None
    public = [p for p in run.rglob("*") if p.is_file() and "secret" not in p.parts]
    assert len(public) > 4
    for path in public:
        content = path.read_bytes()
        assert key not in content
        assert key.hex().encode() not in content


def test_a_ledger_read_back_or_closed_cannot_be_charged(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=5, finish=False)
    live = Ledger.create(small_plan(), bound_to={}, fixed_seed=False)
    live.close()
    done = Ledger.create(small_plan(), bound_to={}, fixed_seed=False)
    done.finish({})
    for ledger in (Ledger.read(path), live, done):
        with pytest.raises(LedgerError, match=r"Ledger\.open"):
            ledger.charge_step()
        with pytest.raises(LedgerError, match=r"Ledger\.open"):
            ledger.finish({})
    assert Ledger.read(path).steps == 5


def test_a_step_on_a_ledger_read_back_is_refused_before_it_begins(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=5, finish=False)
    model = torch.nn.Linear(3, 1)
    with pytest.raises(LedgerError, match=r"Ledger\.open"):
        own_loop(model, Ledger.read(path))


def own_loop(model: torch.nn.Module, ledger: Ledger | None, **options: Any) -> PrivateStep:
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1)),
        small_plan(),
        UserIndex.from_owners([user for user in range(40) for _ in range(2)]),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        record=None if ledger is None else RunRecord(ledger, options.pop("secret", None)),
        **options,
    )


def take(step: PrivateStep, count: int) -> None:
    for _ in range(count):
        step.apply([{"x": torch.ones(len(rows), 3)} for rows in step.draw()])


def test_an_opened_ledger_goes_on_on_disk_and_counts_every_step_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(small_plan(), path=path, bound_to={}, fixed_seed=False)
    take(own_loop(model, ledger), 2)
    ledger.close()
    step = own_loop(model, Ledger.open(path))
    take(step, 3)
    assert Ledger.read(path).steps == 5
    # Rows may have been cut off before it was opened.
    assert not step.statement().guarantee
    assert step.statement().earlier == ()
    assert step.statement().epsilon == small_plan().epsilon()
    step.finish()
    assert Ledger.read(path).statement().epsilon == small_plan().epsilon()
    assert Ledger.read(path).statement().guarantee
    with pytest.raises(LedgerError, match="closed"):
        Ledger.open(path)


def test_a_cut_ledger_that_is_opened_promises_nothing(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, steps=5)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    ledger = Ledger.open(path)
    assert not ledger.statement().guarantee
    assert "unfinished" in ledger.statement().sentence
    ledger.close()


def refusal(path: Path) -> str:
    """Why the ledger cannot be opened; empty if it can."""
    try:
        Ledger.open(path).close()
    except LedgerError as error:
        return str(error)
    return ""


def test_a_ledger_is_open_once_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made = Ledger.create(small_plan(), path=path, bound_to={}, fixed_seed=False)
    beside_the_made = refusal(path)
    made.close()
    opened = Ledger.open(path)
    beside_the_opened = refusal(path)
    # To look at it is no harm.
    steps = Ledger.read(path).steps
    opened.close()
    assert "open already" in beside_the_made
    assert "open already" in beside_the_opened
    assert steps == 0
    assert refusal(path) == ""


def test_a_ledger_is_not_opened_without_its_key_nor_read_with_a_cut_row(tmp_path: Path) -> None:
    path = small_ledger(tmp_path, finish=False)
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(LedgerError, match="cut short"):
        Ledger.read(path)
    path.write_bytes(content)
    chain.key_path(path).unlink()
    with pytest.raises(LedgerError, match="without the run's key"):
        Ledger.open(path)


def test_closing_row_names_what_went_in_and_what_came_out(run: Path) -> None:
    end = Ledger.read(run / "ledger.jsonl").end
    assert end is not None
    assert end["steps"] == 3
    assert {
        *("initial_weights", "final_weights", "tokenizer", "selection", "config", "code"),
        *("data", "optimizer", "model"),
    } <= set(end["digests"])
    assert end["digests"]["initial_weights"] != end["digests"]["final_weights"]
    assert {"model.safetensors", "userdp_ancestry.json"} <= set(end["model_files"])


def changed_weights(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def cut_tail(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def linked_directory(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text("{}")
    (run / "model" / "more").symlink_to(other)


def dangling_link(run: Path) -> None:
    (run / "model" / "more").symlink_to(run / "nowhere")


def linked_file(run: Path) -> None:
    saved = run / "model" / "config.json"
    (run / "model" / "README.md").unlink()
    (run / "model" / "README.md").symlink_to(saved)


def extra_weights(run: Path) -> None:
    (run / "model" / "more.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("spoil", [changed_weights, cut_tail, extra_weights])
def test_commands_refuse_a_run_that_is_not_whole_and_say_unfinished_when_asked(
    run: Path, root: Path, spoil: Any
) -> None:
    spoil(run)
    for command in (["account", run], ["report", run], ["evaluate", run, root / "store"]):
        refused = userdp(*command)
        assert refused.code == 2
        assert "--unfinished" in refused.err
    told = userdp("account", run, "--unfinished", "--json").json
    assert told["guarantee"] is False
    assert told["planned_epsilon"] > 0
    assert any("unfinished" in caution for caution in told["cautions"])
    files = userdp("report", run, "--unfinished", "--json").json
    assert json.loads(Path(files["statement"]).read_text())["guarantee"] is False
    card = Path(files["card"]).read_text()
    assert "unfinished" in card
    assert "protected" not in card.split("## Privacy")[0]


@pytest.mark.parametrize("add_link", [linked_directory, dangling_link, linked_file])
def test_a_link_in_a_model_is_a_changed_file(run: Path, add_link: Any) -> None:
    add_link(run)
    refused = userdp("account", run)
    assert refused.code == 2
    assert "is not what the ledger's closing row names" in refused.err


def test_a_report_does_not_write_through_a_link(run: Path) -> None:
    linked_file(run)
    before = (run / "model" / "config.json").read_bytes()
    assert userdp("report", run, "--unfinished").code == 0
    assert (run / "model" / "config.json").read_bytes() == before
    assert not (run / "model" / "README.md").is_symlink()


def test_a_whole_run_is_accounted_and_reported(run: Path) -> None:
    told = userdp("account", run, "--json").json
    assert told["guarantee"] is True
    assert told["unit"] == "user"
    assert told["steps"] == 3
    assert userdp("report", run).code == 0


def test_counting_steps_does_not_read_all_rows_again() -> None:
    ledger = Ledger.create(small_plan(), bound_to={}, fixed_seed=False)
    for _ in range(3):
        ledger.charge_step()

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all rows were read to count the steps")

    ledger._kept.rows = Counted(ledger._kept.rows)
    ledger.charge_step()
    assert ledger.steps == 4


@pytest.fixture(scope="module")
def adapter_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store, a base model, and one run of adapters on it for each precision."""
    found = tmp_path_factory.mktemp("adapter")
    make_store(found / "store", [2] * 20)
    make_model(found / "base")
    settings = CONFIG.format(root=found, noise=2.0, more="")
    for dtype in ("float32", "bfloat16"):
        lora = f'[model]\ndtype = "{dtype}"\nlora = {{ rank = 2 }}'
        (found / "run.toml").write_text(settings.replace("[model]", lora))
        assert userdp("train", found / "run.toml", "--out", found / dtype).code == 0
    return found


def evaluated(run: Path, root: Path, *more: str) -> Any:
    return userdp("evaluate", run, root / "store", "--allow-overlap", *more)


@pytest.fixture
def other_base(adapter_root: Path) -> Iterator[Path]:
    """The base with one changed number; afterwards it is as it was."""
    path = adapter_root / "base" / "model.safetensors"
    content = path.read_bytes()
    tensors = load_file(path)
    tensors["transformer.ln_f.weight"][0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    yield path
    path.write_bytes(content)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_evaluated_on_the_base_it_was_trained_on(
    adapter_root: Path, tmp_path: Path, dtype: str, with_config: bool
) -> None:
    run = Path(shutil.copytree(adapter_root / dtype, tmp_path / "run"))
    if not with_config:
        (run / "config.toml").unlink()
    told = evaluated(run, adapter_root, "--json").json
    assert told["base_checked"] is True
    assert told["unfinished"] is False


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_that_was_swapped_is_refused_and_named_when_asked_for(
    adapter_root: Path, other_base: Path, tmp_path: Path, dtype: str, with_config: bool
) -> None:
    run = Path(shutil.copytree(adapter_root / dtype, tmp_path / "run"))
    if not with_config:
        (run / "config.toml").unlink()
    refused = evaluated(run, adapter_root)
    assert refused.code == 2
    assert "not the one the adapter was trained on" in refused.err
    assert "--unfinished" in refused.err
    allowed = evaluated(run, adapter_root, "--unfinished", "--json")
    assert "unfinished: the base model" in allowed.err
    assert allowed.json["unfinished"] is True
    assert allowed.json["base_checked"] is False


def test_a_ledger_that_names_no_base_is_read_and_says_that_nothing_was_compared(
    adapter_root: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(adapter_root / "float32", tmp_path / "run"))
    path = run / "ledger.jsonl"
    key = chain.read_key(path)
    assert key is not None
    *rows, end = [json.loads(line) for line in path.read_text().splitlines()]
    del end["digests"]["base_weights"]
    content = {name: end[name] for name in end if name not in ("hash", "tag")}
    sealed = chain.canonical(chain.sealed(rows[-1]["hash"], content, key))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + sealed + "\n")
    result = evaluated(run, adapter_root, "--json")
    assert result.json["base_checked"] is None
    assert "does not name the base model" in result.err


def test_a_base_of_another_shape_is_refused_in_our_words(adapter_root: Path) -> None:
    path = adapter_root / "base"
    kept = path.rename(adapter_root / "kept")
    try:
        make_model(path, width=32)
        refused = evaluated(adapter_root / "float32", adapter_root)
    finally:
        shutil.rmtree(path)
        kept.rename(path)
    assert refused.code == 2
    assert "does not fit its base model" in refused.err


def test_a_run_of_a_whole_model_names_no_base(root: Path) -> None:
    end = Ledger.read(root / "run" / "ledger.jsonl").end
    assert end is not None
    assert "base_weights" not in end["digests"]
    assert evaluated(root / "run", root, "--json").json["base_checked"] is None
