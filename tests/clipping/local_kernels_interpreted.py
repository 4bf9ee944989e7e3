"""Runs the kernels of local steps by Triton's interpreter, and prints how far they are from torch.

A program of its own: in a process where Triton compiles, it does not interpret.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from userdp.clipping.kernels import local_steps
from userdp.clipping.rules import ClipRule, FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.stacked import triton_words
from userdp.clipping.stacked.lstm import StackedLSTM
from userdp.clipping.stacked.room import Room, settle_
from userdp.clipping.stacked.triton_words import Tiles, TritonWords
from userdp.clipping.stacked.words import TorchWords
from userdp.clipping.summation import summation
from userdp.losses import Batch, causal_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.fedavg import FedAvg

# Few users: every program is run in Python. The fourth user has a record of one token.
RAGGED = ([9, 4, 2], [6], [3, 12, 5, 2], [1])
SMALL = Tiles(positions=16, words=32, warps=4, stages=1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def records(lengths: list[int], seed: int, words: int) -> Batch:
    torch.manual_seed(seed)
    ids = torch.randint(0, words, (len(lengths), max(lengths)))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:] = 0, -100
    return {"input_ids": ids, "labels": labels}


def training(rule: ClipRule, *, penalty: float, kernels: bool) -> Tensor:
    """The sum of a cohort by local training, in the kernels or in torch."""
    torch.manual_seed(0)
    model = WordLSTM(WordLSTMConfig(vocab_size=40, embedding_size=24, state_size=5)).eval()
    update = FedAvg(local_learning_rate=0.5, local_batch_size=2, update_penalty=penalty)
    made: Any = summation(
        model,
        list(model.parameters()),
        update,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(),
        sequence_length=16,
    )
    assert isinstance(made._lstm, StackedLSTM)
    made._lstm.has_kernels = kernels
    cohort = [records(lengths, seed, 40) for seed, lengths in enumerate(RAGGED)]
    found = made.clipped_sum(cohort, rule)
    assert made.trains_many_at_once
    return found.total.values


def trained() -> dict[str, float]:
    rules = {
        "flat": FlatClip(clip_norm=0.3),
        "per layer": PerLayerClip(clip_norm=0.3),
        "without clipping": FlatClip(clip_norm=math.inf),
    }
    return {
        name: relative(
            training(rule, penalty=0.05, kernels=True), training(rule, penalty=0.05, kernels=False)
        )
        for name, rule in rules.items()
    }


def tables(positions: int, width: int) -> dict[str, float]:
    """A step of three users' tables: one as it is, one clipped, one that is not finite."""
    torch.manual_seed(1)
    users, words = 3, 45
    start = torch.randn(words, width)
    # A row shorter than the smallest length is divided by that constant.
    start[5] = 1e-4
    factors = torch.tensor([1.0, 0.4, 0.0])
    theta = start + 0.3 * torch.randn(users, words, width)
    theta[:, 5] = start[5]
    theta[2, 3] = math.inf
    # Few words, so that inputs and labels often share one.
    ids, labels = (torch.randint(0, 9, (users, positions)) for _ in range(2))
    out, of_inputs = (torch.randn(users, positions, width) for _ in range(2))
    weights = torch.rand(users, positions) * (torch.rand(users, positions) < 0.8) / positions
    found: dict[bool, list[Tensor]] = {}
    for kernels in (True, False):
        own, smallest = theta.clone(), 0.01
        made: Any = (
            TritonWords(own, start, smallest)
            if kernels
            else TorchWords(own, start, smallest, Room(start))
        )
        made.begin(slice(None), factors)
        # The rows lie between other numbers, which must stay.
        rows = torch.full((users, positions + 1, width + 2), 7.0)
        made.rows_into(rows[:, :positions, :width], ids)
        gradient = made.output_gradient(out, labels, weights).clone()
        squares = made.step(ids, rows[:, :positions, :width], of_inputs, 0.5, 0.1)
        found[kernels] = [rows, gradient, own, squares]
    names = ("rows", "output gradient", "table", "squares")
    return {
        name: relative(ours.double(), torchs.double())
        for name, ours, torchs in zip(names, found[True], found[False], strict=True)
    }


def small_kernels() -> dict[str, float]:
    torch.manual_seed(2)
    start = torch.randn(2, 1500)
    theta = start + torch.randn(3, 2, 1500)
    theta[2, 0, 7] = math.nan
    factors = torch.tensor([[1.0, 0.3], [0.25, 1.0], [0.0, 0.5]])
    weights = torch.tensor([[1.0, -0.5], [0.2, 0.0], [3.0, 1.0]], dtype=torch.float64)
    ways = torch.where(factors[..., None] > 0, (theta - start) * factors[..., None], 0.0)
    wanted = (ways.double() * weights[..., None]).sum(0)
    squares = (theta[:2] - start).double().square().sum(2)
    found = {
        "summed ways": relative(
            local_steps.summed_ways(theta, start, factors, weights).double(), wanted
        ),
        "squared ways": relative(local_steps.squared_ways(theta, start)[:2], squares),
    }
    ours, torchs = theta.clone(), theta.clone()
    local_steps.settle_(ours, start, factors)
    settle_(torchs, start, factors)
    found["settled"] = relative(ours, torchs)
    # A copy that is not clipped is not rounded either.
    found["left alone"] = float((ours[0, 0] - theta[0, 0]).abs().max())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for tiles in (triton_words.ATTENTION, triton_words.STEP):
        tiles.update(dict.fromkeys(tiles, SMALL))
    report: dict[str, dict[str, float]] = {"training": trained(), "small": small_kernels()}
    for positions, width in ((20, 24), (40, 16), (16, 20)):
        report[f"tables {positions} {width}"] = tables(positions, width)
    print(json.dumps(report))
