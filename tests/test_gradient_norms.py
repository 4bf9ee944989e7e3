"""L(G) of a tiny GPT-2, against a computation that shares nothing but the model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from tiny import make_model, make_store
from userdp.cli import app
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.gradient_norms import median_norms


def record_gradient(model, tokenizer, text: str) -> torch.Tensor:
    """The gradient of one record's own mean loss, through `backward`."""
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    model.zero_grad()
    F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:]).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def test_all_records_of_all_users_match_brute_force(tmp_path):
    # As many records for each as the group takes: no draw is left, the whole set is compared.
    store = make_store(tmp_path / "store", [4] * 5, seed=1)
    model, tokenizer = make_model(tmp_path / "model")
    rows = tokenise(store, tokenizer, sequence_length=64)
    found = median_norms(
        model,
        rows,
        pad_token=tokenizer.pad_token_id,
        largest_group=5,
        sample_users=99,
        rng=np.random.default_rng(0),
    )
    assert list(found) == [1, 2, 4]
    gradients = [
        [record_gradient(model, tokenizer, store.text(int(r))) for r in store.records_of(user)]
        for user in range(5)
    ]
    exact = np.median([float(torch.stack(own).mean(dim=0).norm()) for own in gradients])
    assert found[4] == pytest.approx(exact, rel=1e-5)


def test_every_group_size_matches_brute_force_on_the_same_draw(tmp_path):
    # Users with fewer records than the group give all they have.
    counts = [1, 2, 3, 7, 9, 20]
    store = make_store(tmp_path / "store", counts, seed=2)
    model, tokenizer = make_model(tmp_path / "model")
    rows = tokenise(store, tokenizer, sequence_length=64)
    found = median_norms(
        model,
        rows,
        pad_token=tokenizer.pad_token_id,
        largest_group=16,
        sample_users=4,
        rng=np.random.default_rng(7),
    )
    rng = np.random.default_rng(7)
    users = rng.choice(np.arange(len(counts)), size=4, replace=False)
    orders = [rng.permutation(store.records_of(int(user))) for user in users]
    exact = {
        size: np.median(
            [
                float(
                    torch.stack(
                        [record_gradient(model, tokenizer, store.text(int(r))) for r in own[:size]]
                    )
                    .mean(dim=0)
                    .norm()
                )
                for own in orders
            ]
        )
        for size in (1, 2, 4, 8, 16)
    }
    assert found == pytest.approx(exact, rel=1e-5)


def test_nothing_to_sample_is_refused(tmp_path):
    store = make_store(tmp_path / "store", [1, 1])
    model, tokenizer = make_model(tmp_path / "model")
    rows = tokenise(store, tokenizer, sequence_length=64)
    with pytest.raises(InputError, match="sample_users=0"):
        median_norms(
            model,
            rows,
            pad_token=0,
            largest_group=1,
            sample_users=0,
            rng=np.random.default_rng(0),
        )


OPTIONS = "--epsilon 4 --delta 1e-3 --steps 10 --compute 8 --records-per-user 4 --users 20 --json"


def test_plan_estimates_with_a_model_and_says_that_it_peeked(tmp_path):
    store = make_store(tmp_path / "store", [4] * 20, seed=3)
    model, tokenizer = make_model(tmp_path / "model")
    command = f"plan {tmp_path / 'store'} {OPTIONS} --model {tmp_path / 'model'}"
    result = CliRunner().invoke(app, f"{command} --sample-users 6".split())
    assert result.exception is None, result.stderr
    found = json.loads(result.stdout)
    norms = median_norms(
        model,
        tokenise(store, tokenizer, sequence_length=64),
        pad_token=tokenizer.pad_token_id,
        largest_group=4,
        sample_users=6,
        rng=np.random.default_rng(0),
    )
    assert {int(size): norm for size, norm in found["norms"].items()} == pytest.approx(norms)
    for one in found["candidates"]:
        size = 1 if one["method"] == "ELS" else one["group_size"]
        expected = one["noise_multiplier"] * norms[size] / one["cohort_size"]
        assert one["noise_stddev"] == pytest.approx(expected)
    assert [entry.split(",")[0] for entry in found["peeked"]] == ["gradient norms"]
    assert "for free" in found["not_covered"][0]


def test_a_model_needs_a_store_and_no_other_norms(tmp_path):
    result = CliRunner().invoke(app, f"plan {OPTIONS} --model {tmp_path}".split())
    assert isinstance(result.exception, InputError)
    assert "give the store" in str(result.exception)
