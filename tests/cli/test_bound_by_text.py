"""`userdp bound` by a criterion on each user's own records, and what may be trained on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from cli_runner import userdp
from tiny import make_model, make_store
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.config.file import load_config
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import tokenise_selected
from userdp.errors import InputError
from userdp.sampling import PoissonRecords, PoissonUsers

RECORDS_PER_USER = [1, 2, 5, 9]
METHODS = ["longest", "shortest", "highest-perplexity", "lowest-perplexity"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> UserStore:
    return make_store(tmp_path_factory.mktemp("store") / "store", RECORDS_PER_USER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    path = tmp_path_factory.mktemp("model") / "model"
    return path, *make_model(path)


def bound(store: UserStore, out: Path, method: str, *more: object) -> dict[str, Any]:
    command = ["bound", store.path, "--max-records-per-user", 2, "--method", method, *more]
    return userdp(*command, "--out", out, "--json").json


def losses(store: UserStore, model: Any, tokenizer: Any) -> list[float]:
    """Mean loss of each record, one record at a time."""
    found: list[float] = []
    for record in range(store.num_records):
        ids = [*tokenizer(store.text(record))["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            found.append(float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_user_keeps_the_records_that_the_criterion_ranks_first(
    method: str, store: UserStore, model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, network, tokenizer = model
    if "perplexity" in method:
        found = bound(store, tmp_path / "sel.npz", method, "--model", path)
        scores = losses(store, network, tokenizer)
    else:
        found = bound(store, tmp_path / "sel.npz", method)
        scores = [float(len(store.text(record))) for record in range(store.num_records)]
    sign = -1 if method in ("longest", "highest-perplexity") else 1
    selection = Selection.load(tmp_path / "sel.npz")
    selection.check(Edges.load(store.path))
    for user in range(store.num_users):
        own = store.records_of(user).tolist()
        kept = [record for record in own if selection.multiplicity[record]]
        ranked = sorted(own, key=lambda record: (sign * scores[record], record))
        assert len(kept) == min(2, len(own))
        # Scores in batches and alone may differ in the last bits: compare them, not the records.
        assert sorted(scores[i] for i in kept) == pytest.approx(
            sorted(scores[i] for i in ranked[:2]), rel=1e-5
        )
    assert found["size"] == found["distinct"] == found["upper_bound"] == 7
    assert found["optimal"] is True
    assert found["method"] == selection.method == method


def test_a_record_without_a_token_to_predict_comes_last_either_way(tmp_path: Path) -> None:
    _, tokenizer = make_model(tmp_path / "model")
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    tokenizer.save_pretrained(tmp_path / "model")
    records = [Record(text, ("ann",), str(i)) for i, text in enumerate(["\u200b", "red", "teal"])]
    write_store(records, tmp_path / "store", key=bytes(32))
    store = UserStore.open(tmp_path / "store")
    for method in ("highest-perplexity", "lowest-perplexity"):
        bound(store, tmp_path / "sel.npz", method, "--model", tmp_path / "model")
        assert Selection.load(tmp_path / "sel.npz").multiplicity.tolist() == [0, 1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_shared_records_are_refused_with_the_reason_and_no_text(
    method: str, model: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    write_store([Record("violet", ("ann", "bob"), "1")], tmp_path / "store", key=bytes(32))
    more = ["--model", model[0]] if "perplexity" in method else []
    command = ["bound", tmp_path / "store", "--max-records-per-user", 1, "--method", method]
    result = userdp(*command, *more, "--out", tmp_path / "sel.npz")
    assert result.code == 2
    assert "change which records of another user are kept" in result.err
    assert result.err.count("\n") == 1
    assert "violet" not in result.err
    assert not (tmp_path / "sel.npz").exists()


@pytest.fixture
def config(store: UserStore, model: tuple[Path, Any, Any], tmp_path: Path) -> Callable[[str], Path]:
    bound(store, tmp_path / "sel.npz", "longest")

    def write(privacy: str, selection: str = "sel.npz") -> Path:
        path = tmp_path / "run.toml"
        path.write_text(
            f"""[data]
store = "{store.path}"
selection = "{tmp_path / selection}"
sequence_length = 16
[model]
path = "{model[0]}"
[privacy]
num_users = 4
clip_norm = 1.0
epsilon = 8.0
delta = 1e-2
{privacy}
[training]
steps = 3
fixed_seed = 1
"""
        )
        return path

    return write


def test_single_owners_plan_with_the_bound_that_was_asked_for(
    config: Callable[..., Path],
) -> None:
    users = load_config(config("expected_cohort_size = 2")).plan()
    assert users.sampler == PoissonUsers(user_sampling_prob=0.5, group_size=2)
    # num_users times the bound: the size of the selection is secret under add-remove.
    records = load_config(config('unit = "record"\nexpected_batch_size = 2')).plan()
    assert records.sampler == PoissonRecords(record_sampling_prob=0.25, group_size=2)
    with pytest.raises(InputError, match="below the selection's bound of 2"):
        load_config(config('unit = "record"\nexpected_batch_size = 2\ngroup_size = 1')).plan()


def test_selections_in_which_users_interfere_need_a_fixed_graph(
    config: Callable[..., Path], store: UserStore, tmp_path: Path
) -> None:
    bound(store, tmp_path / "random.npz", "random", "--seed", 1)
    with pytest.raises(InputError, match="'random' may let one user change"):
        load_config(config("expected_cohort_size = 2", "random.npz")).plan()
    shared = Edges.from_lists([[0, 1]], num_users=2)
    selection = Selection.of(shared, np.array([1]), 1, method="greedy")
    with pytest.raises(InputError, match="only a fixed-graph adjacency"):
        selection.check_user_by_user(shared)


@pytest.mark.parametrize("adjacency", ["fixed-graph-zero-out", "fixed-graph-replace"])
def test_a_selection_by_text_trains_under_fixed_graph_privacy(
    adjacency: str, config: Callable[..., Path], tmp_path: Path
) -> None:
    privacy = f'unit = "record"\nexpected_batch_size = 2\nadjacency = "{adjacency}"'
    found = userdp("train", config(privacy), "--out", tmp_path / "run", "--json").json
    assert found["steps"] == 3
    assert math.isfinite(found["epsilon"])


def test_selected_rows_belong_to_their_owners_if_there_is_one_each(
    store: UserStore, model: tuple[Path, Any, Any]
) -> None:
    records = np.array([0, 4, 4, 16])
    owners = store.sole_owners()
    rows = tokenise_selected(store, model[2], records, sequence_length=16, owners=owners)
    assert rows.owners.tolist() == owners[records].tolist()
    assert rows.num_users == store.num_users
    alone = tokenise_selected(store, model[2], records, sequence_length=16)
    assert alone.owners.tolist() == [0, 1, 2, 3]
    assert alone.tokens.tolist() == rows.tokens.tolist()
