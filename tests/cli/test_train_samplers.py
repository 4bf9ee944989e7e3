"""`userdp train` with every sampler: what it costs, how it goes on, and what it refuses.

The epsilon of every run is recomputed from its ledger by `sampler_oracle`, which uses nothing of
`userdp`.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import sampler_oracle
from cli_runner import userdp
from sampler_runs import plan_of, stated, stop_after_four_steps, weights
from stores import KEY
from tiny import WORDS, make_model, make_store
from userdp.bounding.edges import Edges
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
num_users = {users}
clip_norm = 0.5
noise_multiplier = 3.0
delta = 1e-2
{privacy}
[training]
steps = {steps}
learning_rate = 0.01
checkpoint_every = 2
fixed_seed = 1
"""
USERS = "expected_cohort_size = 6\ngroup_size = 3\n"
RECORDS = "unit = 'record'\nexpected_batch_size = 12\ngroup_size = 2\n"
# The keys of [privacy], and how far the stated epsilon may lie above the truth. Poisson and cut
# cohorts are priced exactly; the price of several participations is a bound.
SAMPLERS: dict[str, tuple[str, float]] = {
    "poisson": (USERS, 1e-3),
    "poisson records": (RECORDS, 1e-3),
    "capped-poisson": (USERS + "sampler = 'capped-poisson'\ncap = 8", 1e-3),
    "cyclic-poisson": (USERS + "sampler = 'cyclic-poisson'\nparts = 3", 1e-3),
    "cyclic-poisson records": (RECORDS + "sampler = 'cyclic-poisson'\nparts = 3", 1e-3),
    "balls-in-bins": (USERS + "sampler = 'balls-in-bins'", 0.03),
    "balanced-iteration": (USERS + "sampler = 'balanced-iteration'", 0.03),
    "allocation": ("group_size = 3\nsampler = 'allocation'\nparticipations = 2", 0.1),
    "without-replacement": (USERS + "sampler = 'without-replacement'", 1e-3),
    "min-separated": (
        "sampler = 'min-separated'\nunit = 'record'\nadjacency = 'fixed-graph-zero-out'",
        1e-3,
    ),
    "min-separated, replaced records": (
        "sampler = 'min-separated'\nunit = 'record'\nadjacency = 'fixed-graph-replace'",
        1e-3,
    ),
}
# Poisson sampling has tests of its own in every file, and mixtures take `dp_accounting` seconds.
each_sampler = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name.startswith("poisson") or name.endswith("records")
        else name
        for name in SAMPLERS
    ],
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samplers")
    make_store(path / "store", [1, 2, 3, 4, 2, 5] * 4)
    make_model(path / "base")
    shared_store(path / "shared")
    bound = ["bound", path / "shared", "--method", "min-separation", "--max-records-per-user", 9]
    bound += ["--steps", STEPS, "--batch-size", 4, "--separation", 2, "--out", path / "order.npz"]
    assert userdp(*bound).code == 0
    return path


def shared_store(path: Path) -> None:
    """Records of one to three of 24 owners; every seventh has no word that could be predicted."""
    rng = np.random.default_rng(7)
    records = []
    for number in range(60):
        owners = rng.choice(24, size=rng.integers(1, 4), replace=False)
        words = [] if number % 7 == 0 else rng.choice(WORDS, size=rng.integers(3, 9))
        names = tuple(f"u{owner}" for owner in owners)
        records.append(Record(text=" ".join(words), owners=names, where=f"record {number}"))
    write_store(records, path, key=KEY)


def write_config(root: Path, place: Path, name: str, *, steps: int = STEPS, more: str = "") -> Path:
    """A configuration in `place`, of a store that was never counted."""
    is_ordered = name.startswith("min-separated")
    if not (place / "store").exists():
        shutil.copytree(root / ("shared" if is_ordered else "store"), place / "store")
    path = place / f"{name.replace(' ', '-')}-{steps}.toml"
    path.write_text(
        CONFIG.format(
            store=place / "store",
            base=root / "base",
            selection=f'selection = "{root / "order.npz"}"' if is_ordered else "",
            users=24,
            privacy=SAMPLERS.get(name, (name, 0))[0] + "\n" + more,
            steps=steps,
        )
    )
    return path


@each_sampler
def test_the_stated_epsilon_is_recomputed_from_the_ledger_and_a_stopped_run_ends_the_same(
    root: Path, tmp_path: Path, name: str
) -> None:
    config, run = write_config(root, tmp_path, name), tmp_path / "run"
    done = userdp("train", config, "--out", run, "--json").json
    assert done["steps"] == STEPS
    least, largest = sampler_oracle.of_run(run)
    # Printed numbers are rounded up to two decimals.
    assert least - 1e-6 <= stated(run) <= largest * (1 + SAMPLERS[name][1]) + 0.01
    assert userdp("ledger", "verify", run, "--json").json["ok"]
    before, head = weights(run), (run / "ledger.jsonl").read_bytes()
    stop_after_four_steps(run)
    assert userdp("train", config, "--out", run, "--resume", "--json").json["steps"] == STEPS
    assert weights(run) == before
    assert (run / "ledger.jsonl").read_bytes() == head


@pytest.mark.parametrize(
    "name",
    [
        "allocation",
        pytest.param("balls-in-bins", marks=pytest.mark.slow),
        pytest.param("balanced-iteration", marks=pytest.mark.slow),
    ],
)
def test_a_longer_run_deals_users_afresh_and_is_composed(
    root: Path, tmp_path: Path, name: str
) -> None:
    # Where a user takes part was drawn for the first run's steps. More steps are a second run.
    config, run = write_config(root, tmp_path, name), tmp_path / "run"
    assert userdp("train", config, "--out", run).code == 0
    first = stated(run)
    longer = userdp("train", config, "--out", run, "--resume", "--steps", STEPS + 3, "--json").json
    assert (longer["steps"], longer["new_steps"]) == (STEPS + 3, 3)
    assert plan_of(run)["steps"] == 3
    if name == "allocation":
        assert plan_of(run)["sampler"]["steps"] == 3
        # Two of six steps, and so one of three.
        assert plan_of(run)["sampler"]["participations"] == 1
    alone = sampler_oracle.of_plan(plan_of(run))[0]
    assert max(first, alone) < stated(run) < first + alone + 0.5


def test_shuffled_batches_say_first_that_there_is_no_guarantee_and_count_as_non_private(
    root: Path, tmp_path: Path
) -> None:
    config = write_config(root, tmp_path, USERS + "sampler = 'shuffled'")
    config.write_text(config.read_text().replace("fixed_seed = 1", ""))
    told = userdp("train", config, "--out", tmp_path / "run", "--json").json
    assert told["epsilon"] is None
    said = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert said["sentence"].startswith("guarantee: none, the batches were shuffled")
    assert "That is not what ran" in said["sentence"]
    assert not said["guarantee"]
    assert said["planned_epsilon"] is None
    poisson = {"type": "PoissonUsers", "user_sampling_prob": 6 / 24, "group_size": 3}
    as_if = sampler_oracle.of_plan(plan_of(tmp_path / "run") | {"sampler": poisson})[0]
    assert said["as_if_epsilon"] == pytest.approx(as_if, abs=0.011)
    spent = userdp("budget", tmp_path / "store", "--json").json
    assert spent["spent_epsilon"] is None or math.isinf(spent["spent_epsilon"])
    report = userdp("report", tmp_path / "run", "--json").json
    assert "guarantee: none" in Path(report["card"]).read_text()
    # It goes on as it began, still without a promise.
    longer = userdp("train", config, "--out", tmp_path / "run", "--resume", "--steps", 8, "--json")
    assert longer.json["epsilon"] is None


REFUSED = {
    "more users than places": (
        USERS.replace("6", "3") + "sampler = 'without-replacement'",
        "num_users = 24",
        "num_users = 20",
        "more users than num_users=20",
    ),
    "more users than a cap is priced for": (
        USERS.replace("6", "3") + "sampler = 'capped-poisson'\ncap = 5",
        "num_users = 24",
        "num_users = 23",
        "more users than num_users=23",
    ),
    "no cap": (USERS + "sampler = 'capped-poisson'", "", "", "cap is missing"),
    "no parts": (USERS + "sampler = 'cyclic-poisson'", "", "", "parts is missing"),
    "too many parts": (
        USERS + "sampler = 'cyclic-poisson'\nparts = 5",
        "",
        "",
        "Lower parts",
    ),
    "a key of another sampler": (USERS + "cap = 5", "", "", "cap has no meaning"),
    "a cohort size beside participations": (
        USERS + "sampler = 'allocation'\nparticipations = 3",
        "",
        "",
        "Leave expected_cohort_size out",
    ),
    "more participations than steps": (
        "sampler = 'allocation'\nparticipations = 7",
        "",
        "",
        "nobody takes part twice",
    ),
    "an order without a selection": (
        RECORDS + "sampler = 'min-separated'",
        "",
        "",
        "[data] selection is missing",
    ),
    "shuffled at record level": (
        RECORDS + "sampler = 'shuffled'\nrecord_level = true",
        "",
        "",
        "no accounting rule",
    ),
    "allocation of replaced users": (
        "adjacency = 'replace'\nsampler = 'allocation'\nparticipations = 2",
        "",
        "",
        "no accounting rule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_price_or_no_meaning_is_refused_in_words(
    root: Path, tmp_path: Path, name: str
) -> None:
    privacy, old, new, message = REFUSED[name]
    config = write_config(root, tmp_path, privacy)
    config.write_text(config.read_text().replace(old, new))
    told = userdp("train", config, "--out", tmp_path / "run")
    assert told.code == 2
    assert message in told.err
    # Nothing is spent by what is refused.
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_an_order_for_fewer_steps_than_planned_is_refused(root: Path, tmp_path: Path) -> None:
    config = write_config(root, tmp_path, "min-separated", steps=STEPS + 1)
    told = userdp("train", config, "--out", tmp_path / "run")
    assert told.code == 2
    assert f"the selection has {STEPS} batches" in told.err


def test_a_selection_without_an_order_is_refused(root: Path, tmp_path: Path) -> None:
    config = write_config(root, tmp_path, "min-separated")
    bound = ["bound", tmp_path / "store", "--method", "greedy", "--max-records-per-user", 2]
    assert userdp(*bound, "--out", tmp_path / "greedy.npz").code == 0
    config.write_text(
        config.read_text().replace(str(root / "order.npz"), str(tmp_path / "greedy.npz"))
    )
    told = userdp("train", config, "--out", tmp_path / "run")
    assert told.code == 2
    assert "no batches in an order" in told.err


@pytest.mark.parametrize("how", ["too soon again", "too often"])
def test_batches_that_were_edited_are_counted_again_and_refused(
    root: Path, tmp_path: Path, how: str
) -> None:
    config = write_config(root, tmp_path, "min-separated")
    arrays = dict(np.load(root / "order.npz", allow_pickle=False))
    edges = Edges.load(root / "shared")
    # No record comes twice: only who counts owners can see what is wrong.
    busiest = int(np.argmax(edges.degrees()))
    own = edges.record_of_incidence()[edges.owners == busiest][:STEPS]
    assert len(own) == STEPS > int(arrays["realised_bound"])
    batches = own.reshape(STEPS, 1)
    if how == "too often":
        arrays["separation"] = np.asarray(1)
    np.savez(tmp_path / "edited.npz", **(arrays | {"batches": batches}))
    text = config.read_text().replace(str(root / "order.npz"), str(tmp_path / "edited.npz"))
    config.write_text(text)
    told = userdp("train", config, "--out", tmp_path / "run")
    assert told.code == 2
    assert ("takes part again after" if how == "too soon again" else "takes part in") in told.err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
