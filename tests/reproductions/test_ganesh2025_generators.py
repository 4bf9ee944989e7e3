from __future__ import annotations

import numpy as np
import pytest

from reproductions.ganesh2025 import generators
from userdp.bounding.edges import Edges
from userdp.errors import InputError


def is_valid(graph: Edges) -> bool:
    """Whether the checks of `Edges.of` find nothing to refuse or to drop."""
    again = Edges.of(graph.indptr, graph.owners, num_users=graph.num_users)
    return again.num_incidences == graph.num_incidences


@pytest.mark.statistical
@pytest.mark.parametrize("model", [generators.regular_graph, generators.skewed_graph])
@pytest.mark.parametrize("mean_owners", [1.0, 2.0, 5.0])
def test_graphs_are_valid_and_keep_their_means(model, mean_owners: float) -> None:
    graph = model(
        num_records=50_000,
        mean_owners=mean_owners,
        mean_records=4.0,
        rng=np.random.default_rng(11),
    )
    assert is_valid(graph)
    # Seed 11; the mean of 50,000 counts of variance at most 5 leaves 5 sigma with probability 6e-7.
    assert abs(graph.cardinality().mean() - mean_owners) < 5 * np.sqrt(5 / 50_000)
    assert graph.num_users == 50_000 * mean_owners / 4


@pytest.mark.statistical
def test_owners_of_a_regular_graph_are_uniform() -> None:
    graph = generators.regular_graph(
        num_records=100_000, mean_records=2000.0, rng=np.random.default_rng(2)
    )
    degrees = graph.degrees()
    # Seed 2; chi-square with 99 degrees of freedom: mean 99, sigma 14, 5 sigma 1e-6 or less.
    chi_square = ((degrees - degrees.mean()) ** 2 / degrees.mean()).sum()
    assert abs(chi_square - 99) < 5 * np.sqrt(2 * 99)


@pytest.mark.statistical
def test_the_second_record_of_a_skewed_graph_follows_its_weights() -> None:
    # Two records of one owner among 4 users: the second has the first's owner with probability
    # 2^1.5 / (2^1.5 + 3). Seed 3; 5 sigma of 4,000 trials: 6e-7.
    rng = np.random.default_rng(3)
    same = 0
    for _ in range(4000):
        graph = generators.skewed_graph(num_records=2, mean_owners=1.0, mean_records=0.5, rng=rng)
        assert graph.num_users == 4
        same += int(graph.owners[0] == graph.owners[1])
    expected = 2**1.5 / (2**1.5 + 3)
    assert abs(same / 4000 - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000)


def test_skew_concentrates_records_on_few_users() -> None:
    def top_share(model) -> float:
        graph = model(num_records=20_000, mean_records=4.0, rng=np.random.default_rng(0))
        degrees = np.sort(graph.degrees())
        return float(degrees[-len(degrees) // 100 :].sum() / degrees.sum())

    assert top_share(generators.skewed_graph) > 5 * top_share(generators.regular_graph)


def test_more_owners_than_users_are_cut_to_all_users() -> None:
    for model in (generators.regular_graph, generators.skewed_graph):
        graph = model(
            num_records=50, mean_owners=4.0, mean_records=100.0, rng=np.random.default_rng(1)
        )
        assert graph.num_users == 2
        assert graph.cardinality().max() == 2
        assert is_valid(graph)


@pytest.mark.statistical
def test_labels_follow_the_number_of_owners_when_the_bias_is_strong() -> None:
    rng = np.random.default_rng(4)
    graph = generators.regular_graph(num_records=20_000, mean_records=4.0, rng=rng)

    def accuracy(strength: float, direction: str) -> float:
        data = generators.logistic_data(graph, dimension=10, bias_strength=strength, rng=rng)
        assert abs((data.features**2).sum(axis=1).mean() - 1) < 0.05
        guess = data.features @ getattr(data, direction) > 0
        return float((guess == data.labels).mean())

    # Seed 4. Without bias the base vector decides, up to the coin; with a strong one it does not.
    assert accuracy(0.0, "base") > 0.9
    assert accuracy(100.0, "bias") > 0.9
    assert accuracy(100.0, "base") < 0.8


@pytest.mark.parametrize(
    "bad",
    [{"num_records": 0}, {"mean_owners": 0.5}, {"mean_records": 0.0}, {"alpha": -1.0}],
)
def test_impossible_graphs_are_refused(bad: dict[str, float]) -> None:
    arguments = {"num_records": 10, "mean_owners": 2.0, "mean_records": 4.0} | bad
    with pytest.raises(InputError):
        generators.skewed_graph(**arguments, rng=np.random.default_rng(0))
