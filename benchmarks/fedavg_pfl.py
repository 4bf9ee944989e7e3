"""Processor time a user of pfl-research in the same local training: a row beside `fedavg.py`.

pfl trains users one after the other. It clips an update at the end of local training, and not after
every local step, so it has less to do than Algorithm 1 of McMahan et al. 2018.

Needs an environment of its own with `pip install "pfl[pytorch]"` and this package.
Run: python benchmarks/fedavg_pfl.py [--users 4] [--threads 1] [--json FILE]
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedavg import BATCH, CLIP, ETA, UNROLL, WORDS, OneAtATime

from userdp.models.word_lstm import WordLSTMConfig


class Model(OneAtATime):
    """As pfl wants a model: `loss` and `metrics`."""

    def loss(self, ids: Any, is_eval: bool = False) -> torch.Tensor:  # type: ignore[override]
        """The mean over the records."""
        self.train(not is_eval)
        return super().loss(torch.as_tensor(ids))

    def metrics(self, ids: Any) -> dict[str, Any]:
        """Nothing is evaluated."""
        del ids
        return {}


def rounds(users: int, repeat: int) -> list[float]:
    """Seconds of processor time of each round over so many users."""
    # Here, so that --help needs nothing that is not installed.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    config = WordLSTMConfig()
    rng = np.random.default_rng(0)
    shape = (WORDS // UNROLL, UNROLL + 1)
    records = [rng.integers(0, config.vocab_size, shape) for _ in range(users)]
    places = iter(range(users * (repeat + 2)))

    def user(place: int) -> Dataset:
        return Dataset((torch.from_numpy(records[place % users]),))

    cohort = FederatedDataset(user, lambda: next(places))
    module = Model(config)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP.clip_norm, 1e-9))
    found: list[float] = []
    for _ in range(repeat + 1):
        begun = time.process_time()
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=1,
                evaluation_frequency=10**6,
                train_cohort_size=users,
                val_cohort_size=0,
            ),
            SimulatedBackend(training_data=cohort, val_data=cohort, postprocessors=[noise]),
            model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=ETA, local_batch_size=BATCH),
            send_metrics_to_platform=False,
        )
        found.append(time.process_time() - begun)
    return found[1:]


def main() -> None:
    """Measure and print the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if find_spec("pfl") is None:
        parser.error("pfl is not installed: pip install 'pfl[pytorch]' in a new environment.")
    torch.set_num_threads(options.threads)
    row = {
        "row": "pfl",
        "pfl": version("pfl"),
        "device": "cpu",
        "threads": options.threads,
        "users": options.users,
        "processor_seconds_a_user": min(rounds(options.users, options.repeat)) / options.users,
    }
    print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
