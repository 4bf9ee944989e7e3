"""Models that people write themselves: right where the fast path can be, else refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comparing import (
    RAGGED,
    assert_same_as_plain,
    cohort,
    fast_sum,
    pairs_wherever_possible,
    shake,
    trainable,
)
from torch import Tensor, nn

import models_zoo
import userdp
from userdp.clipping.checks.verify import FastPathError
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.losses import Batch

WIDTH = 8
RULE = FlatClip(clip_norm=0.5)
# As many rows as tokens, more, and fewer: sizes must not be mistaken for one another.
COHORTS = {
    "rows = tokens": [[6], [6], [6], [6], [6], [6]],
    "rows > tokens": [[4, 4, 3], [4, 4, 4], [4, 2, 2]],
    "rows < tokens": [[9], [9]],
    "two tokens": [[2], [2], [2]],
}


class Around(nn.Module):
    """Something between an embedding and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, WIDTH)
        self.inner = inner
        self.head = nn.Linear(WIDTH, models_zoo.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(input_ids)))


def around(inner: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return shake(Around(inner).double().eval())


class Attention(nn.Module):
    """torch's own attention, with a mask (tokens, tokens) that belongs to no row."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x if self.batch_first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return y if self.batch_first else y.transpose(0, 1)


class Convolution(nn.Module):
    """Over time, looking back."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.pad(x.mT, (2, 0))).mT


class EncoderLayer(nn.Module):
    """torch's own block, which takes a short cut around its layers where no gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layer(x, src_mask=mask)


# torch on its own attention under vmap: it works, and could be faster.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("lengths", COHORTS)
@pytest.mark.parametrize(
    "inner", [Attention, Convolution, EncoderLayer, nn.PReLU], ids=lambda kind: kind.__name__
)
def test_layers_without_a_rule_match_the_plain_loop(inner: type[nn.Module], lengths: str) -> None:
    assert_same_as_plain(around(inner()), cohort(COHORTS[lengths]), rule=RULE)


class Idle(nn.Module):
    """A layer beside the one that counts, with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, 3)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return self.used(x)


def test_layer_whose_output_is_not_used_beside_one_that_is() -> None:
    assert_same_as_plain(around(Idle()), cohort(RAGGED))
    with (
        pairs_wherever_possible(),
        pytest.raises(InputError, match=r"'inner\.aside'.*'inner\.used'"),
    ):
        fast_sum(around(Idle()), cohort(RAGGED), RULE)


class InPlace(nn.Module):
    """Changes what it is given in place, as CTRL scales what its embedding returns."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 3.0
        return x


def test_an_embedding_whose_output_is_changed_in_place_matches_the_plain_loop() -> None:
    assert_same_as_plain(around(InPlace()), cohort(RAGGED))


class DependsOnValues(nn.Module):
    """A block with a weight of its own that looks at values: `torch.vmap` cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if bool(x.sum() < 1e6) else x


def test_a_block_that_fails_on_the_fast_path_alone_is_sent_to_the_plain_one() -> None:
    model, batch = around(DependsOnValues()), models_zoo.ragged_batch([5, 6], seed=0)
    refused = userdp.verify(model, batch, path="fast").cause
    assert "fails on made-up rows" in refused
    assert 'Use path="plain"' in refused
    assert userdp.verify(model, batch, path="plain").safe


class MeanOverTokens(nn.Module):
    """Classifies by the mean over the tokens that are attended to, as some encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask[..., None].to(self.head.weight.dtype)
        return self.head((self.embedding(input_ids) * seen).sum(1) / seen.sum(1))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(found, batch["labels"], reduction="none")


def test_a_row_of_padding_can_be_read_so_that_nobody_counts_as_zero_by_the_rows_of_others() -> None:
    # The second user shares a batch with a user of more rows. A mean over no token is no number.
    torch.manual_seed(0)
    model = MeanOverTokens().double()
    made_up = models_zoo.ragged_batch([5, 5, 5], seed=1)
    most = {
        "input_ids": made_up["input_ids"],
        "attention_mask": torch.ones(3, 5, dtype=torch.int64),
        "labels": torch.tensor([0, 1, 1]),
    }
    fewer = {name: tensor[1:] for name, tensor in most.items()}
    equal = StepSettings(mix_sizes=False)
    assert_same_as_plain(model, [most, fewer], record_loss=class_loss, settings=equal)
    checked = userdp.verify(model, most, record_loss=class_loss, group_size=3, settings=equal)
    assert checked.safe, checked.cause


class MixesRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_rows_that_change_each_other_are_caught_by_the_check() -> None:
    with pytest.raises(FastPathError, match='path="plain"'):
        fast_sum(around(MixesRows()), cohort(RAGGED), RULE)


def test_lstm_with_a_state_of_its_own_is_refused() -> None:
    class WithState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(1, len(x), WIDTH)
            return self.layer(x, (state, state))[0]

    with pytest.raises(InputError, match='path="plain"'):
        fast_sum(around(WithState()), cohort(RAGGED), RULE)


def test_dropout_that_is_on_is_refused_by_name() -> None:
    model = models_zoo.build("gpt2 tied").train()
    with pytest.raises(InputError, match=r"dropout at 'transformer\.drop'.*model\.eval"):
        fast_sum(model, cohort(RAGGED), RULE)
    checked = userdp.verify(model, models_zoo.ragged_batch([5, 6], seed=0), path="fast")
    assert not checked.safe
    assert "dropout at" in checked.cause


@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied"])
def test_gradient_checkpointing_gives_the_same_sum(name: str) -> None:
    model = shake(models_zoo.build(name)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_same_as_plain(model, cohort(RAGGED))


def test_token_that_torch_gives_no_gradient_may_stand_inside_a_text() -> None:
    # Llama pads with token 0, whose embedding torch leaves alone; texts may hold it all the same.
    model = shake(models_zoo.build("llama tied"))
    assert model.get_input_embeddings().padding_idx == 0  # type: ignore[operator]
    groups = cohort(RAGGED)
    for group in groups:
        group["input_ids"][:, ::3] = 0
    assert_same_as_plain(model, groups)


@pytest.mark.parametrize("frozen", ["embed_tokens", "norm", "self_attn", "mlp.down_proj"])
def test_frozen_parts_are_left_out(frozen: str) -> None:
    model = shake(models_zoo.build("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert 0 < len(trainable(model)) < len(list(model.parameters()))
    assert_same_as_plain(model, cohort(RAGGED), settings=StepSettings(microbatch_tokens=60))


class ByName(nn.Module):
    """Calls its layers by the names of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, models_zoo.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(input=self.norm(input=self.embedding(input=input_ids)))


@pytest.mark.parametrize("mix_sizes", [False, True])
def test_layers_called_by_name_are_clipped_alike(mix_sizes: bool) -> None:
    model = shake(ByName().double())
    assert_same_as_plain(model, cohort(RAGGED), settings=StepSettings(mix_sizes=mix_sizes))
