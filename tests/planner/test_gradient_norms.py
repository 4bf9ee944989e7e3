"""L(G) of a tiny GPT-2, against a computation that shares nothing but the model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import models_zoo
from task_stores import CHATML, bert_tokenizer, store_of, word_chat_tokenizer
from tiny import make_model, make_store
from userdp.cli import app
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.planner.gradient_norms import median_norms
from userdp.tasks import CausalTask


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
        CausalTask(pad_token=tokenizer.pad_token_id),
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
        CausalTask(pad_token=tokenizer.pad_token_id),
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
            CausalTask(pad_token=0),
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
        CausalTask(pad_token=tokenizer.pad_token_id),
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


def test_gradients_of_chats_are_those_of_the_assistants_turns(tmp_path):
    """The oracle computes the loss of the assistant's words by hand, one chat at a time."""
    tokenizer = word_chat_tokenizer(CHATML)
    torch.manual_seed(1)
    model = models_zoo.gpt2(vocabulary=len(tokenizer)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [("w1 w2 w3", "w4 w5"), ("w2", "w6 w1 w1"), ("w7 w8", "w3"), ("w5", "w2 w9")]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in turns
    ]
    store_of(tmp_path / "store", [json.dumps(chat) for chat in chats], "chat", users=4)
    command = f"plan {tmp_path / 'store'} {OPTIONS} --model {tmp_path / 'model'}"
    result = CliRunner().invoke(app, f"{command} --sequence-length 24 --sample-users 4".split())
    assert result.exception is None, result.stderr
    norms = []
    for asked, said in turns:
        before, after = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (f"<|user|>{asked}<end><|assistant|>", f"{said}<end>")
        )
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}, {"role": "assistant", "content": said}],
            return_dict=False,
        )
        assert len(before) + len(after) == len(whole)
        ids = torch.tensor(whole)
        first = len(before)
        model.zero_grad()
        F.cross_entropy(model(ids[None]).logits[0, first - 1 : -1], ids[first:]).backward()
        norms.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm())
    exact = float(np.median(norms))
    assert json.loads(result.stdout)["norms"]["1"] == pytest.approx(exact, rel=1e-4)


def test_gradients_of_a_masked_model_need_its_task(tmp_path):
    tokenizer = bert_tokenizer()
    models_zoo.of_family("Bert", "ForMaskedLM", vocab_size=len(tokenizer)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    store_of(tmp_path / "store", ["w1 w2 w3 w4 w5 w6"] * 8, "plain", users=4)
    command = f"plan {tmp_path / 'store'} {OPTIONS} --model {tmp_path / 'model'}"
    refused = CliRunner().invoke(app, command.split())
    assert isinstance(refused.exception, InputError)
    found = CliRunner().invoke(app, f"{command} --task masked --sequence-length 12".split())
    assert found.exception is None, found.stderr
    assert json.loads(found.stdout)["norms"]["1"] > 0


def test_a_task_without_a_model_is_refused(tmp_path):
    result = CliRunner().invoke(app, f"plan {OPTIONS} --task chat".split())
    assert isinstance(result.exception, InputError)
    assert "give --model" in str(result.exception)
