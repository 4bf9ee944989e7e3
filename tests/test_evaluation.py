"""Held-out loss against a brute-force loss, one row and one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import models_zoo
from userdp.data.tokens import TokenRows
from userdp.errors import InputError
from userdp.evaluation import evaluate, mean_losses
from userdp.tasks import ClassificationTask, MaskedTask


def rows(lengths: list[int], owners: list[int]) -> TokenRows:
    rng = np.random.default_rng(0)
    return TokenRows(
        tokens=rng.integers(1, models_zoo.VOCABULARY, size=sum(lengths)).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=np.asarray(owners, dtype=np.int64),
        num_users=max(owners) + 1,
    )


@pytest.mark.parametrize("architecture", ["gpt2 tied", "llama", "lstm tied"])
@pytest.mark.parametrize("batch_tokens", [1, 20, 8192])
def test_loss_and_accuracy_match_brute_force(architecture: str, batch_tokens: int) -> None:
    model = models_zoo.build(architecture)
    data = rows([5, 2, 11, 7, 2, 3], [0, 0, 1, 3, 1, 0])
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for row in range(len(data)):
            tokens = data.tokens[data.indptr[row] : data.indptr[row + 1]].tolist()
            for position in range(1, len(tokens)):
                output = model(input_ids=torch.tensor([tokens[:position]]))
                logits = output if isinstance(output, torch.Tensor) else output.logits
                log_probs = torch.log_softmax(logits[0, -1], dim=-1)
                loss -= log_probs[tokens[position]].item()
                correct += int(log_probs.argmax()) == tokens[position]
                count += 1
    found = evaluate(model, data, pad_token=0, batch_tokens=batch_tokens)
    assert found.tokens == count == 24
    assert found.loss == pytest.approx(loss / count, rel=1e-6)
    assert found.accuracy_top1 == pytest.approx(correct / count)
    assert found.users == 3
    assert found.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 8192])
def test_losses_of_records_match_brute_force(batch_tokens: int) -> None:
    model = models_zoo.build("gpt2 tied").train()
    data = rows([5, 2, 11, 7, 2, 3], [0, 0, 1, 3, 1, 0])
    record_of_row = np.array([0, 0, 1, 4, 2, 3])
    found = mean_losses(
        model, data, record_of_row, num_records=6, pad_token=0, batch_tokens=batch_tokens
    )
    assert model.training
    model.eval()
    losses: list[list[float]] = [[] for _ in range(6)]
    with torch.no_grad():
        for row, record in enumerate(record_of_row.tolist()):
            tokens = data.tokens[data.indptr[row] : data.indptr[row + 1]].tolist()
            for position in range(1, len(tokens)):
                logits = model(input_ids=torch.tensor([tokens[:position]])).logits[0, -1]
                losses[record].append(-torch.log_softmax(logits, dim=-1)[tokens[position]].item())
    assert found[:5] == pytest.approx([np.mean(one) for one in losses[:5]], rel=1e-5)
    assert np.isnan(found[5])


def test_losses_of_a_users_records_do_not_depend_on_other_users_to_the_last_bit() -> None:
    model = models_zoo.build("gpt2 tied")
    lengths, owners = [5, 9, 3, 11, 7, 2, 3], [0, 1, 0, 1, 0, 2, 0]
    data = rows(lengths, owners)
    own = np.flatnonzero(np.array(owners) == 0)
    alone = TokenRows(
        tokens=np.concatenate([data.tokens[data.indptr[i] : data.indptr[i + 1]] for i in own]),
        indptr=np.concatenate([[0], np.cumsum(np.array(lengths)[own])]).astype(np.int64),
        owners=np.zeros(len(own), dtype=np.int64),
        num_users=1,
    )
    together = mean_losses(model, data, np.arange(7), num_records=7, pad_token=0)
    by_itself = mean_losses(model, alone, np.arange(len(own)), num_records=len(own), pad_token=0)
    assert together[own].tolist() == by_itself.tolist()


class Watched(torch.nn.Module):
    """Predicts nothing; notes the tokens of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[set[int]] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(set(input_ids.flatten().tolist()) - {0})
        return self.weight * torch.ones(*input_ids.shape, 10)


def test_records_of_two_users_are_never_in_one_batch() -> None:
    # A user's tokens are all that user's number.
    lengths, owners = np.array([4, 4, 4, 2, 2, 4]), np.array([1, 2, 1, 3, 2, 3])
    data = TokenRows(
        tokens=np.repeat(owners, lengths).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        owners=owners,
        num_users=4,
    )
    model = Watched()
    mean_losses(model, data, np.arange(6), num_records=6, pad_token=0)
    assert sorted(map(sorted, model.seen)) == [[1], [2], [3]]


def test_evaluation_leaves_the_model_as_it_was() -> None:
    model = models_zoo.build("gpt2 tied").train()
    before = [p.detach().clone() for p in model.parameters()]
    evaluate(model, rows([4, 3], [0, 1]), pad_token=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_nothing_to_predict_is_an_error() -> None:
    with pytest.raises(InputError, match="no token to predict"):
        evaluate(models_zoo.build("gpt2 tied"), rows([1, 1], [0, 1]), pad_token=0)


def test_of_a_chat_only_tokens_that_carry_loss_are_measured() -> None:
    model = models_zoo.build("gpt2 tied")
    whole = rows([6, 4], [0, 1])
    labelled = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=np.bool_)
    found = evaluate(model, replace(whole, labelled=labelled), pad_token=0)
    losses: list[float] = []
    for start, stop in ((0, 6), (6, 10)):
        ids = torch.tensor(whole.tokens[start:stop].astype(np.int64))[None]
        logp = model(input_ids=ids).logits.detach().log_softmax(-1)[0]
        losses += [
            -float(logp[place - 1, ids[0, place]])
            for place in range(1, stop - start)
            if labelled[start + place]
        ]
    assert found.tokens == len(losses) == 4
    assert found.loss == pytest.approx(float(np.mean(losses)), rel=1e-6)


def test_of_a_class_one_prediction_a_record_is_measured() -> None:
    torch.manual_seed(0)
    model = models_zoo.of_family("Bert", "ForSequenceClassification", pad_token_id=0).eval()
    data = replace(rows([6, 3], [0, 1]), classes=np.array([1, 0]))
    task = ClassificationTask(pad_token=0, classes=("a", "b"))
    found = evaluate(model, data, pad_token=0, task=task)
    logits = [
        model(input_ids=torch.tensor(data.tokens[a:b].astype(np.int64))[None]).logits[0].detach()
        for a, b in ((0, 6), (6, 9))
    ]
    right = [1, 0]
    losses = [-float(one.log_softmax(-1)[of]) for one, of in zip(logits, right, strict=True)]
    assert found.tokens == 2
    assert found.loss == pytest.approx(float(np.mean(losses)), rel=1e-5)
    hits = sum(int(one.argmax()) == of for one, of in zip(logits, right, strict=True))
    assert found.accuracy_top1 == hits / 2


def test_masked_predictions_are_the_same_in_every_evaluation() -> None:
    torch.manual_seed(0)
    model = models_zoo.of_family("Bert", "ForMaskedLM", pad_token_id=0).eval()
    task = MaskedTask(pad_token=0, mask_token=1, vocabulary=23, special_tokens=(0, 1), share=0.5)
    data = rows([9, 8, 7], [0, 1, 1])
    first, second = (evaluate(model, data, pad_token=0, task=task) for _ in range(2))
    assert first.loss == second.loss
    assert first.accuracy_top1 == second.accuracy_top1
    assert 0 < first.tokens < 24
