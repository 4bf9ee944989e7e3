"""Tables and pictures of fine-tuning results, from made-up ones."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from reproductions.finetuning import table


def row(**more: Any) -> dict[str, Any]:
    """A run with random rows, our clip norm and the real users."""
    shared = {"data": "some_set", "method": "uls", "epsilon": 8.0, "rate": None, "rank": 1, "k": 4}
    shared |= {"clip_norm": 0.1, "schedule": "linear", "select": "random", "seed": 0}
    return shared | {"times_users": 1, "hypothetical": False, "loss_before": 4.0} | more


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def show(kind: str, rows: list[dict[str, Any]], tmp_path: Path, *more: str) -> None:
    """Print the table; the picture must be XML."""
    path, picture = write(tmp_path / "runs.jsonl", rows), tmp_path / "picture.svg"
    table.main([kind, str(path), "--svg", str(picture), *more])
    ElementTree.parse(picture)


def cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


def test_losses_by_epsilon_have_mean_spread_and_share_of_the_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(loss=3.1, seed=0),
        row(loss=3.3, seed=1),
        row(epsilon=None, loss=3.0, clip_norm=1.0),
    ]
    rows += [row(method="els", epsilon=3.0, loss=3.5), row(epsilon=1.0, loss=3.9)]
    # None of these belongs to the table.
    rows += [row(clip_norm=1.0, loss=9.0), row(schedule="constant", loss=9.0)]
    rows += [row(hypothetical=True, loss=9.0), row(rank=0, loss=9.0)]
    rows += [row(data=table.TUNED_ON, loss=9.0)]
    show("epsilon", rows, tmp_path)
    expected = "some set,4.000,3.900,-,3.200 ± 0.100,3.000,80%,-,3.500".split(",")
    assert cells(capsys.readouterr().out) == [expected]
    show("epsilon", rows, tmp_path, "--clip-norm", "1")
    assert cells(capsys.readouterr().out)[0][4] == "9.000"


def test_rows_without_later_settings_had_their_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = row(loss=3.2)
    del old["schedule"], old["select"]
    show("epsilon", [old], tmp_path)
    assert cells(capsys.readouterr().out)[0][4] == "3.200"


def test_the_planners_choices_are_paired_with_theirs_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {"schedule": "constant", "select": "random-chunk", "clip_norm": 1.0, "k": 10}
    rows = [row(loss=3.2, seed=0), row(loss=3.4, seed=1), row(loss=0.0, seed=7)]
    rows += [row(**theirs, loss=3.5, seed=0), row(**theirs, loss=3.5, seed=1)]
    rows += [row(**theirs, loss=3.9, rate=0.0004), row(epsilon=None, loss=3.0)]
    show("planner", rows[:2] + rows[3:], tmp_path)
    found = cells(capsys.readouterr().out)[0]
    assert found[3:] == [
        "3.900",
        "3.500 ± 0.000",
        "3.300 ± 0.100",
        "-0.200 ± 0.100",
        "3.000",
        "50%",
        "70%",
    ]
    show("planner", rows, tmp_path)
    # Seed 7 has no partner.
    assert cells(capsys.readouterr().out)[0][6] == "-0.200 ± 0.100"


def test_selections_are_in_order_and_compared_with_random_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"random": [3.0, 3.2], "longest": [2.9, 3.4], "shortest": [3.5], "lowest": [2.8, 3.0]}
    rows = [
        row(select=select, seed=seed, loss=loss)
        for select, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    show("selections", rows, tmp_path)
    found = cells(capsys.readouterr().out)
    assert [one[1] for one in found] == ["lowest", "random", "longest", "shortest"]
    by_name = {one[1]: one for one in found}
    assert by_name["lowest"][4:] == ["-0.200 ± 0.000", "2 of 2"]
    assert by_name["longest"][4:] == ["+0.050 ± 0.150", "1 of 2"]
    assert by_name["shortest"][4:] == ["+0.500", "0 of 1"]


def test_k_and_hypothetical_users_are_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show("k", [row(k=k, seed=s, loss=4 - k / 10) for k in (1, 20) for s in (0, 1)], tmp_path)
    assert cells(capsys.readouterr().out) == [["some set", "8", "3.900 ± 0.000", "2.000 ± 0.000"]]
    rows = [row(loss=3.5), row(loss=3.2, times_users=10, hypothetical=True)]
    rows.append(row(data="other", loss=3.0))
    show("hypothetical", rows, tmp_path)
    assert cells(capsys.readouterr().out) == [["some set", "8", "3.500", "3.200"]]


def test_the_results_that_are_here_give_the_table_of_the_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table.main(["epsilon", "reproductions/finetuning/results/epsilon.jsonl", "--clip-norm", "1"])
    numbers = {one[0]: one[1:7] for one in cells(capsys.readouterr().out)}
    assert numbers["git mailing list"] == ["3.749", "3.703", "3.552", "3.513", "3.326", "56%"]
