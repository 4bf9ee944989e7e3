"""DP-SGD with amplification against DP-MF without it, on the logistic task of Ganesh et al. 2025.

    python -m reproductions.ganesh2025.mf_against_sgd

Sec. 5.3 and Fig. 4, smaller: 20,000 records in place of 125,000 and more, so that it takes minutes
on a CPU. DP-SGD samples records that a greedy algorithm with duplicates bounded (Alg. 3), and
prices Poisson sampling. DP-MF goes through batches in which users are far apart (Alg. 4), with
banded noise, and prices one Gaussian. Each method takes the learning rate, and DP-SGD the bound,
that is best on validation records, over all seeds. The optimizer is plain descent, so that prefix
sums are exactly its workload; the paper uses Adam.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reproductions.ganesh2025.generators import logistic_data, regular_graph, skewed_graph
from userdp import Plan, PrivateStep, UserIndex
from userdp.bounding.bound import bound
from userdp.bounding.edges import Edges
from userdp.bounding.min_sep import largest_separation
from userdp.clipping.rules import FlatClip
from userdp.noise import Banded
from userdp.sampling import MinSeparated, PoissonRecords, PublicNumbers
from userdp.streams import RunSecret
from userdp.units import Adjacency

RESULTS = Path(__file__).parent / "results" / "mf_against_sgd.jsonl"
RECORDS, TRAINED, VALIDATED = 20_000, 16_000, 2_000
DIMENSION, STEPS, BATCH, DELTA = 256, 250, 128, 1e-6
SEEDS = (0, 1, 2)
EPSILONS = (1.0, 4.0, 16.0, 64.0)
GRAPHS = (("regular", 2.0), ("skewed", 2.0))
RATES = (2.0, 8.0, 32.0)
BOUNDS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A graph and a target; `bound` is k of DP-SGD, and None for DP-MF."""

    graph: str
    mean_records: float
    epsilon: float
    bound: int | None
    rate: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """Records with their owners: those to train on, to choose by and to report."""

    edges: Edges
    features: Tensor
    labels: Tensor


def task_of(graph: str, mean_records: float, seed: int) -> Task:
    """The data of one seed."""
    rng = np.random.default_rng([seed, 2025])
    make = regular_graph if graph == "regular" else skewed_graph
    whole = make(num_records=RECORDS, mean_records=mean_records, rng=rng)
    data = logistic_data(whole, dimension=DIMENSION, rng=rng)
    # The bias is the weight of a constant feature, as large as the others are on average: with a
    # constant of 1 the bias alone would limit the learning rate of plain descent.
    constant = np.full((RECORDS, 1), DIMENSION**-0.5)
    last = int(whole.indptr[TRAINED])
    edges = Edges(
        indptr=whole.indptr[: TRAINED + 1], owners=whole.owners[:last], num_users=whole.num_users
    )
    return Task(
        edges=edges,
        features=torch.from_numpy(np.hstack([data.features, constant])).float(),
        labels=torch.from_numpy(data.labels).float(),
    )


def plan_and_index(task: Task, setting: Setting) -> tuple[Plan, UserIndex, NDArray[np.int64]]:
    """The priced parts, the index that they draw from, and the record of each of its rows."""
    edges = task.edges
    if setting.bound is None:
        separation = largest_separation(edges, steps=STEPS, batch_size=BATCH)
        selection = bound(
            edges, method="min-separation", steps=STEPS, batch_size=BATCH, separation=separation
        ).selection
        assert selection.batches is not None
        records = np.arange(edges.num_records)
        kind, own = MinSeparated, {"separation": separation}
        noise = Banded.configured(steps=STEPS, bands=separation)
        group_size, num_records, batches = (
            selection.realised_bound,
            selection.size,
            selection.batches,
        )
    else:
        selection = bound(edges, setting.bound, method="greedy-duplicates").selection
        records, batches = selection.records(), None
        kind, own, noise = PoissonRecords, {}, None
        group_size, num_records = setting.bound, selection.size
    plan = Plan.of(
        kind,
        PublicNumbers(
            num_users=edges.num_users,
            num_records=num_records,
            expected_groups=float(BATCH),
            group_size=group_size,
            steps=STEPS,
        ),
        own=own,
        clip=FlatClip(clip_norm=1.0),
        noise=noise,
        epsilon=setting.epsilon,
        delta=DELTA,
        adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT,
    )
    if setting.bound is None:
        # Every owner of every record is counted, on the batches that will be used.
        plan.sampler.check_order(*selection.participants(edges, STEPS))
    rows = np.arange(len(records), dtype=np.int64)
    index = UserIndex(indptr=np.arange(len(rows) + 1, dtype=np.int64), rows=rows, batches=batches)
    return plan, index, records


def trained(task: Task, setting: Setting, seed: int) -> tuple[nn.Module, Plan]:
    """A model that the plan's private steps made."""
    plan, index, records = plan_and_index(task, setting)
    model = nn.Linear(DIMENSION + 1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["x"])[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["y"], reduction="none")

    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=setting.rate),
        plan,
        index,
        record_loss=loss,
        secret=RunSecret.fixed_for_tests(seed),
    )
    for cohort in step.cohorts():
        chosen = [torch.from_numpy(records[rows]) for rows in cohort]
        step.apply({"x": task.features[one], "y": task.labels[one]} for one in chosen)
    return model, plan


def measured(task: Task, model: nn.Module, first: int, last: int) -> tuple[float, float]:
    """Mean loss and accuracy on some records."""
    with torch.no_grad():
        logits = model(task.features[first:last])[:, 0]
        labels = task.labels[first:last]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return float(loss), float(((logits > 0) == (labels > 0.5)).float().mean())


def settings() -> Iterator[Setting]:
    """All that are tried."""
    for graph, mean_records in GRAPHS:
        for epsilon in EPSILONS:
            for chosen in (None, *BOUNDS):
                for rate in RATES:
                    yield Setting(
                        graph=graph,
                        mean_records=mean_records,
                        epsilon=epsilon,
                        bound=chosen,
                        rate=rate,
                    )


def main() -> None:
    """Run what is missing in the results, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    done = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    known = {json.dumps([row["setting"], row["seed"]], sort_keys=True) for row in done}
    for seed in SEEDS:
        for setting in settings():
            if json.dumps([asdict(setting), seed], sort_keys=True) in known:
                continue
            began = time.monotonic()
            task = task_of(setting.graph, setting.mean_records, seed)
            model, plan = trained(task, setting, seed)
            valid = measured(task, model, TRAINED, TRAINED + VALIDATED)
            test = measured(task, model, TRAINED + VALIDATED, RECORDS)
            row = {
                "setting": asdict(setting),
                "seed": seed,
                "noise_multiplier": plan.noise.noise_multiplier,
                "sampler": plan.sampler.words,
                "validation_loss": valid[0],
                "test_loss": test[0],
                "test_accuracy": test[1],
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(row, sort_keys=True) + "\n")
            done.append(row)
            print(f"{time.monotonic() - began:.1f} s", row, file=sys.stderr)
    print(table(done))


def table(rows: list[dict[str, object]]) -> str:
    """The best of each method by validation loss over the seeds, in Markdown."""
    lines = ["| graph | epsilon | DP-SGD | DP-MF | better |", "|---|---|---|---|---|"]
    for graph, mean_records in GRAPHS:
        for epsilon in EPSILONS:
            cells: list[str] = []
            losses: list[NDArray[np.float64]] = []
            for is_banded in (False, True):
                best = _best(rows, graph, mean_records, epsilon, is_banded)
                loss = np.array([row["test_loss"] for row in best])
                accuracy = np.array([row["test_accuracy"] for row in best])
                cells.append(f"{loss.mean():.4f} ± {loss.std(ddof=1):.4f} ({accuracy.mean():.1%})")
                losses.append(loss)
            wins = int((losses[1] < losses[0]).sum())
            name = f"{graph}, {mean_records:g} records a user"
            better = f"DP-MF in {wins} of {len(losses[0])} seeds"
            lines.append(f"| {name} | {epsilon:g} | {cells[0]} | {cells[1]} | {better} |")
    return "\n".join(lines)


def _best(
    rows: list[dict[str, object]], graph: str, mean_records: float, epsilon: float, is_banded: bool
) -> list[dict[str, object]]:
    tried: dict[tuple[object, object], list[dict[str, object]]] = {}
    for row in rows:
        setting = row["setting"]
        assert isinstance(setting, dict)
        same = (setting["graph"], setting["mean_records"], setting["epsilon"])
        if same == (graph, mean_records, epsilon) and (setting["bound"] is None) == is_banded:
            tried.setdefault((setting["bound"], setting["rate"]), []).append(row)
    means = {key: np.mean([r["validation_loss"] for r in found]) for key, found in tried.items()}  # type: ignore[misc]
    best = tried[min(means, key=lambda key: float(means[key]))]
    return sorted(best, key=lambda row: str(row["seed"]))


if __name__ == "__main__":
    main()
