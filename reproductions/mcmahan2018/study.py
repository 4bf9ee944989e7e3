"""The paper's findings on other people's words, small enough for a processor.

FedAvg against FedSGD (App. D), clip norms (Fig. 2), estimators and sampling (Fig. 5), noise (Fig.
3), cohort sizes (Figs. 6 and 7), clip norms that change at constant z (Fig. 8), the penalty on
updates (App. D): each run is one line of results, with its accuracy every so many rounds, and the
share of head words among its predictions (Table 3).

Run: python -m reproductions.mcmahan2018.study --data SHARED/data --set shakespeare_plays \
         --out reproductions/mcmahan2018/results [--only fedavg] [--seeds 3] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reproductions.mcmahan2018.head_words import head_words
from reproductions.mcmahan2018.words_of_users import WordsOfUsers, load
from userdp.clipping.rules import ClipRule, FlatClip, PerVectorClip, ScheduledClip
from userdp.clipping.settings import StepSettings
from userdp.evaluation import evaluate, unknown_word
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.models.words import SPECIAL
from userdp.plan import Plan
from userdp.sampling.contract import PublicNumbers
from userdp.sampling.poisson_users import PoissonUsers
from userdp.sampling.without_replacement import WithoutReplacement
from userdp.step import PrivateStep
from userdp.streams import RunSecret
from userdp.tasks import CausalTask, cohort_batches
from userdp.updates.contract import UpdateRule
from userdp.updates.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a study is."""

    dictionary: int
    embedding: int
    state: int
    words_per_user: int
    unroll: int
    cohort: int
    rounds: int
    evaluate_every: int


SIZES = {
    "small": Size(
        dictionary=2_000,
        embedding=32,
        state=64,
        words_per_user=400,
        unroll=10,
        cohort=24,
        rounds=100,
        evaluate_every=20,
    ),
    "paper": Size(
        dictionary=10_000,
        embedding=96,
        state=256,
        words_per_user=1_600,
        unroll=10,
        cohort=100,
        rounds=500,
        evaluate_every=20,
    ),
}
ETA = 6.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run of a study. The noise multiplier is that of f_f, also where the estimator is f_c.

    `cohort` is the expected number of users, by default the size's. `later` is a clip norm from the
    middle of the run on. With `fixed_size` every cohort has exactly so many users.
    """

    name: str
    clip_norm: float = 15.0
    noise_multiplier: float = 0.0
    by_layer: bool = False
    local_batch: int = 8
    cohort: int | None = None
    later: float | None = None
    fixed_size: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def settings(cohort: int, users: int) -> list[Setting]:
    """All runs of the study, for a usual cohort size and a number of training users."""
    return [
        Setting(name="fedavg"),
        # FedSGD takes the gradient over all of a user's words at once.
        Setting(name="fedsgd", local_batch=10_000),
        *(Setting(name=f"fedavg, S={norm:g}", clip_norm=norm) for norm in (2.0, 10.0, 20.0)),
        Setting(name="fedavg, S=20, per layer", clip_norm=20.0, by_layer=True),
        Setting(name="fedavg, f_c", options={"estimator": "f_c", "min_weight": 0.8 * users}),
        Setting(name="fedavg, true average", options={"estimator": "f"}),
        Setting(
            name="fedavg, true average, cohorts of fixed size",
            fixed_size=True,
            options={"estimator": "f"},
        ),
        *(
            Setting(name=f"{kind}, z={noise:g}", noise_multiplier=noise, local_batch=batch)
            for kind, batch in (("fedavg", 8), ("fedsgd", 10_000))
            for noise in (0.03, 0.1)
        ),
        *_cohort_sizes(cohort),
        *_tradeoffs(),
        *(
            Setting(
                name=f"fedavg, z=0.1, penalty={factor:g}",
                noise_multiplier=0.1,
                options={"update_penalty": factor},
            )
            for factor in (0.003, 0.03)
        ),
    ]


def _cohort_sizes(cohort: int) -> list[Setting]:
    """More and fewer users: without noise and clipping (Fig. 6), and with equal noise (Fig. 7)."""
    sizes = (cohort // 4, cohort // 2, cohort, 2 * cohort)
    exact = [
        Setting(
            name=f"fedavg, true average, no clipping, C={size}",
            clip_norm=math.inf,
            cohort=size,
            options={"estimator": "f"},
        )
        for size in sizes
    ]
    # sigma = z S / C is the noise on the average: 0.0625 at S = 15, z = 0.1 and C = 24.
    noised = [
        Setting(
            name=f"fedavg, equal sigma, C={size}", noise_multiplier=0.1 * size / cohort, cohort=size
        )
        for size in (cohort // 2, 2 * cohort)
    ]
    return exact + noised


def _tradeoffs() -> list[Setting]:
    """Other clip norms at z = 0.1, from the beginning and from the middle on (Fig. 8)."""
    return [
        *(
            Setting(name=f"fedavg, z=0.1, S={norm:g}", clip_norm=norm, noise_multiplier=0.1)
            for norm in (5.0, 10.0, 20.0)
        ),
        *(
            Setting(
                name=f"fedavg, z=0.1, S=20 then {norm:g}",
                clip_norm=20.0,
                noise_multiplier=0.1,
                later=norm,
            )
            for norm in (5.0, 10.0)
        ),
    ]


def _clip_rule(setting: Setting, rounds: int) -> ClipRule:
    if setting.later is not None:
        return ScheduledClip(phases=((0, setting.clip_norm), (rounds // 2, setting.later)))
    return (PerVectorClip if setting.by_layer else FlatClip)(clip_norm=setting.clip_norm)


def run(
    words: WordsOfUsers, size: Size, setting: Setting, seed: int, device: str
) -> dict[str, Any]:
    """Train one model and measure it as it goes."""
    torch.manual_seed(seed)
    config = WordLSTMConfig(
        vocab_size=len(words.tokenizer),
        embedding_size=size.embedding,
        state_size=size.state,
    )
    model = nn.Sequential(WordLSTM(config)).to(device).eval()[0]
    users = words.training.num_users
    update: UpdateRule = FedAvg(
        local_learning_rate=ETA, local_batch_size=setting.local_batch, **setting.options
    )
    records = -(-size.words_per_user // size.unroll)
    plan = Plan.of(
        WithoutReplacement if setting.fixed_size else PoissonUsers,
        PublicNumbers(
            num_users=users,
            num_records=users * records,
            expected_groups=min(setting.cohort or size.cohort, users),
            group_size=records,
            steps=size.rounds,
        ),
        clip=_clip_rule(setting, size.rounds),
        noise_multiplier=setting.noise_multiplier,
        # These runs are about learning: with this little noise nothing is promised.
        non_private=True,
        update=update,
    )
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        words.training.index(),
        settings=StepSettings(),
        sequence_length=size.unroll + 1,
        secret=RunSecret.fixed_for_tests(seed),
    )
    task = CausalTask(pad_token=words.tokenizer.pad_token_id)
    accuracy: list[float] = []
    begun = time.monotonic()
    for number, cohort in enumerate(step.cohorts(), 1):
        streams = RunSecret.fixed_for_tests(seed).streams("rows")
        step.apply(cohort_batches(words.training, cohort, task, step=number, streams=streams))
        if number % size.evaluate_every == 0:
            found = evaluate(
                model,
                words.held_out,
                pad_token=words.tokenizer.pad_token_id,
                unknown=unknown_word(words.tokenizer),
            )
            accuracy.append(round(found.accuracy_top1, 5))
    return {
        "setting": setting.name,
        "seed": seed,
        "users": users,
        "accuracy_top1": accuracy,
        "head_words": head_words(
            model,
            words.held_out,
            pad_token=words.tokenizer.pad_token_id,
            special=len(SPECIAL),
        ),
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Run the settings that are asked for, and add them to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", default="shakespeare_plays")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", action="append", help="a setting by its name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    size = SIZES[options.size]
    words = load(
        options.data,
        options.set,
        dictionary=size.dictionary,
        words_per_user=size.words_per_user,
        unroll=size.unroll,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.set}_{options.size}.jsonl"
    for setting in settings(size.cohort, words.training.num_users):
        if options.only and setting.name not in options.only:
            continue
        for seed in range(options.seeds):
            found = run(words, size, setting, seed, options.device)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
