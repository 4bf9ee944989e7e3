"""The word LSTM's own program of local steps: as one user at a time, and each user for itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from models_zoo import ragged_batch
from userdp.clipping.local import LocalClipping
from userdp.clipping.rules import ClipRule, FlatClip, PerLayerClip, PerVectorClip
from userdp.clipping.settings import StepSettings
from userdp.clipping.stacked.lstm import StackedLSTM, stacked_lstm
from userdp.clipping.summation import Summation, summation
from userdp.losses import Batch, causal_lm_loss, masked_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.updates.contract import Descent, UpdateRule
from userdp.updates.fedavg import FedAvg
from userdp.updates.mean_gradient import MeanGradient

WORDS = 31
# The last user's record of one token predicts nothing.
RAGGED = ([9, 4, 2], [6], [3, 12, 5, 2], [7, 7], [4, 4, 4, 4, 4], [1])
DESCENT = Descent(rate=0.5, penalty=0.0)
Threads = Callable[[int], None]


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Sets the number of torch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def lstm(dtype: torch.dtype = torch.float32) -> WordLSTM:
    torch.manual_seed(0)
    config = WordLSTMConfig(vocab_size=WORDS, embedding_size=6, state_size=5)
    model = WordLSTM(config).eval()
    return model.double() if dtype == torch.float64 else model


def cohort() -> list[Batch]:
    found = [dict(ragged_batch(list(lengths), seed=s)) for s, lengths in enumerate(RAGGED)]
    # Some labels in the middle of a record do not count, and a word stands twice in a row.
    found[2]["labels"][1, 3:5] = -100
    found[3]["input_ids"][0, :4] = found[3]["labels"][0, :4] = 7
    return [*found]


def summation_of(model: nn.Module, update: UpdateRule, rule: ClipRule, path: str) -> Summation:
    return summation(
        model,
        list(model.parameters()),
        update,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(path=path),  # type: ignore[arg-type]
        sequence_length=16,
    )


def summed(model: nn.Module, update: FedAvg, rule: ClipRule, path: str) -> Tensor:
    made = summation_of(model, update, rule, path)
    found = made.clipped_sum(cohort(), rule).total.values
    if path == "fast":
        assert made._lstm is not None  # type: ignore[attr-defined]
        assert made.trains_many_at_once  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=0.3),
        PerLayerClip(clip_norm=0.3),
        PerVectorClip(norms=(0.3, 0.05), groups=("*embedding*", "*")),
        FlatClip(clip_norm=math.inf),
    ],
)
def test_users_side_by_side_are_the_users_one_by_one(
    rule: ClipRule, penalty: float, dtype: torch.dtype, most: float
) -> None:
    update = FedAvg(
        local_learning_rate=0.5,
        local_epochs=2,
        local_batch_size=2,
        user_weight_cap=3.0,
        update_penalty=penalty,
    )
    one_by_one = summed(lstm(dtype), update, rule, "plain")
    at_once = summed(lstm(dtype), update, rule, "fast")
    assert float(one_by_one.norm()) > 0.1
    assert float((at_once - one_by_one).norm()) <= most * float(one_by_one.norm())


@pytest.mark.parametrize("words", [20_000, 30_000])
@pytest.mark.parametrize(
    "update", [FedAvg(local_learning_rate=0.5, local_batch_size=2), MeanGradient()]
)
def test_the_papers_larger_dictionaries_are_on_the_fast_path(
    update: UpdateRule, words: int
) -> None:
    torch.manual_seed(0)
    model = WordLSTM(WordLSTMConfig(vocab_size=words, embedding_size=4, state_size=4)).eval()
    rule = FlatClip(clip_norm=0.3)
    drawn = [torch.randint(0, words, (3, 6)) for _ in range(5)]
    groups: list[Batch] = [{"input_ids": ids, "labels": ids} for ids in drawn]
    found: list[Tensor] = []
    for path in ("plain", "fast"):
        made = summation_of(model, update, rule, path)
        found.append(made.clipped_sum(groups, rule).total.values)
        assert not getattr(made, "differs", False)
        assert getattr(made, "trains_many_at_once", True)
    assert float((found[1] - found[0]).norm()) <= 1e-5 * float(found[0].norm())


def test_the_sum_has_the_same_bits_whoever_works(threads: Threads) -> None:
    update = FedAvg(local_learning_rate=0.5, local_batch_size=2)
    model, rule = lstm(), FlatClip(clip_norm=0.3)
    # More users than one worker takes at a time, of many sizes.
    groups = [dict(ragged_batch([3 + n % 7] * (1 + n % 5), seed=n)) for n in range(40)]

    def bits(num_threads: int) -> Tensor:
        threads(num_threads)
        made = summation_of(model, update, rule, "fast")
        assert isinstance(made, LocalClipping)
        found = made.clipped_sum(groups, rule).total.values
        assert len(made._lstms) == num_threads
        return found

    alone = bits(1)
    assert float(alone.norm()) > 0.1
    for workers in (2, 2, 3):
        assert torch.equal(bits(workers), alone)


def test_a_user_who_fails_in_a_worker_trains_alone_and_the_others_as_before(
    threads: Threads,
) -> None:
    update, rule = FedAvg(local_learning_rate=0.5, local_batch_size=2), FlatClip(clip_norm=0.3)
    model = lstm()
    # Two workers have users, and one of them somebody who fails.
    groups = [dict(ragged_batch([4], seed=n)) for n in range(18)]
    # There is no such word.
    groups[3]["input_ids"] = torch.full_like(groups[3]["input_ids"], WORDS)

    def total(path: str, num_threads: int) -> Tensor:
        threads(num_threads)
        made = summation_of(model, update, rule, path)
        made.skip_failing = True
        return made.clipped_sum(groups, rule).total.values

    torch.testing.assert_close(total("fast", 2), total("plain", 1), rtol=1e-4, atol=1e-6)


def program(model: nn.Module, parameters: Sequence[Tensor] | None = None) -> StackedLSTM:
    made = stacked_lstm(model, parameters or list(model.parameters()), causal_lm_loss, DESCENT)
    assert made is not None
    return made


def ways_of(made: StackedLSTM) -> list[Tensor]:
    """Each user's way, by parameter: the sum in which that user alone has a weight."""
    squares = made.squared_ways()
    own = [
        made.summed_ways(torch.eye(squares.shape[1])[[user]].expand_as(squares))
        for user in range(squares.shape[1])
    ]
    return [torch.stack(tensors) for tensors in zip(*own, strict=True)]


def batch_of(users: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, WORDS, (users, 2, 5))
    return ids, ids.clone(), torch.ones(users, 2, dtype=torch.bool)


def half_of_all(squares_PU: Tensor) -> Tensor:
    """Factors as clipping gives them: zero for a user who is not finite."""
    counts = torch.isfinite(squares_PU).all(0, keepdim=True)
    return torch.where(counts, torch.full_like(squares_PU, 0.5), 0.0)


def test_a_user_who_is_not_finite_has_no_way_and_changes_nobody() -> None:
    batches = [batch_of(3, seed) for seed in (1, 2, 3)]

    def ways(*, bad: bool) -> list[list[Tensor]]:
        made = program(lstm(torch.float64))
        made.start(3)
        found: list[list[Tensor]] = []
        for number, batch in enumerate(batches):
            if bad and number == 1:
                made._theta["weight"][1] = math.inf
                made._theta["table"][1] = math.nan
            made.step(*batch, resting=0, factors=half_of_all)
            found.append([tensor.clone() for tensor in ways_of(made)])
        return found

    good, found = ways(bad=False), ways(bad=True)
    for wanted, own in zip(good[1] + good[2], found[1] + found[2], strict=True):
        assert torch.equal(wanted[[0, 2]], own[[0, 2]])
        assert wanted[1].any()
    assert not any(own[1].any() for own in found[1])
    # After that the user goes on from the beginning, as in the plain loop.
    fresh = program(lstm(torch.float64))
    fresh.start(3)
    fresh.step(*batches[2], resting=0, factors=half_of_all)
    for wanted, own in zip(ways_of(fresh), found[2], strict=True):
        torch.testing.assert_close(own[1], wanted[1], rtol=1e-9, atol=1e-14)


def test_clipping_is_left_to_the_next_step_and_counted_once() -> None:
    made = program(lstm(torch.float64))
    made.start(2)
    made.step(*batch_of(2, seed=1), resting=0, factors=torch.ones_like)
    whole = [tensor.clone() for tensor in ways_of(made)]
    made.start(2)
    made.step(*batch_of(2, seed=1), resting=0, factors=half_of_all)
    for once, half in zip(whole, ways_of(made), strict=True):
        torch.testing.assert_close(half, once / 2, rtol=1e-12, atol=1e-15)
    squares = torch.stack([tensor.flatten(1).square().sum(1) for tensor in ways_of(made)])
    torch.testing.assert_close(made.squared_ways(), squares, rtol=1e-12, atol=0)


def test_resting_users_stay_where_they_are() -> None:
    made = program(lstm(torch.float64))
    made.start(3)
    made.step(*batch_of(3, seed=1), resting=0, factors=half_of_all)
    before = [tensor.clone() for tensor in ways_of(made)]
    made.step(*batch_of(3, seed=2), resting=2, factors=half_of_all)
    for old, new in zip(before, ways_of(made), strict=True):
        assert torch.equal(old[:2], new[:2])
        assert not torch.equal(old[2], new[2])


def test_parameters_may_come_in_any_order() -> None:
    model = lstm(torch.float64)
    parameters = list(model.parameters())
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(0)).tolist()
    # Each parameter has a factor of its own, told by its place in the caller's order.
    scales = torch.rand(len(parameters), generator=torch.Generator().manual_seed(1))

    def ways(places: list[int]) -> list[Tensor]:
        made = program(model, [parameters[place] for place in places])
        made.start(2)
        own = scales[places, None].double()
        for seed in (1, 2):
            made.step(*batch_of(2, seed), resting=0, factors=lambda s: own.expand_as(s))
        return ways_of(made)

    usual, other = ways(list(range(len(parameters)))), ways(order)
    for place, found in zip(order, other, strict=True):
        assert torch.equal(usual[place], found)


def test_long_records_take_their_memory_from_the_number_of_users() -> None:
    made = program(lstm())
    many, few = made.most_users(10), made.most_users(200_000)
    assert many == made.most_users(1) > few > 1
    assert made.most_users(2**40) == 1


def test_only_the_word_lstm_itself_takes_its_program() -> None:
    class Other(WordLSTM):
        pass

    model = lstm()
    every = list(model.parameters())
    assert stacked_lstm(model, every, causal_lm_loss, DESCENT) is not None
    assert stacked_lstm(model, every[1:], causal_lm_loss, DESCENT) is None
    assert stacked_lstm(model, every, masked_lm_loss, DESCENT) is None
    other = Other(WordLSTMConfig(vocab_size=WORDS, embedding_size=6, state_size=5)).eval()
    assert stacked_lstm(other, list(other.parameters()), causal_lm_loss, DESCENT) is None
    hooked = copy.deepcopy(model)
    hooked.embedding.register_forward_hook(lambda *_: None)
    assert stacked_lstm(hooked, list(hooked.parameters()), causal_lm_loss, DESCENT) is None
    half = copy.deepcopy(model).bfloat16()
    assert stacked_lstm(half, list(half.parameters()), causal_lm_loss, DESCENT) is None
