"""Held-out loss against a brute-force loss, one row and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import models_zoo
from userdp.data.record import Record
from userdp.data.store import UserStore
from userdp.data.tokens import TokenRows
from userdp.errors import InputError, MixedExamplesError
from userdp.evaluation import evaluate, evaluate_store, mean_losses
from userdp.measuring import measuring, on_gpu, usual_tokens
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
    """Predicts nothing; tells the tokens of every batch."""

    def __init__(self, tell: Callable[[set[int]], object]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._tell = tell

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._tell(set(input_ids.flatten().tolist()) - {0})
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
    # What a model keeps of a user is put back, so the list is not one of the model's own.
    seen: list[set[int]] = []
    model = Watched(seen.append)
    mean_losses(model, data, np.arange(6), num_records=6, pad_token=0)
    assert sorted(map(sorted, seen)) == [[1], [2], [3]]


class Remembers(torch.nn.Module):
    """Counts what it has read in a buffer, computes by that, and fails on long rows."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("read", torch.zeros(()), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.read = self.read + input_ids.sum()
        if input_ids.shape[1] > self.longest:
            raise ValueError("too long")
        return self.weight * self.read * torch.arange(50.0).expand(*input_ids.shape, 50) / 1000


def test_losses_do_not_depend_on_what_the_model_keeps_of_other_users() -> None:
    data = rows([5, 9, 3, 11], [0, 1, 2, 3])
    model = Remembers(longest=100)
    found = mean_losses(model, data, np.arange(4), num_records=4, pad_token=0)
    for user in range(4):
        alone = rows([5, 9, 3, 11], [0, 1, 2, 3])
        alone.owners[:] = np.where(np.arange(4) == user, 0, 1)
        by_itself = mean_losses(model, alone, np.arange(4), num_records=4, pad_token=0)
        assert by_itself[user] == found[user]
    assert float(model.read) == 0


class Writes(Remembers):
    """Learns as it reads."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.weight.data.add_(input_ids.sum())
        return super().forward(input_ids)


def test_a_model_that_writes_to_its_weights_scores_nothing() -> None:
    data = rows([5, 9, 3], [0, 1, 2])
    with pytest.raises(MixedExamplesError, match="changes its weights or its modules as it reads"):
        mean_losses(Writes(longest=100), data, np.arange(3), num_records=3, pad_token=0)


def test_a_user_whom_the_model_cannot_read_has_no_losses_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = rows([5, 4, 9, 3], [0, 1, 1, 2])
    found = mean_losses(Remembers(longest=8), data, np.arange(4), num_records=4, pad_token=0)
    assert np.isnan(found).tolist() == [False, True, True, False]
    assert not caplog.records
    nobody = mean_losses(Remembers(longest=2), data, np.arange(4), num_records=4, pad_token=0)
    assert np.isnan(nobody).all()
    assert "no user" in caplog.text


def token_losses(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """The loss of each token after the first, one forward pass for each."""
    found: list[float] = []
    with torch.no_grad():
        for position in range(1, len(tokens)):
            logits = model(input_ids=torch.tensor([tokens[:position]])).logits[0, -1]
            found.append(-torch.log_softmax(logits, dim=-1)[tokens[position]].item())
    return found


def test_each_owner_of_a_record_counts_it_and_each_token_counts_once(
    make_store: Callable[[list[Record]], UserStore],
) -> None:
    model = models_zoo.build("gpt2 tied")
    tokenizer = models_zoo.word_tokenizer()
    texts = {
        "w1 w2 w3 w4 w5 w6 w7": ("a", "b"),
        "w3 w1": ("b",),
        "w5 w5 w6": ("c",),
        "w7 w1 w4 w2": ("c", "a", "d"),
    }
    store = make_store([Record(text, owners, text) for text, owners in texts.items()])
    by_user: dict[str, list[float]] = {name: [] for name in "abcd"}
    everything: list[float] = []
    for text, owners in texts.items():
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        # Rows of at most 4 tokens; the first token of a row is not predicted.
        losses = [
            loss for at in range(0, len(ids), 4) for loss in token_losses(model, ids[at:][:4])
        ]
        everything += losses
        for owner in owners:
            by_user[owner] += losses
    found = evaluate_store(model, tokenizer, store, sequence_length=4)
    expected = sorted(np.mean(losses) for losses in by_user.values())
    assert found.tokens == len(everything)
    assert found.loss == pytest.approx(np.mean(everything), rel=1e-6)
    assert found.users == 4
    assert sorted(found.user_losses) == pytest.approx(expected, rel=1e-6)
    assert found.mean_user_loss == pytest.approx(np.mean(expected), rel=1e-6)
    assert found.worst_decile_loss == pytest.approx(expected[-1], rel=1e-6)
    assert found.user_loss_quantiles["0.5"] == pytest.approx(np.median(expected), rel=1e-6)


def test_the_worst_decile_is_the_mean_of_the_tenth_with_the_highest_loss() -> None:
    # 25 users: the three with the highest loss.
    data = rows([4] * 25, list(range(25)))
    found = evaluate(models_zoo.build("gpt2 tied"), data, pad_token=0)
    alone = [
        np.mean(
            token_losses(
                models_zoo.build("gpt2 tied"), data.tokens[4 * user : 4 * user + 4].tolist()
            )
        )
        for user in range(25)
    ]
    assert found.worst_decile_loss == pytest.approx(np.mean(sorted(alone)[-3:]), rel=1e-6)


class Crowded(torch.nn.Module):
    """Has memory for two rows at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError
        return self.model(input_ids=input_ids).logits


def test_a_batch_that_does_not_fit_into_memory_is_halved() -> None:
    model = models_zoo.build("gpt2 tied")
    data = rows([5, 2, 11, 7, 2, 3, 4], [0, 0, 1, 3, 1, 0, 2])
    whole, halved = (evaluate(one, data, pad_token=0) for one in (model, Crowded(model)))
    assert halved.loss == pytest.approx(whole.loss, rel=1e-12)
    assert halved.tokens == whole.tokens
    assert halved.user_losses == pytest.approx(whole.user_losses, rel=1e-12)


@pytest.mark.parametrize(
    ("gib", "words", "tokens"), [(139, 50_257, 16_384), (139, 64, 32_768), (24, 50_257, 4_096)]
)
def test_logits_of_a_batch_take_at_most_a_tenth_of_a_gpu(
    gib: int, words: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = SimpleNamespace(out_features=words)
    model: Any = SimpleNamespace(get_output_embeddings=lambda: head)
    memory = gib * 2**30
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory)
    )
    found = usual_tokens(model, torch.device("cuda"))
    assert found == tokens
    # Once in bfloat16 and twice in float32.
    assert found * words * 10 <= memory / 10


@pytest.mark.parametrize("name", ["gpt2 tied", "llama", "gpt2 + lora"])
def test_a_gpus_kernels_give_the_same_logits_and_leave_the_model_as_it_was(name: str) -> None:
    model = models_zoo.build(name)
    ids, forwards = torch.arange(6)[None], []
    with torch.no_grad():
        usual = model(input_ids=ids).logits
        with on_gpu(model):
            forwards += [vars(module).get("forward") for module in model.modules()]
            found = model(input_ids=ids).logits
    assert usual.shape[-1] % 64
    assert any(forwards)
    torch.testing.assert_close(found, usual, rtol=1e-12, atol=1e-12)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_has_replaced_stays() -> None:
    model = models_zoo.build("gpt2 tied")
    head: Any = model.get_output_embeddings()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    head.forward = own
    with on_gpu(model):
        assert head.forward is own
    assert head.forward is own


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    model = models_zoo.build("gpt2 tied")
    torch.nn.init.constant_(next(model.parameters()), math.nan)
    told = evaluate(model, rows([4, 3], [0, 1]), pad_token=0).to_json()
    assert told["loss"] is None
    assert told["perplexity"] is None
    assert told["worst_decile_loss"] is None


def test_measuring_puts_back_mode_and_random_numbers_of_a_model_that_draws_some() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2))
    model[0].eval()
    before = torch.get_rng_state()

    def fail() -> None:
        with measuring(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [module.training for module in model.modules()] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), before)


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
