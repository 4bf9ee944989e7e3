"""Users a second in local training: many at once, one at a time, and what memory would allow.

The model is the LSTM of McMahan et al. 2018, App. B; each user has 1,600 words in records of 10,
local batches of 8 records, one epoch: 20 local steps. One at a time means eager torch with its own
LSTM (cuDNN on a GPU), stochastic gradient descent and the same clipping after every local step.

The floor counts what must move at least: in each local step the weights of every user are read and
written five times over (forward, backward, gradient, update, clipping). How fast bytes move is
measured by a copy in the same run.

Another row has transformers with adapters (`fedavg_lora.py`).

Run: python benchmarks/fedavg.py [--rows lstm lora] [--users 1024] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.summation import summation
from userdp.losses import Batch, causal_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.fedavg import FedAvg

WORDS, UNROLL, BATCH, PASSES = 1_600, 10, 8, 5
CLIP = FlatClip(clip_norm=15.0)
ETA = 6.0


class OneAtATime(nn.Module):
    """The same model with torch's own LSTM, and its local training as one would write it."""

    def __init__(self, config: WordLSTMConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.embedding_size)
        self.lstm = nn.LSTM(config.embedding_size, config.state_size, batch_first=True)
        self.out = nn.Linear(config.state_size, config.embedding_size)

    def loss(self, ids: Tensor) -> Tensor:
        """The mean over the records."""
        words = F.normalize(self.words.weight)
        states, _ = self.lstm(F.embedding(ids[:, :-1], words))
        logits = self.out(states) @ words.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def train_on(self, user: Batch) -> list[Tensor]:
        """How far one user's local training goes."""
        parameters = list(self.parameters())
        start = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.SGD(parameters, lr=ETA)
        ids = user["input_ids"]
        for first in range(0, len(ids), BATCH):
            optimizer.zero_grad()
            self.loss(ids[first : first + BATCH]).backward()
            optimizer.step()
            with torch.no_grad():
                way = [p - theta_0 for p, theta_0 in zip(parameters, start, strict=True)]
                norm = torch.stack([moved.norm() for moved in way]).norm()
                factor = (CLIP.clip_norm / norm).clamp(max=1.0)
                for parameter, theta_0, moved in zip(parameters, start, way, strict=True):
                    parameter.copy_(theta_0 + moved * factor)
        with torch.no_grad():
            found = [p - theta_0 for p, theta_0 in zip(parameters, start, strict=True)]
            for parameter, theta_0 in zip(parameters, start, strict=True):
                parameter.copy_(theta_0)
        return found


def seconds(call: Callable[[], object], device: str) -> float:
    """How long a call takes, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def bytes_a_second(device: str) -> float:
    """Bytes read and written by a copy."""
    source = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * source.numel() * 4 / best


def lstm_row(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Users a second of the LSTM."""
    torch.manual_seed(0)
    config = WordLSTMConfig()
    model = nn.Sequential(WordLSTM(config)).to(device).eval()[0]
    if device == "cuda":
        torch.set_float32_matmul_precision("high")

    def user() -> Batch:
        ids = torch.randint(0, config.vocab_size, (WORDS // UNROLL, UNROLL + 1), device=device)
        return {"input_ids": ids, "labels": ids}

    users = [user() for _ in range(options.users)]
    many = summation(
        model,
        list(model.parameters()),
        FedAvg(local_learning_rate=ETA, local_batch_size=BATCH),
        CLIP,
        record_loss=causal_lm_loss,
        settings=StepSettings(
            compile_blocks=None if options.compile is None else options.compile == "yes"
        ),
        sequence_length=UNROLL + 1,
    )
    first = seconds(lambda: many.clipped_sum(users, CLIP), device)
    alone = OneAtATime(config).to(device)
    alone.train_on(users[0])
    at_once, one_by_one = [], []
    # In turns, so that what else the machine does slows down both.
    for _ in range(options.repeat):
        at_once.append(seconds(lambda: many.clipped_sum(users, CLIP), device))
        one_by_one.append(
            seconds(lambda: [alone.train_on(one) for one in users[: options.alone]], device)
        )
    parameters = sum(p.numel() for p in model.parameters())
    local_steps = WORDS // UNROLL // BATCH
    moved = parameters * 4 * PASSES * local_steps
    floor = bytes_a_second(device) / moved
    rate, alone_rate = options.users / min(at_once), options.alone / min(one_by_one)
    return {
        "row": "lstm",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "users": options.users,
        "parameters": parameters,
        "users_a_second": rate,
        "one_at_a_time": alone_rate,
        "times_one_at_a_time": rate / alone_rate,
        "share_of_the_floor": rate / floor,
        "first_call_seconds": first,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def main() -> None:
    """Measure and print the rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", nargs="+", choices=["lstm", "lora"], default=["lstm"])
    parser.add_argument("--users", type=int, default=1024 if on_gpu else 8)
    parser.add_argument("--alone", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--adapter-users", type=int, default=64 if on_gpu else 4)
    parser.add_argument("--small", action="store_true", help="a small transformer")
    parser.add_argument("--compile", choices=["yes", "no"], help="default: on a GPU")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if "lstm" in options.rows:
        rows.append(lstm_row(options, device))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if "lora" in options.rows:
        from fedavg_lora import row

        rows.append(row(users=options.adapter_users, device=device, small=options.small))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
