"""A part of one's own, from another package: configured, priced, trained with and reported.

The package lies in tests/extension and is found by its entry point. Nothing in src/ names it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import userdp

# Each question starts a new interpreter.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCE = Path(userdp.__file__).parents[1]
DOCS = HERE.parent / "docs" / "extending.md"


def fresh(*arguments: object, package: bool = True) -> subprocess.CompletedProcess[str]:
    """A new interpreter, in which the package is installed or not."""
    paths = [SOURCE, HERE, *([HERE / "extension"] if package else [])]
    return subprocess.run(
        [sys.executable, "-P", HERE / "extension" / "drive.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, base_model: Path, train_store: Path) -> Any:
    root = tmp_path_factory.mktemp("extending")

    def write(name: str, privacy: str, training: str = "") -> Path:
        path = root / f"{name}.toml"
        path.write_text(
            f'[data]\nstore = "{train_store}"\nsequence_length = 16\n[model]\npath = '
            f'"{base_model}"\n[privacy]\nnum_users = 20\nexpected_cohort_size = 5\ngroup_size = 2\n'
            f"delta = 1e-2\n{privacy}\n[training]\nsteps = 6\n{training}\n"
        )
        return path

    return write


@pytest.fixture(scope="module")
def runs(configs: Callable[..., Path]) -> dict[str, Any]:
    cyclic = configs(
        "cyclic",
        'sampler = "toy-cyclic"\ntoy_parts = 3\nadjacency = "zero-out"\nnoise_multiplier = 2.0\n'
        'clipping = "toy-smooth"\nclip_norm = 0.5',
        'update = "toy-local"\ntoy_steps = 3',
    )
    twice = configs("twice", 'noise = "toy-twice"\nepsilon = 4.0\nclip_norm = 1.0')
    return json.loads(fresh(cyclic, twice).stdout)


def test_a_sampler_of_ones_own_is_priced_by_its_own_line_of_the_table(runs: dict[str, Any]) -> None:
    # Six steps in three parts: each user takes part twice, so two Gaussian steps are the price.
    plan = userdp.Plan.sample_users(
        num_users=20,
        expected_cohort_size=20,
        group_size=2,
        steps=2,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-2,
        adjacency=userdp.Adjacency.ZERO_OUT,
    )
    assert runs["cyclic"]["train"]["epsilon"] == pytest.approx(plan.epsilon())
    assert runs["cyclic"]["account"]["epsilon"] == runs["cyclic"]["train"]["epsilon"]


def test_a_noise_of_ones_own_is_calibrated_to_the_target(runs: dict[str, Any]) -> None:
    assert 3.9 < runs["twice"]["train"]["epsilon"] <= 4.0
    assert runs["twice"]["plan"]["noise"]["type"] == "TwiceDrawn"


def test_reports_say_what_the_parts_say_and_whose_they_are(runs: dict[str, Any]) -> None:
    for text in (runs["cyclic"]["card"], runs["cyclic"]["page"]):
        assert "users in 3 parts, one part a step" in text
        assert "3 local steps at rate 0.1, smooth clipping to 0.5" in text
        assert "toy_parts.CyclicUsers is no part of userdp" in text
    assert "Gaussian in two halves" in runs["twice"]["card"]


def test_the_noise_is_bound_to_the_source_of_the_parts(runs: dict[str, Any]) -> None:
    assert runs["cyclic"]["bound_to"]["parts"] == runs["twice"]["bound_to"]["parts"] != ""


def test_an_unknown_part_is_refused_by_name(configs: Callable[..., Path]) -> None:
    path = configs("unknown", 'sampler = "toy-cyclic"\nnoise_multiplier = 2.0\nclip_norm = 1.0')
    found = json.loads(fresh(path, package=False).stdout)
    assert "there is no sampler 'toy-cyclic'" in found["unknown"]["error"]


def test_the_page_shows_these_very_parts() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.S)
    written = (HERE / "extension" / "toy_parts.py").read_text()
    assert len(blocks) == 4
    for block in blocks:
        assert block.strip() in written
