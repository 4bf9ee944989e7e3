"""The LSTM of McMahan et al. 2018, App. B."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import models_zoo
from userdp import FlatClip, PerVectorClip, verify
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients.word_lstm import WordLstm
from userdp.clipping.plain import PlainClipping
from userdp.losses import causal_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.fedavg import FedAvg


def small() -> WordLSTM:
    torch.manual_seed(0)
    config = WordLSTMConfig(vocab_size=models_zoo.VOCABULARY, embedding_size=6, state_size=10)
    return WordLSTM(config).eval()


def test_the_paper_s_model_has_1_35_million_parameters_in_11_vectors() -> None:
    model = WordLSTM(WordLSTMConfig())
    assert sum(p.numel() for p in model.parameters()) == 1_346_144
    assert len(list(model.parameters())) == 11


@pytest.mark.parametrize("words", [20_000, 30_000])
def test_larger_dictionaries_only_add_embeddings(words: int) -> None:
    model = WordLSTM(WordLSTMConfig(vocab_size=words))
    assert sum(p.numel() for p in model.parameters()) == 1_346_144 + 96 * (words - 10_000)


def test_it_computes_what_torch_s_own_lstm_computes() -> None:
    model = small().double()
    size = model.config.state_size
    theirs = torch.nn.LSTM(6, size, batch_first=True).double()
    gates = (model.input_gate, model.forget_gate, model.cell_gate, model.output_gate)
    weight = torch.cat([gate.weight for gate in gates])
    with torch.no_grad():
        own = dict(theirs.named_parameters())
        own["weight_ih_l0"].copy_(weight[:, :6])
        own["weight_hh_l0"].copy_(weight[:, 6:])
        own["bias_ih_l0"].copy_(torch.cat([gate.bias for gate in gates]))
        own["bias_hh_l0"].zero_()
    ids = torch.randint(0, models_zoo.VOCABULARY, (3, 7), generator=torch.manual_seed(1))
    words = torch.nn.functional.normalize(model.embedding.weight)
    states, _ = theirs(words[ids])
    wanted = model.output_embedding(states) @ words.T
    torch.testing.assert_close(model(ids).logits, wanted)


def test_the_length_of_an_embedding_does_not_matter() -> None:
    model = small()
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    with torch.no_grad():
        model.embedding.weight *= torch.rand(models_zoo.VOCABULARY, 1) + 0.5
    torch.testing.assert_close(model(ids).logits, before)


def test_it_is_saved_and_loaded_as_any_other_model(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, WordLSTM)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("smallest", [1.0, 1e-12, 1e-14, 0.0])
def test_gradients_go_through_the_length_of_a_row_however_small(smallest: float) -> None:
    # At the smallest length the gradient is other than above it, and many times as large.
    model = small().double()
    with torch.no_grad():
        row = model.embedding.weight[3]
        row *= smallest / row.norm()
    groups = [models_zoo.ragged_batch([9, 5 + n], seed=n) for n in range(3)]
    rule = FlatClip(clip_norm=1e15)
    parameters = list(model.parameters())
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss)
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss)
    wanted = plain.clipped_sum(groups, rule).total.views
    found = fast.clipped_sum(groups, rule).total.views
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert float(found[0].norm()) > 0


@pytest.mark.parametrize(
    "frozen", ["embedding.weight", "forget_gate.bias", "output_embedding.weight"]
)
def test_frozen_weights_are_left_out_on_the_fast_path(frozen: str) -> None:
    model = small().double()
    dict(model.named_parameters())[frozen].requires_grad_(False)
    groups = [models_zoo.ragged_batch([9, 5 + n], seed=n) for n in range(3)]
    rule = PerVectorClip(clip_norm=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss)
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss)
    wanted = plain.clipped_sum(groups, rule).total.views
    for ours, theirs in zip(fast.clipped_sum(groups, rule).total.views, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_model_derived_from_it_has_no_rule() -> None:
    class Other(WordLSTM):
        pass

    assert WordLstm.describes(small())
    assert not WordLstm.describes(Other(small().config))


def test_one_user_moves_the_sum_of_gradients_by_the_clip_norm_at_most() -> None:
    found = verify(small(), sequence_length=8, clip=FlatClip(clip_norm=0.5))
    assert (found.cause, found.largest_movement <= 1 + 1e-5) == ("", True)
    assert {probe.name.split(":")[0] for probe in found.probes} == {"fast", "plain"}


def test_one_user_moves_its_local_training_by_the_clip_norm_at_most() -> None:
    found = verify(
        small(),
        sequence_length=8,
        update=FedAvg(local_learning_rate=0.5, local_batch_size=1),
        clip=FlatClip(clip_norm=0.5),
    )
    assert (found.cause, found.largest_movement <= 1 + 1e-5) == ("", True)
    assert any(probe.name.startswith("fast") for probe in found.probes)
