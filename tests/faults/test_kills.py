"""kill -9 at many points of runs, imports and boundings: whatever was begun ends as if not killed.

`make test-faults` runs this. Points are chosen with a fixed seed; a few more are moments of time,
so that the code between two writes is hit, too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny import make_model, make_store
from userdp.data.store import UserStore
from userdp.runs.check import check_run

pytestmark = pytest.mark.slow

STEPS = 100
HERE = Path(__file__).parent
# Without a fixed seed, a run that goes on has new noise from there.
OWN_SECRET = "own secret"
KINDS = ("full", "adaptive", "lora", "banded", OWN_SECRET)
# Of each kind: kills inside a save, inside the final save, in the ledger, and at moments of time.
POINTS = {"save": 5, "final": 3, "ledger": 6, "time": 3}
# Runs with these samplers are killed at fewer points: what they save is the same.
SAMPLERS = {
    "capped": 'sampler = "capped-poisson"\ncap = 5\n',
    "cyclic": 'sampler = "cyclic-poisson"\nparts = 5\n',
    "bins": 'sampler = "balls-in-bins"\n',
    "balanced": 'sampler = "balanced-iteration"\n',
    "allocation": 'sampler = "allocation"\n',
    "fixed size": 'sampler = "without-replacement"\n',
}
POINTS_OF_SAMPLERS = {"save": 2, "final": 1, "ledger": 3, "time": 0}


class Server:
    """Children that are killed."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "killed.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, where: Path, *arguments: object, **kill: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"place": None, "number": 0, "half": False, "seconds": None} | kill
        line = json.dumps(command | {"cwd": str(where), "args": list(map(str, arguments))})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills")
    make_store(path / "store", [1, 2, 3, 4] * 6)
    make_model(path / "base")
    return path


def write_config(path: Path, root: Path, kind: str) -> Path:
    clipping = 'clipping = "adaptive"\nclip_count_noise = 2.0\n' if kind == "adaptive" else ""
    lora = "[model.lora]\nrank = 2\n" if kind == "lora" else ""
    banded = (
        'sampler = "cyclic-poisson"\nparts = 4\nnoise = "banded"\nbands = 4\n'
        if kind == "banded"
        else ""
    )
    path.write_text(
        # Relative, so that the run is the same wherever it runs.
        '[data]\nstore = "store"\nsequence_length = 16\n'
        f'[model]\npath = "{root / "base"}"\n{lora}'
        "[privacy]\nnum_users = 24\nexpected_cohort_size = 4\ngroup_size = 2\nclip_norm = 0.5\n"
        f"noise_multiplier = 1.0\ndelta = 1e-2\n{clipping}{banded}{SAMPLERS.get(kind, '')}"
        f"[training]\nsteps = {STEPS}\ncheckpoint_every = 7\n"
        f"{'' if kind == OWN_SECRET else 'fixed_seed = 1'}\n"
        'schedule = "linear"\nlearning_rate = 0.01\n'
    )
    return path


def fresh(place: Path, root: Path, kind: str) -> Path:
    """A directory with a store of its own, and the configuration in it."""
    place.mkdir(parents=True)
    shutil.copytree(root / "store", place / "store")
    return write_config(place / "config.toml", root, kind)


def released(run: Path) -> dict[str, bytes]:
    """Everything that a finished run leaves for others."""
    files = [run / "ledger.jsonl", run / "statement.json", *sorted((run / "model").rglob("*"))]
    return {str(path.relative_to(run)): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture(scope="module")
def whole(
    root: Path, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, bytes], dict[str, int]]]:
    """What runs release that nobody kills, and how often they come to each place."""
    found: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {}
    for kind in (*KINDS, *SAMPLERS):
        place = tmp_path_factory.mktemp("whole") / kind
        config = fresh(place, root, kind)
        answer = server.run(place, "train", config, "--out", "run")
        assert answer["status"] == 0, answer["error"]
        found[kind] = released(place / "run"), answer["counts"]
        lines = found[kind][0]["ledger.jsonl"].splitlines()
        rows = [json.loads(line) for line in lines]
        assert sum(row["kind"] == "step" for row in rows) == STEPS
    return found


def points(kind: str) -> list[tuple[str, int, float]]:
    """Where, and two numbers that choose the point: these are repeatable."""
    rng = random.Random(f"kills {kind}")
    counts = POINTS_OF_SAMPLERS if kind in SAMPLERS else POINTS
    return [
        (place, index, rng.random()) for place, count in counts.items() for index in range(count)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*KINDS, *SAMPLERS])
def test_runs_end_as_if_nobody_had_killed_them(
    root: Path, server: Server, whole: Any, tmp_path: Path, kind: str
) -> None:
    expected, counts = whole[kind]
    rng = random.Random(f"second kills {kind}")
    killed = 0
    for place, index, share in points(kind):
        name = f"{place}-{index}"
        config = fresh(tmp_path / name, root, kind)
        run = tmp_path / name / "run"
        if place == "time":
            kill: dict[str, Any] = {"seconds": 0.3 + 1.5 * share}
        else:
            number = 1 + int(share * counts[place])
            kill = {"place": place, "number": number, "half": index % 2 == 1}
        answer = server.run(run.parent, "train", config, "--out", "run", **kill)
        killed += answer["status"] == -9
        assert answer["status"] in (-9, 0), answer["error"]
        if index % 3 == 2:
            # A second kill, while the run goes on.
            again = {"place": "ledger", "number": 1 + int(rng.random() * 40)}
            answer = server.run(run.parent, "train", config, "--out", "run", "--resume", **again)
            assert answer["status"] in (-9, 0), answer["error"]
        answer = server.run(run.parent, "train", config, "--out", "run", "--resume")
        assert answer["status"] == 0, (name, answer["error"])
        if kind == OWN_SECRET:
            # Its noise is its own. The statement is that of any run of this plan.
            found = released(run)
            assert found["statement.json"] == expected["statement.json"], name
            rows = [json.loads(row)["kind"] for row in found["ledger.jsonl"].splitlines()]
            assert rows.count("step") == STEPS, name
            assert check_run(run).problems == (), name
        else:
            assert released(run) == expected, name
        assert not list(run.rglob("*.partial")), name
        shutil.rmtree(tmp_path / name)
    # Kills at moments of time may come too late.
    assert killed >= len(points(kind)) - POINTS["time"]


def test_enough_points_are_hit() -> None:
    assert len(KINDS) * sum(POINTS.values()) >= 50
    assert len(KINDS) * POINTS["save"] >= 10
    assert len(KINDS) * POINTS["final"] >= 5


def import_source(place: Path) -> Path:
    """A file of records, large enough that a kill in time hits the import."""
    rng = random.Random("records")
    lines = [
        json.dumps({"user": f"u{rng.randrange(500)}", "text": f"record {number} " * 5})
        for number in range(20_000)
    ]
    path = place / "records.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.timeout(600)
def test_an_import_leaves_a_whole_store_or_none(server: Server, tmp_path: Path) -> None:
    source = import_source(tmp_path)
    whole = server.run(tmp_path, "import", source, "--out", "whole", "--key", "key")
    assert whole["status"] == 0, whole["error"]
    expected = json.loads((tmp_path / "whole" / "manifest.json").read_text())["records"]
    rng = random.Random("kills of imports")
    kills: list[dict[str, Any]] = [
        {"place": "other", "number": 1 + int(rng.random() * whole["counts"]["other"])}
        for _ in range(12)
    ]
    kills += [{"seconds": 0.02 + 0.6 * rng.random()} for _ in range(12)]
    killed = 0
    for number, kill in enumerate(kills):
        out = tmp_path / f"store{number}"
        answer = server.run(tmp_path, "import", source, "--out", out, "--key", "key", **kill)
        killed += answer["status"] == -9
        if out.exists():
            store = UserStore.open(out)
            store.verify()
            assert store.num_records == expected
            shutil.rmtree(out)
        # What a kill left is in nobody's way.
        again = server.run(tmp_path, "import", source, "--out", out, "--key", "key")
        assert again["status"] == 0, again["error"]
        assert not list(tmp_path.glob(".*.partial"))
        shutil.rmtree(out)
    assert killed >= 12


@pytest.mark.timeout(600)
def test_bounding_leaves_a_whole_selection_or_none(server: Server, tmp_path: Path) -> None:
    source = import_source(tmp_path)
    assert server.run(tmp_path, "import", source, "--out", "store", "--key", "key")["status"] == 0
    options = ("bound", "store", "--max-records-per-user", 3)
    whole = server.run(tmp_path, *options, "--out", "whole.npz")
    assert whole["status"] == 0, whole["error"]
    expected = (tmp_path / "whole.npz").read_bytes()
    rng = random.Random("kills of boundings")
    kills: list[dict[str, Any]] = [
        {"place": "other", "number": number + 1} for number in range(whole["counts"]["other"])
    ]
    kills += [{"seconds": 0.02 + 0.5 * rng.random()} for _ in range(8)]
    for number, kill in enumerate(kills):
        out = tmp_path / f"selection{number}.npz"
        server.run(tmp_path, *options, "--out", out, **kill)
        assert not out.exists() or out.read_bytes() == expected
        assert server.run(tmp_path, *options, "--out", out)["status"] == 0
        assert out.read_bytes() == expected
