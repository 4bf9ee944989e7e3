"""Attacks through a loop of one's own: owners, losses, lengths, modes, what a model keeps."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import families
from userdp import FlatClip, Plan, PrivateStep, StepSettings, UserIndex, verify
from userdp.accounting import events
from userdp.clipping.checks.compared_shapes import ComparedShapes
from userdp.clipping.checks.made_up import MadeUp
from userdp.clipping.checks.verify import FastPathError
from userdp.clipping.fast import FastClipping
from userdp.clipping.flat import HalfAddedError
from userdp.clipping.gradients.sums import Sums
from userdp.clipping.plain import PlainClipping
from userdp.errors import InputError, MixedExamplesError, UntriedModelError
from userdp.ledger.book import Ledger
from userdp.losses import causal_lm_loss
from userdp.models.proven import is_proven
from userdp.noise import Banded
from userdp.probe.verify import UnsafeModelError, usual_length
from userdp.runs.record import RunRecord
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CyclicPoissonUsers,
    PublicNumbers,
    Sampler,
)
from userdp.streams import RunSecret

EXAMPLE = {"x": torch.ones(1, 3), "y": torch.ones(1)}


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


# ---- whose rows are whose


@pytest.mark.parametrize("kind", ["tensor", "list of tensors", "array", "list of numpy numbers"])
def test_rows_of_one_owner_are_one_user_however_the_owners_are_given(kind: str) -> None:
    plain = [7, 7, 8, 7]
    owners: Any = {
        "tensor": torch.tensor(plain),
        "list of tensors": list(torch.tensor(plain)),
        "array": np.array(plain),
        "list of numpy numbers": [np.int32(7), 7, np.int64(8), np.uint8(7)],
    }[kind]
    index = UserIndex.from_owners(owners)
    assert [index.rows_of(user).tolist() for user in range(index.num_users)] == [[0, 1, 3], [2]]


def test_a_row_of_two_users_is_refused() -> None:
    # Both are charged for one record, and both move the sum: 8.39 was stated for 20.1.
    shared = UserIndex(indptr=np.array([0, 2, 4]), rows=np.array([0, 1, 0, 2]))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="belongs to several users"):
        PrivateStep(model, optimizer, plan(2), shared, record_loss=squares)
    # The same row twice of one user is that user's own affair.
    twice = UserIndex(indptr=np.array([0, 2, 3]), rows=np.array([0, 0, 1]))
    PrivateStep(model, optimizer, plan(2), twice, record_loss=squares)


NAN = float("nan")


@pytest.mark.parametrize(
    "owners",
    [
        [NAN, NAN],
        np.array([NAN, 1.0]),
        np.array(["ann", None], dtype=object),
        [None, "ann"],
        [True, 1],
        [("ann", NAN)],
        torch.zeros(2, 2),
        [object()],
    ],
    ids=lambda owners: str(type(owners[0]).__name__),
)
def test_an_owner_that_may_not_equal_itself_is_refused(owners: Any) -> None:
    with pytest.raises(InputError, match="give a string"):
        UserIndex.from_owners(owners)


def test_one_person_as_a_number_and_as_a_string_is_refused() -> None:
    with pytest.raises(InputError, match="several kinds"):
        UserIndex.from_owners([1, "1"])
    assert UserIndex.from_owners([("a", 1), ("a", np.int64(1)), ("a", 2)]).num_users == 2


# ---- the comparison with the plain loop

MADE_UP = MadeUp.tokens(families.VOCABULARY)
RULE = FlatClip(clip_norm=0.05)


def test_the_oracle_of_a_comparison_starts_from_the_model_as_it_was() -> None:
    # Looking at a batch runs the model once: embeddings that grow had grown for the oracle, too.
    model = families.build(families.PLAIN_ONLY["llama, dynamic rotation"])
    groups = [*(MADE_UP.group(1, 12, seed=i) for i in range(9)), MADE_UP.group(1, 40, seed=98)]
    fast = FastClipping(
        model,
        list(model.parameters()),
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(mix_sizes=True, join_records=False),
    )
    with pytest.raises(FastPathError, match="differs from the plain loop"):
        fast.clipped_sum(groups, RULE)


class CentresLargeBatches(nn.Module):
    """Rows see each other in batches of more than twelve rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(families.VOCABULARY, 8)
        self.head = nn.Linear(8, families.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x - x.mean((0, 1), keepdim=True) if len(x) > 12 else x)


def plan(users: int, *, cohort: int | None = None, steps: int = 2, clip_norm: float = 1.0) -> Plan:
    return Plan.sample_users(
        num_users=users,
        expected_cohort_size=cohort or users,
        group_size=2,
        steps=steps,
        clip_norm=clip_norm,
        noise_multiplier=2.0,
        delta=1e-3,
    )


def private_step(model: nn.Module, chosen: Plan, users: int, **options: Any) -> PrivateStep:
    trained = [p for p in model.parameters() if p.requires_grad]
    index = UserIndex.from_owners(range(users))
    return PrivateStep(model, torch.optim.SGD(trained, lr=1e-9), chosen, index, **options)


def sums_of(step: PrivateStep, groups: list[Any]) -> list[Tensor]:
    """The clipped sum of every step; user i has `groups[i]`."""
    found: list[Tensor] = []
    release = step._release
    step._release = lambda total: (found.append(total.total.values.clone()), release(total))[1]  # type: ignore[method-assign]
    for cohort in step.cohorts():
        step.apply(groups[int(rows[0])] for rows in cohort)
    return found


def test_a_model_that_is_not_proven_is_compared_in_every_shape_of_batch() -> None:
    # Cohorts of varying size: the third, fifth, ... shape was not compared, and moved by 4.5 C.
    one = MADE_UP.group(1, 8, seed=0)
    odd = {name: torch.full_like(tensor, 3) for name, tensor in one.items()}
    nothing = {name: tensor[:0] for name, tensor in odd.items()}

    def sums(last: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = CentresLargeBatches().double()
        # Cohorts follow the code as well as the seed. In 40 steps the last user is left out of all
        # cohorts with probability 3e-6.
        chosen = plan(40, cohort=11, steps=40, clip_norm=0.05)
        step = private_step(model, chosen, 40, secret=RunSecret.fixed_for_tests(4))
        return sums_of(step, [*([one] * 39), last])

    moved = [float((a - b).norm()) / 0.05 for a, b in zip(sums(odd), sums(nothing), strict=True)]
    assert 0 < max(moved) <= 1 + 1e-5


def test_a_loss_of_ones_own_is_compared_in_every_shape_of_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The model is proven. A loss may still weigh rows over a batch of just five rows.
    decide = ComparedShapes.compare_next
    told: list[bool] = []

    def noted(self: ComparedShapes, *given: Any) -> bool:
        told.append(decide(self, *given))
        return told[-1]

    monkeypatch.setattr(ComparedShapes, "compare_next", noted)
    model = families.build(families.SAFE["gpt2"])
    assert is_proven(model)

    def own(model: nn.Module, batch: Any) -> Tensor:
        return causal_lm_loss(model, batch)

    def compared(loss: Any) -> list[bool]:
        told.clear()
        step = private_step(model, plan(40), 40, record_loss=loss)
        step.check_model()
        for rows in (8, 7, 6, 5):
            groups = [MADE_UP.group(1, 8, seed=n) for n in range(rows)]
            step._checked.summation.clipped_sum(groups, RULE)
        return list(told)

    assert compared(causal_lm_loss) == [True, True, False, True]
    assert compared(own) == [True, True, True, True]


def test_paths_that_differ_after_a_release_leave_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 1)
    chosen = plan(6, steps=3)
    ledger = Ledger.create(chosen, path=tmp_path / "ledger.jsonl", bound_to={}, fixed_seed=False)
    step = private_step(model, chosen, 6, record_loss=squares, record=RunRecord(ledger))
    for number in range(3):
        groups = [{"x": torch.ones(1 + number, 3), "y": torch.ones(1 + number)}] * 6
        if number == 1:
            assert step.statement().guarantee

            def differ(*_: Any) -> None:
                raise FastPathError("the paths differ")

            monkeypatch.setattr(FastClipping, "_compare", differ)
        step.draw()
        step.apply(groups)
    step.finish()
    for statement in (step.statement(), Ledger.read(tmp_path / "ledger.jsonl").statement()):
        assert not statement.guarantee
        assert "the paths were seen to differ after 1 released steps" in statement.sentence
        assert statement.promise == ""
    # Nor is anything promised of a run that starts from these weights.
    after = private_step(model, chosen, 6, record_loss=squares)
    assert not after.statement().guarantee


# ---- what is tried, and what is admitted


def test_rows_longer_than_those_tried_count_as_zero_without_a_declared_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The probe tried the 12 positions from which on these embeddings grow; longer rows came after.
    def sums(last: Any) -> list[Tensor]:
        model = families.build(families.PLAIN_ONLY["llama, dynamic rotation"])
        chosen = plan(6, clip_norm=0.05)
        step = private_step(model, chosen, 6, secret=RunSecret.fixed_for_tests(1))
        return sums_of(step, [*(MADE_UP.group(1, 11, seed=i) for i in range(5)), last])

    with caplog.at_level("WARNING", logger="userdp"):
        long = sums(MADE_UP.group(1, 13, seed=9))
    assert caplog.text.count("records of more than 12 tokens count as zero") == 1
    for found, expected in zip(long, sums(MADE_UP.group(0, 1, seed=9)), strict=True):
        assert torch.equal(found, expected)


def test_an_example_given_by_hand_sets_the_length() -> None:
    model = CentresLargeBatches()
    step = private_step(model, plan(4), 4)
    step.check_model(MADE_UP.group(1, 150, seed=0))
    assert step._checked.reads(MADE_UP.group(1, 150, seed=1))
    assert not step._checked.reads(MADE_UP.group(1, 151, seed=1))


@pytest.mark.parametrize("sampling", ["records", "users"])
def test_one_users_malformed_records_never_end_a_run(sampling: str) -> None:
    # Three records of one user were the three examples that were tried.
    owners = ["eve"] * 3 + [f"u{i}" for i in range(8)]
    rows = [torch.ones(1, 4 if i < 3 else 3) for i in range(11)]
    chosen = (
        plan(9)
        if sampling == "users"
        else Plan.sample_records(
            num_users=9,
            expected_batch_size=27,
            num_records=27,
            group_size=3,
            steps=2,
            clip_norm=1.0,
            noise_multiplier=5.0,
            delta=1e-2,
        )
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = PrivateStep(model, optimizer, chosen, UserIndex.from_owners(owners), record_loss=squares)
    for cohort in step.cohorts():
        groups = [torch.cat([rows[int(row)] for row in group]) for group in cohort]
        step.apply({"x": x, "y": torch.ones(len(x))} for x in groups)
    assert step.ledger.steps == 2
    assert step._checked.is_checked


def test_a_user_alone_in_a_step_with_malformed_records_counts_as_zero() -> None:
    model = nn.Linear(3, 1)
    step = private_step(model, plan(6, steps=3), 6, record_loss=squares)
    bad = {"x": torch.ones(1, 4), "y": torch.ones(1)}
    nothing = {"x": torch.ones(0, 3), "y": torch.ones(0)}
    found = sums_of(step, [bad, *([nothing] * 5)])
    assert not any(float(total.abs().max()) for total in found)
    assert not step._checked.is_checked
    # Many users of whom none can be tried are no longer one user's data.
    step = private_step(model, plan(6, steps=3), 6, record_loss=squares)
    step.draw()
    with pytest.raises(UntriedModelError, match="fails on made-up rows"):
        step.apply([bad] * 3 + [nothing] * 3)
    assert step.ledger.steps == 0


def test_a_verdict_on_the_model_is_never_passed_over() -> None:
    # Most users' rows show that the loss mixes; those of the last user hide it.
    def loss(model: nn.Module, batch: Any) -> Tensor:
        own = squares(model, batch)
        return own * (own.mean() if "z" not in batch else 1.0)

    step = private_step(nn.Linear(3, 1), plan(4), 4, record_loss=loss)
    step.draw()
    shows = {"x": torch.ones(1, 3), "y": torch.ones(1)}
    with pytest.raises(UnsafeModelError):
        step.apply([*([shows] * 3), shows | {"z": torch.ones(1)}])


# The smaller rate shows only where the same cohort is summed again.
@pytest.mark.parametrize("rate", [2e-5, 2e-6])
@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_loss_that_hardly_remembers_is_found(path: Any, rate: float) -> None:
    # Below 1e-3 C for the few users of a probe, and at the larger rate above C for the thousands of
    # a cohort.
    state = {"scale": 1.0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own = squares(model, batch)
        for value in own.detach().tolist():
            state["scale"] += rate * (min(value, 9.0) - state["scale"])
        return own * state["scale"]

    torch.manual_seed(0)
    found = verify(nn.Linear(3, 1), EXAMPLE, record_loss=loss, path=path)
    assert not found.safe
    assert max(p.coupling for p in found.probes if "again" in p.name) < 1e-3


# ---- what is called proven, and what is not checked


def batch_mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """One value a record, weighted as in a mean over the batch's tokens."""
    lengths = (batch["labels"][:, 1:] != -100).sum(1)
    return causal_lm_loss(model, batch) * lengths / lengths.sum() * len(lengths)


def test_a_loss_of_ones_own_is_never_left_unchecked() -> None:
    model = families.build(families.SAFE["gpt2"])
    settings = StepSettings(check=False)
    step = private_step(model, plan(4), 4, record_loss=batch_mean_loss, settings=settings)
    with pytest.raises(InputError, match=r"record_loss.*leave check=True"):
        step.check_model()
    private_step(model, plan(4), 4, settings=settings).check_model()


def _own_attention(*arguments: Any, **options: Any) -> Any:
    return sdpa_attention_forward(*arguments, **options)


def test_an_attention_function_of_ones_own_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = families.build(families.SAFE["llama"])
    assert is_proven(model)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", _own_attention)
    model.set_attn_implementation("own")
    assert not is_proven(model)
    model.set_attn_implementation("sdpa")
    assert is_proven(model)
    # Nor one that takes the place of the library's.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _own_attention)
    assert not is_proven(model)


@pytest.mark.parametrize(
    "register",
    [
        lambda model: model.lm_head.register_full_backward_hook(lambda *_: None),
        lambda model: model.lm_head.register_full_backward_pre_hook(lambda *_: None),
        lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient),
        lambda _: torch_module.register_module_forward_hook(lambda *_: None),
        lambda _: torch_module.register_module_forward_pre_hook(lambda *_: None),
        lambda _: torch_module.register_module_full_backward_hook(lambda *_: None),
    ],
)
def test_a_hook_of_any_kind_is_not_proven(register: Any) -> None:
    model = families.build(families.SAFE["gpt2"])
    handle = register(model)
    try:
        assert not is_proven(model)
    finally:
        handle.remove()
    assert is_proven(model)


def test_a_rotation_that_grows_is_seen_at_any_depth() -> None:
    model: Any = families.build(families.SAFE["gemma3"])
    assert is_proven(model)
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert not is_proven(model)


def test_a_method_put_into_a_librarys_class_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = families.build(families.SAFE["gpt2"])
    kind = type(model.transformer.h[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *arguments, **options: own(*arguments, **options))
    assert not is_proven(model)


# ---- what may change while a run goes on


@pytest.mark.parametrize("name", ["plan", "model", "optimizer", "record", "ledger"])
def test_what_a_step_is_priced_by_cannot_be_replaced(name: str) -> None:
    step = private_step(nn.Linear(3, 1), plan(6), 6, record_loss=squares)
    with pytest.raises(AttributeError):
        setattr(step, name, getattr(step, name))


class CentresInTraining(nn.Module):
    """Rows see each other in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y - 3 * y.mean(0) if self.training else y


def _hooked(model: Any) -> None:
    model.inner.register_forward_hook(lambda _, given, found: found - 3 * found.mean(0))


def _patched(model: Any) -> None:
    own = model.inner.forward
    model.inner.forward = lambda x: own(x) - 3 * own(x).mean(0)


@pytest.mark.parametrize("change", [lambda model: model.train(), _hooked, _patched])
def test_a_model_that_is_changed_after_its_check_is_checked_again(change: Any) -> None:
    torch.manual_seed(0)
    model = CentresInTraining().eval()
    step = private_step(model, plan(6, steps=4), 6, record_loss=squares)
    group = {"x": torch.randn(1, 3), "y": torch.ones(1)}
    for number in range(3):
        step.draw()
        if number == 2:
            change(model)
            with pytest.raises(MixedExamplesError):
                step.apply([group] * 6)
        else:
            step.apply([group] * 6)
            # An evaluation between two steps, which puts the mode back, is no change.
            model.train().eval()
    assert step.ledger.steps == 2


def test_a_model_that_stays_as_it_is_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = private_step(nn.Linear(3, 1), plan(6, steps=3), 6, record_loss=squares)
    checks: list[Any] = []
    check = step._checked._check
    monkeypatch.setattr(
        step._checked, "_check", lambda *a, **k: (checks.append(a), check(*a, **k))[1]
    )
    sums_of(step, [{"x": torch.ones(1, 3), "y": torch.ones(1)}] * 6)
    assert len(checks) == 1


# ---- what leaves with the saved model


class CountsTokens(nn.Module):
    """Counts what it saw in a frozen parameter, as layers with a codebook do."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.inner = nn.Linear(3, 1)
        self.usage = nn.Parameter(torch.zeros(3), requires_grad=False)

    def count(self, x: Tensor) -> None:
        with torch.no_grad():
            self.usage += x.detach().abs().sum(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "gradients are on" and torch.is_grad_enabled():
            self.count(x)
        y = self.inner(x)
        is_seven = self.when == "backward of sevens" and bool((x == 7).all())
        if (self.when == "backward" or is_seven) and y.requires_grad:
            y.register_hook(lambda _: self.count(x))
        return y


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("when", ["gradients are on", "backward"])
def test_a_frozen_weight_written_with_gradients_is_found(when: str, path: Any) -> None:
    step = private_step(
        CountsTokens(when), plan(4), 4, record_loss=squares, settings=StepSettings(path=path)
    )
    with pytest.raises(MixedExamplesError, match="'usage' is written during the backward pass"):
        step.check_model(EXAMPLE)


def test_a_run_that_changed_a_frozen_weight_is_not_closed() -> None:
    # It behaves while it is probed: only the end shows what it kept.
    model = CountsTokens("backward of sevens")
    step = private_step(model, plan(4), 4, record_loss=squares)
    sums_of(step, [EXAMPLE | {"x": torch.full((1, 3), 7.0)}] * 4)
    with pytest.raises(MixedExamplesError, match=r"'usage' is saved.*not closed"):
        step.finish()
    assert not step.ledger.is_finished
    with torch.no_grad():
        model.usage.zero_()
    step.finish()


def test_a_buffer_that_is_not_saved_may_change() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("saved", torch.zeros(1))
    model.register_buffer("unsaved", torch.zeros(1), persistent=False)
    step = private_step(model, plan(4), 4, record_loss=squares)
    sums_of(step, [EXAMPLE] * 4)
    model.unsaved += 1  # type: ignore[operator]
    step.finish()


class Remembers(nn.Module):
    """Keeps what it saw in an object that no guard looks into, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.recent: deque[float] = deque(maxlen=100)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.extend(x.detach().flatten().tolist())
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return {"recent": list(self.recent), "size": torch.tensor(len(self.recent))}

    def set_extra_state(self, state: Any) -> None:
        self.recent.extend(state["recent"])


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_extra_state_that_changes_is_found(path: Any) -> None:
    model = Remembers()
    step = private_step(model, plan(4), 4, record_loss=squares, settings=StepSettings(path=path))
    step.record._check_frozen(model)
    with pytest.raises(MixedExamplesError, match="'_extra_state' is written"):
        step.check_model(EXAMPLE)
    with pytest.raises(MixedExamplesError, match="'_extra_state' is saved"):
        step.finish()


def test_a_batch_that_was_half_added_is_not_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Were its users run again one by one, each could count twice.
    model = families.build(families.SAFE["gpt2"])
    parameters = list(model.parameters())
    rule = FlatClip(clip_norm=1.0)
    settings = StepSettings(check=False)
    fast = FastClipping(model, parameters, rule, record_loss=causal_lm_loss, settings=settings)
    fast.skip_failing = True
    honest = Sums.add

    def half(self: Sums, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        raise ValueError("after most of it was added")

    monkeypatch.setattr(Sums, "add", half)
    with pytest.raises(HalfAddedError):
        fast.clipped_sum([MADE_UP.group(1, 6, seed=n) for n in range(3)], rule)


# ---- several steps on one record


def everybody_of(users: int, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": users,
        "expected_cohort_size": users,
        "group_size": 2,
        "steps": 4,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(settings | changes))


def a_step(record: RunRecord | None = None, **options: Any) -> PrivateStep:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(3, 1)
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        everybody_of(4),
        UserIndex.from_owners(range(4)),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        record=record,
        **options,
    )


def ones(cohort: Any) -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(len(rows), 3)} for rows in cohort]


def test_two_steps_on_one_record_do_not_share_a_cohort() -> None:
    ledger = Ledger.create(everybody_of(4), bound_to={}, fixed_seed=False)
    first, second = a_step(RunRecord(ledger)), a_step(RunRecord(ledger))
    cohorts = [first.draw(), second.draw()]
    first.apply(ones(cohorts[0]))
    with pytest.raises(InputError, match="another step of this run was taken in between"):
        second.apply(ones(cohorts[1]))
    assert ledger.steps == 1


DEALT: list[tuple[type[Sampler], dict[str, Any], Banded | None]] = [
    (Allocation, {"participations": 1}, None),
    (BallsInBins, {}, None),
    (BalancedIteration, {}, None),
    (CyclicPoissonUsers, {"parts": 4}, None),
    (CyclicPoissonUsers, {"parts": 4}, Banded(noise_multiplier=1.0, bands=4, steps=4)),
]


@pytest.mark.parametrize(("kind", "own", "noise"), DEALT)
def test_users_are_dealt_out_once_in_a_run(
    kind: type[Sampler], own: dict[str, Any], noise: Banded | None
) -> None:
    # A new step has randomness of its own: a user took part four times where once was priced.
    public = PublicNumbers(num_users=8, num_records=8, expected_groups=2, group_size=1, steps=4)
    clip, model = FlatClip(clip_norm=1.0), nn.Linear(3, 1)
    chosen = Plan.of(kind, public, own=own, clip=clip, noise=noise, noise_multiplier=1.0, delta=0.1)
    ledger = Ledger.create(chosen, bound_to={}, fixed_seed=False)
    loss: dict[str, Any] = {"record_loss": lambda model, batch: model(batch["x"])[:, 0] ** 2}
    first = private_step(model, chosen, 8, record=RunRecord(ledger), **loss)
    first.apply(ones(first.draw()))
    with pytest.raises(InputError, match="make one PrivateStep of it"):
        private_step(model, chosen, 8, record=first.record, **loss)
    with pytest.raises(InputError, match="goes on with its ledger"):
        private_step(model, chosen, 8, record=RunRecord(ledger), **loss)
    first.apply(ones(first.draw()))
    assert ledger.steps == 2


def test_no_cohort_is_drawn_while_the_batches_of_another_come() -> None:
    step = a_step()
    cohort = step.draw()

    def ahead() -> Any:
        yield from ones(cohort)
        step.draw()

    with pytest.raises(InputError, match="drawn and not applied"):
        step.apply(ahead())
    assert step.ledger.steps == 0


def test_another_thread_cannot_take_the_same_step() -> None:
    step = a_step()
    cohort = step.draw()
    assert step.ledger.turn.acquire(blocking=False)
    with pytest.raises(InputError, match="is being taken"):
        step.apply(ones(cohort))
    step.ledger.turn.release()
    step.apply(ones(step.draw()))
    assert step.ledger.steps == 1


def test_a_forked_process_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step()
    cohort = step.draw()
    monkeypatch.setattr("userdp.runs.record.os.getpid", lambda: -1)
    with pytest.raises(InputError, match="forked"):
        step.apply(ones(cohort))
    assert step.ledger.steps == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_step_and_its_record_cannot_be_copied(copied: Any) -> None:
    step = a_step()
    for thing in (step, step.record):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(thing)


def test_a_cohort_is_not_applied_after_another_run_was_begun_on_the_model() -> None:
    step = a_step()
    cohort = step.draw()
    a_step(model=step.model)
    with pytest.raises(InputError, match="another private run"):
        step.apply(ones(cohort))


def test_a_record_made_for_one_model_does_not_serve_another() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = RunRecord.create(everybody_of(4), model, optimizer, settings=StepSettings())
    with pytest.raises(InputError, match="another model"):
        a_step(record)


@pytest.mark.parametrize("name", ["group_size", "num_users", "steps"])
def test_half_a_record_has_no_price(name: str) -> None:
    settings: dict[str, Any] = {
        "num_users": 100,
        "expected_batch_size": 10,
        "group_size": 2,
        "steps": 10,
        "clip_norm": 1.0,
        "noise_multiplier": 0.3,
        "delta": 1e-3,
    }
    assert Plan.sample_records(**settings).epsilon() > 10
    with pytest.raises(InputError, match=f"{name}=.* whole number"):
        Plan.sample_records(**(settings | {name: settings[name] + 0.5}))


def test_a_mixture_of_nothing_is_refused_by_the_price_itself() -> None:
    with pytest.raises(InputError, match="no distribution"):
        events.poisson_records_gaussian(
            record_sampling_prob=0.1,
            group_size=2.5,
            noise_multiplier=0.3,  # type: ignore[arg-type]
        )


# ---- what a probe cannot see


def test_made_up_rows_without_a_gradient_show_nothing() -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"])[:, 0] ** 2 * (batch["mask"] == 0.5)

    example = {"x": torch.randn(2, 3), "mask": torch.full((2,), 0.5)}
    found = verify(nn.Linear(3, 1), example, record_loss=masked)
    assert not found.safe
    assert "all zero" in found.cause


def test_without_a_gradient_to_see_users_run_one_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nothing(model: nn.Module, batch: Any) -> Tensor:
        return 0.0 * model(batch["x"])[:, 0]

    model = nn.Linear(3, 1)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        everybody_of(4, steps=1),
        UserIndex.from_owners(range(4)),
        record_loss=nothing,
    )
    with caplog.at_level("WARNING"):
        step.apply(ones(step.draw()))
    assert "one at a time" in caplog.text
    assert isinstance(step._checked.summation, PlainClipping)
    assert step.ledger.steps == 1


def test_a_loss_that_remembers_is_not_taken_for_dropout() -> None:
    seen = [0.0]

    def remembers(model: nn.Module, batch: Any) -> Tensor:
        losses = model(batch["x"])[:, 0] ** 2 * (1 + seen[0])
        if model.training:
            seen[0] = 0.5 * seen[0] + float(losses.detach().mean())
        return losses

    model = nn.Linear(3, 1).train()
    found = verify(model, {"x": torch.randn(2, 3)}, record_loss=remembers, path="plain")
    assert not found.safe
    assert "draws random numbers" not in found.cause


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_dropout_is_refused_on_both_paths(path: Any) -> None:
    # Under a seed that others know, one user's pass would change the masks of the next.
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1)).train()
    found = verify(model, {"x": torch.randn(2, 3)}, record_loss=squares_of, path=path)
    assert not found.safe
    assert "dropout" in found.cause


def squares_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"])[:, 0] ** 2


class DrawsItself(nn.Module):
    """Adds random numbers without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.randn_like(x))


def test_a_model_that_draws_at_random_is_refused_in_our_words() -> None:
    found = verify(DrawsItself(), {"x": torch.randn(2, 3)}, record_loss=squares_of, path="plain")
    assert "draws random numbers" in found.cause


def test_a_refused_finish_promises_nothing() -> None:
    step = a_step()
    step.model.register_buffer("kept", torch.zeros(1))
    step = a_step(model=step.model)
    step.apply(ones(step.draw()))
    step.model.kept += 1.0  # type: ignore[operator]
    with pytest.raises(MixedExamplesError, match="kept"):
        step.finish()
    assert not step.statement().guarantee


@pytest.mark.parametrize("value", [float("nan"), -7])
def test_odd_labels_of_one_user_do_not_end_the_run(value: float) -> None:
    model = families.build(families.SAFE["gpt2"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = everybody_of(3, steps=1)
    step = PrivateStep(model, optimizer, plan, UserIndex.from_owners(range(3)))
    groups: list[Any] = [MADE_UP.group(1, 6, seed=n) for n in range(3)]
    labels = groups[0]["labels"]
    groups[0]["labels"] = torch.full_like(labels.float() if value != value else labels, value)
    step.draw()
    step.apply(groups)
    assert step.ledger.steps == 1


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_loss_that_keeps_records_leaves_no_promise_once_it_uses_them(path: Any) -> None:
    # A memory bank that is used when it is full: a probe is over before that.
    bank: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch["x"])[:, 0] ** 2
        bank.extend(found.detach().tolist())
        del bank[:-200]
        return found * (1.0 if len(bank) < 200 else sum(bank[-8:]))

    model = nn.Linear(3, 1)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        everybody_of(8, steps=60),
        UserIndex.from_owners(range(8)),
        record_loss=loss,
        settings=StepSettings(path=path),
    )
    step.check_model({"x": torch.randn(2, 3)})
    del bank[:]
    rows = torch.randn(8, 3)
    for cohort in step.cohorts():
        step.apply({"x": rows[group]} for group in cohort)
    assert not step.statement().guarantee
    assert any("keeps something" in doubt for doubt in step.ledger.doubts)


def test_a_short_example_does_not_shorten_the_probe() -> None:
    example = {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}
    assert usual_length(nn.Linear(3, 1), example) == usual_length(nn.Linear(3, 1)) == 128


def test_a_batch_of_a_known_shape_leaves_nothing_in_the_model() -> None:
    # Rotary embeddings of type "dynamic" grow with a long user and stay so until they are put back.
    model = families.build(families.PLAIN_ONLY["llama, dynamic rotation"])
    rule = FlatClip(clip_norm=1.0)
    fast = FastClipping(
        model,
        list(model.parameters()),
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(check=False, join_records=False),
    )
    # All are longer than the 12 positions from which on the embeddings grow.
    short = [MADE_UP.group(1, 15, seed=n) for n in range(3)]
    long = [MADE_UP.group(1, 40, seed=n) for n in range(3)]

    def sum_of(groups: list[Any]) -> Tensor:
        return fast.clipped_sum(groups, rule).total.values.clone()

    # Each shape twice: from the second time on it is no new one.
    before, *_ = (sum_of(groups) for groups in (short, long, short, long))
    assert torch.equal(sum_of(short), before)
