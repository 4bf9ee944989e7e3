"""`userdp train` with correlated noise: what it costs, how it goes on, and what it refuses.

The epsilon of every run is recomputed from its ledger by `correlated_oracle`, which uses nothing of
`userdp`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import correlated_oracle
from cli_runner import userdp
from stores import KEY
from tiny import WORDS, make_model, make_store
from userdp.data.record import Record
from userdp.data.store import write_store

STEPS = 6
CONFIG = """[data]
store = "{store}"
sequence_length = 16
{selection}
[model]
path = "{base}"
[privacy]
num_users = 24
clip_norm = 0.5
noise_multiplier = 3.0
delta = 1e-2
noise = "banded"
{privacy}
[training]
steps = {steps}
learning_rate = 0.01
checkpoint_every = 2
fixed_seed = 1
"""
USERS = "expected_cohort_size = 6\ngroup_size = 3\nsampler = 'cyclic-poisson'\nparts = 3\n"
RECORDS = (
    "unit = 'record'\nexpected_batch_size = 12\ngroup_size = 2\nsampler = 'cyclic-poisson'\n"
    "parts = 3\n"
)
ORDER = "sampler = 'min-separated'\nunit = 'record'\nadjacency = 'fixed-graph-zero-out'\n"
RUNS = {
    "users in turn": USERS + "bands = 3\nworkload = 'optimizer'",
    "records in turn": RECORDS + "bands = 2\nstrategy = 'toeplitz'",
    "fixed order": ORDER + "bands = 2",
    "fixed order, replaced": ORDER.replace("zero-out", "replace") + "bands = 2",
    "fixed order, inverse": ORDER + "bands = 4\nstrategy = 'inverse-square-root'",
    "fixed order, buffered": ORDER + "bands = 3\nstrategy = 'buffered'",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("banded")
    make_store(path / "store", [1, 2, 3, 4, 2, 5] * 4)
    make_model(path / "base")
    rng = np.random.default_rng(7)
    records = []
    for number in range(60):
        owners = rng.choice(24, size=rng.integers(1, 4), replace=False)
        words = [] if number % 7 == 0 else rng.choice(WORDS, size=rng.integers(3, 9))
        names = tuple(f"u{owner}" for owner in owners)
        records.append(Record(text=" ".join(words), owners=names, where=f"record {number}"))
    write_store(records, path / "shared", key=KEY)
    bound = ["bound", path / "shared", "--method", "min-separation", "--max-records-per-user", 9]
    bound += ["--steps", STEPS, "--batch-size", 4, "--separation", 2, "--out", path / "order.npz"]
    assert userdp(*bound).code == 0
    return path


def write_config(root: Path, place: Path, privacy: str, *, steps: int = STEPS) -> Path:
    """A configuration in `place`, of a store that was never counted."""
    is_ordered = "min-separated" in privacy
    if not (place / "store").exists():
        shutil.copytree(root / ("shared" if is_ordered else "store"), place / "store")
    path = place / f"config-{steps}.toml"
    path.write_text(
        CONFIG.format(
            store=place / "store",
            base=root / "base",
            selection=f'selection = "{root / "order.npz"}"' if is_ordered else "",
            privacy=privacy,
            steps=steps,
        )
    )
    return path


def plan_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["plan"]


def weights(run: Path) -> bytes:
    (file,) = (run / "model").glob("*.safetensors")
    return file.read_bytes()


def stop_after(run: Path, steps: int, *, checkpoint: int) -> None:
    """The run as if it had been killed after so many steps, with this checkpoint as its last."""
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > checkpoint:
            shutil.rmtree(path)
    for name in ("statement.json", "report.html", "MODEL_CARD.md"):
        (run / name).unlink(missing_ok=True)
    ledger = run / "ledger.jsonl"
    rows = ledger.read_bytes().splitlines(keepends=True)
    first = next(n for n, row in enumerate(rows) if json.loads(row)["kind"] == "step")
    ledger.write_bytes(b"".join(rows[: first + steps]))


# One of each kind of price, and the others with the slow tests.
USUAL = ("users in turn", "fixed order", "fixed order, buffered")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.slow) for n in RUNS]
)
def test_the_stated_epsilon_is_recomputed_from_the_ledger_and_a_stopped_run_ends_the_same(
    root: Path, tmp_path: Path, name: str
) -> None:
    config, run = write_config(root, tmp_path, RUNS[name]), tmp_path / "run"
    done = userdp("train", config, "--out", run, "--json").json
    assert done["steps"] == STEPS
    said = json.loads((run / "statement.json").read_text())
    assert "correlated" in said["noise"]
    expected = correlated_oracle.of_run(run)
    # Printed numbers are rounded up to two decimals.
    assert expected - 1e-6 <= said["planned_epsilon"] <= expected * (1 + 1e-3) + 0.01
    assert userdp("ledger", "verify", run, "--json").json["ok"]
    before, head = weights(run), (run / "ledger.jsonl").read_bytes()
    stop_after(run, 5, checkpoint=4)
    assert userdp("train", config, "--out", run, "--resume", "--json").json["steps"] == STEPS
    assert weights(run) == before
    assert (run / "ledger.jsonl").read_bytes() == head


def test_a_run_without_a_checkpoint_begins_again_with_the_same_strategy_or_not_at_all(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(root, tmp_path, RUNS["users in turn"]), tmp_path / "run"
    assert userdp("train", config, "--out", run).code == 0
    before = weights(run)
    stop_after(run, 3, checkpoint=0)
    with monkeypatch.context() as patch:
        patch.setattr("userdp.noise.banded.Banded.digest", "of another machine")
        told = userdp("train", config, "--out", run, "--resume")
    assert told.code == 2
    assert "must be taken again with the same noise" in told.err
    assert userdp("train", config, "--out", run, "--resume").code == 0
    assert weights(run) == before


def test_another_machine_goes_on_from_a_checkpoint_with_the_strategy_in_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(root, tmp_path, RUNS["users in turn"]), tmp_path / "run"
    assert userdp("train", config, "--out", run).code == 0
    before = weights(run)
    stop_after(run, 5, checkpoint=4)
    # There the search ends a little elsewhere.
    from userdp.noise.strategies import optimise

    def other(workload: Any, bands: int) -> Any:
        from userdp.noise.strategies.bands import from_columns

        columns = optimised(workload, bands).columns()
        columns[:, 1:] *= 1 + 1e-4
        return from_columns(columns)

    optimised = optimise.optimised

    monkeypatch.setattr(optimise, "optimised", other)
    from userdp.noise import banded

    banded._matrix.cache_clear()  # type: ignore[attr-defined]
    try:
        assert userdp("train", config, "--out", run, "--resume").code == 0
    finally:
        banded._matrix.cache_clear()  # type: ignore[attr-defined]
    assert weights(run) == before


def test_a_longer_run_correlates_its_own_steps_and_is_composed(root: Path, tmp_path: Path) -> None:
    config, run = write_config(root, tmp_path, RUNS["users in turn"]), tmp_path / "run"
    assert userdp("train", config, "--out", run).code == 0
    first = json.loads((run / "statement.json").read_text())["planned_epsilon"]
    told = userdp("train", config, "--out", run, "--resume", "--steps", STEPS + 4, "--json")
    assert told.json["new_steps"] == 4
    assert (plan_of(run)["noise"]["steps"], plan_of(run)["noise"]["bands"]) == (4, 3)
    both = json.loads((run / "statement.json").read_text())["planned_epsilon"]
    assert both > max(first, correlated_oracle.of_run(run))


REFUSED = {
    "no bands": (USERS, "bands is missing"),
    "fewer parts than bands": (USERS + "bands = 4", "parts=3"),
    "an order that is too close": (ORDER + "bands = 3", "separation=2"),
    "poisson": (USERS.split("sampler")[0] + "bands = 2", "cyclic-poisson"),
    "adaptive clipping": (
        USERS + "bands = 2\nclipping = 'adaptive'\nclip_count_noise = 4.0",
        "changes the clip norm",
    ),
    "a strategy nobody knows": (USERS + "bands = 2\nstrategy = 'best'", "strategy"),
    "record level": (RECORDS + "bands = 2\nrecord_level = true", "priced as it runs"),
    "more bands than steps": (USERS + "bands = 7", "at most as many bands"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_price_or_no_meaning_is_refused_in_words(
    root: Path, tmp_path: Path, name: str
) -> None:
    privacy, message = REFUSED[name]
    told = userdp("train", write_config(root, tmp_path, privacy), "--out", tmp_path / "run")
    assert told.code == 2
    assert message in told.err
    # Nothing is spent by what is refused.
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
