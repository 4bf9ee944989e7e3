"""Processor time of a user's clipped gradient of the word LSTM: the fast path and the plain loop.

Records of 10 words, 16 users, one thread. The two take turns, and the least of all turns counts.

Run: python benchmarks/word_lstm.py [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Literal

import torch

from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import summation
from userdp.losses import causal_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.mean_gradient import MeanGradient

CLIP = FlatClip(clip_norm=1.0)
USERS, LENGTH = 16, 10
# Words, embedding, state, records a user.
SIZES = (
    (2_000, 32, 64, 2),
    (2_000, 32, 64, 16),
    (10_000, 96, 256, 2),
    (10_000, 96, 256, 16),
    (10_000, 96, 256, 160),
)
PATHS: tuple[Literal["plain", "fast"], ...] = ("plain", "fast")


def milliseconds(words: int, width: int, state: int, records: int, turns: int) -> dict[str, float]:
    """Processor time a user, by path."""
    torch.manual_seed(0)
    config = WordLSTMConfig(vocab_size=words, embedding_size=width, state_size=state)
    model = torch.nn.Sequential(WordLSTM(config)).eval()[0]
    drawn = [torch.randint(0, words, (records, LENGTH)) for _ in range(USERS)]
    users = [{"input_ids": ids, "labels": ids} for ids in drawn]
    sums = {
        path: summation(
            model,
            list(model.parameters()),
            MeanGradient(),
            CLIP,
            record_loss=causal_lm_loss,
            settings=StepSettings(path=path),
            sequence_length=LENGTH,
        )
        for path in PATHS
    }
    for own in sums.values():
        own.clipped_sum(users, CLIP)
    least: dict[str, float] = dict.fromkeys(PATHS, float("inf"))
    for _ in range(turns):
        for path, own in sums.items():
            begun = time.process_time()
            own.clipped_sum(users, CLIP)
            least[path] = min(least[path], (time.process_time() - begun) / USERS)
    return {path: round(1e3 * value, 2) for path, value in least.items()}


def main() -> None:
    """Measure and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for words, width, state, records in SIZES:
        found = milliseconds(words, width, state, records, options.turns)
        row = {"words": words, "embedding": width, "state": state, "records": records}
        print(json.dumps(row | found), flush=True)


if __name__ == "__main__":
    main()
