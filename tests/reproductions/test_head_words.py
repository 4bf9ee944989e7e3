"""Head words among a model's predictions, counted by hand on made-up logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reproductions.mcmahan2018.head_words import head_words
from reproductions.mcmahan2018.study import settings
from userdp.data.tokens import TokenRows


class Fixed(nn.Module):
    """After word w, the ten likeliest words are w, w + 1, ..., w + 9."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.words = words

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits that fall from the word on."""
        gap = (torch.arange(self.words) - input_ids[..., None]) % self.words
        return SimpleNamespace(logits=-gap.float())


def test_the_histogram_counts_words_of_the_head_at_every_predicted_position() -> None:
    # With four special tokens the first 10 words are 4 to 13.
    rows = TokenRows(
        tokens=np.array([4, 9, 50, 1, 0], np.int32),
        indptr=np.array([0, 3, 5]),
        owners=np.array([0, 1]),
        num_users=2,
    )
    found = head_words(Fixed(200), rows, pad_token=3, special=4)
    # 4 -> 4..13, all ten; 9 -> 9..18, five; 1 -> 1..10, seven. The last word of a row predicts
    # nothing, and neither does padding.
    shares = dict.fromkeys((10, 5, 7), 0.3333)
    assert found["10"] == [shares.get(count, 0.0) for count in range(11)]
    assert found["50"][10] == 0.6667
    assert found["50"][7] == 0.3333


def test_equal_noise_on_the_average_is_more_noise_for_more_users() -> None:
    named = {setting.name: setting for setting in settings(24, 400)}
    for users in (12, 48):
        setting = named[f"fedavg, equal sigma, C={users}"]
        sigma = setting.noise_multiplier * setting.clip_norm / users
        assert sigma == pytest.approx(named["fedavg, z=0.1"].noise_multiplier * 15.0 / 24)
    assert len(named) == len(settings(24, 400))
