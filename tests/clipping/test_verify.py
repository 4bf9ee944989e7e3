"""`verify` passes on models the fast path knows and names the parameter where it is wrong."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import RAGGED, cohort, compare_on, shake, trainable
from torch import Tensor, nn

import models_zoo
from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.batches.users import Users
from userdp.clipping.checks import verify as verify_module
from userdp.clipping.checks.compared_shapes import ComparedShapes
from userdp.clipping.checks.verify import FastPathError, Verification
from userdp.clipping.execute.execution import Execution
from userdp.clipping.fast import FastClipping
from userdp.clipping.gradients import layers
from userdp.clipping.gradients.forms import EmbeddingRows
from userdp.clipping.rules import FlatClip, PerLayerClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError, MixedExamplesError
from userdp.index import UserIndex
from userdp.losses import causal_lm_loss
from userdp.plan import Plan
from userdp.step import PrivateStep

ZOO = [*models_zoo.BUILDERS, *models_zoo.MORE_BUILDERS]


class HeadOutsideItsLayer(nn.Module):
    """Uses the embedding's weight without calling the layer: nothing a layer can see."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models_zoo.VOCABULARY, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.embedding(input_ids))), self.embedding.weight)


def broken_model() -> nn.Module:
    torch.manual_seed(0)
    return HeadOutsideItsLayer().double().eval()


def batch(rows: int = 6, *, masked: bool = False) -> dict[str, Tensor]:
    (group,) = cohort([[9 - row for row in range(rows)]], masked=masked)
    return group


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZOO)
def test_verify_passes_on(name: str, dtype: torch.dtype) -> None:
    model = shake(models_zoo.build(name, dtype))
    checked = compare_on(
        model,
        batch(masked=name in models_zoo.MASKED),
        group_size=2,
        record_loss=models_zoo.loss_of(name),
    )
    assert set(checked.errors) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert checked.worst[1] == max(checked.errors.values()) <= checked.tolerance


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_verify_passes_for_every_group_size_and_rule(group_size: int) -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    compare_on(model, batch(), group_size=group_size)
    compare_on(model, batch(), group_size=group_size, clip=PerLayerClip(clip_norm=0.1))


def test_verify_in_a_coarser_compute_dtype_allows_its_rounding() -> None:
    model = shake(models_zoo.build("llama tied", torch.float32))
    exact = compare_on(model, batch())
    coarse = compare_on(model, batch(), compute_dtype=torch.bfloat16)
    assert exact.worst[1] < 1e-5
    assert coarse.worst[1] <= coarse.tolerance
    assert coarse.tolerance > exact.tolerance


def test_verify_says_which_layers_have_no_rule_of_their_own() -> None:
    rules = compare_on(models_zoo.build("gemma"), batch()).rules
    assert rules["model.embed_tokens"] == "AnyLayer"
    assert rules["lm_head"] == "Product"
    assert compare_on(models_zoo.build("lstm"), batch()).rules["lstm"] == "Lstm"


def test_verify_names_a_weight_used_outside_its_layer() -> None:
    with pytest.raises(FastPathError, match=r"'embedding\.weight'.*path=\"plain\""):
        compare_on(broken_model(), batch())


def test_verify_names_a_parameter_that_a_rule_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = layers.Product.forms

    def without_bias(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> Any:
        return forms(module, {n: t for n, t in handed.items() if n != "bias"}, inputs)

    monkeypatch.setattr(layers.Product, "forms", staticmethod(without_bias))
    with pytest.raises(FastPathError, match=r"'head\.bias'"):
        # An infinite clip norm: the missing part changes no other parameter's sum.
        compare_on(models_zoo.build("lstm"), batch(), clip=FlatClip(clip_norm=float("inf")))


def test_verify_notices_users_taken_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = layers.Embedding.forms

    def swapped(module: Any, handed: dict[str, Tensor], inputs: Tensor | None) -> Any:
        rows = forms(module, handed, inputs)["weight"]
        assert isinstance(rows, EmbeddingRows)
        return {
            "weight": EmbeddingRows(
                ids_UL=rows.ids_UL.roll(1, 0), gradients_ULD=rows.gradients_ULD.roll(1, 0)
            )
        }

    monkeypatch.setattr(layers.Embedding, "forms", staticmethod(swapped))
    with pytest.raises(FastPathError, match="differs from the plain loop"):
        compare_on(models_zoo.build("lstm"), batch())


@pytest.mark.parametrize("name", ["gpt2 tied", "llama tied + lora"])
def test_a_fault_is_found_in_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounding is judged by a float32 reference: a fault of a third is more than rounding.
    model = shake(models_zoo.build(name, torch.bfloat16))
    compare_on(model, batch())
    sums = layers.per_user
    monkeypatch.setattr(layers, "per_user", lambda tensor, users: 1.15 * sums(tensor, users))
    with pytest.raises(FastPathError, match="differs from the plain loop"):
        compare_on(model, batch())


def test_what_both_paths_round_alike_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a deep model the plain loop itself is a tenth off in bfloat16: so may the fast path be.
    model = shake(models_zoo.build("llama", torch.bfloat16))
    exact = verify_module.wide_gradient

    def far_off(*given: Any, **options: Any) -> Any:
        return [1.12 * gradient for gradient in exact(*given, **options)]

    monkeypatch.setattr(verify_module, "wide_gradient", far_off)
    monkeypatch.setattr(verify_module, "_CLOSE", 0.0)
    found = compare_on(model, batch(), clip=FlatClip(clip_norm=math.inf))
    assert found.worst[1] > 0.1


@pytest.mark.parametrize("off", [1.0, 1.05])
def test_the_float32_reference_is_asked_unless_the_paths_are_close(
    off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closer than `_CLOSE`, the reference could not refuse the fast path.
    model = shake(models_zoo.build("llama", torch.bfloat16))
    exact, asked = verify_module.wide_gradient, []

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(1)
        return exact(*given, **options)

    sums = layers.per_user
    monkeypatch.setattr(layers, "per_user", lambda tensor, users: off * sums(tensor, users))
    monkeypatch.setattr(verify_module, "wide_gradient", noted)
    with contextlib.suppress(FastPathError):
        compare_on(model, batch(), clip=FlatClip(clip_norm=math.inf))
    assert bool(asked) == (off > 1)


def test_what_is_close_to_the_plain_loop_is_close_enough_to_float32() -> None:
    # The worst case of `_CLOSE`: the plain loop is as far off as is still trusted.
    furthest = verify_module._CLOSE * (1 + verify_module._FAR)
    assert furthest <= verify_module._LITTLE


def test_an_error_that_is_no_number_is_the_worst() -> None:
    for errors in ({"a": 1e-9, "b": math.nan, "c": 5.0}, {"b": math.nan, "a": 1e-9}):
        found = Verification(errors=errors, tolerance=10.0, rules={})
        assert found.worst[0] == "b"
        with pytest.raises(FastPathError, match="'b'"):
            found.raise_if_different()


def test_verify_refuses_a_model_whose_gradients_are_not_finite() -> None:
    model: Any = models_zoo.build("gpt2 tied")
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(InputError, match="no user's gradient is finite"):
        compare_on(model, batch())


def test_verify_refuses_fewer_than_two_users() -> None:
    with pytest.raises(ValueError, match="at least two"):
        compare_on(models_zoo.build("gpt2 tied"), batch(3), group_size=3)


def test_verify_refuses_rows_that_are_no_whole_number_of_users() -> None:
    with pytest.raises(ValueError, match=r"5 rows.*2 rows"):
        compare_on(models_zoo.build("gpt2 tied"), batch(5), group_size=2)


def test_verify_refuses_a_model_without_trainable_parameters() -> None:
    model = models_zoo.build("gpt2 tied").requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        compare_on(model, batch())


# ---- the check that training does by itself


def fast(model: nn.Module, **settings: Any) -> FastClipping:
    return FastClipping(
        model,
        trainable(model),
        FlatClip(clip_norm=1.0),
        record_loss=causal_lm_loss,
        settings=StepSettings(**settings),
    )


def test_first_batch_is_checked_and_the_error_says_what_to_do() -> None:
    with pytest.raises(FastPathError, match=r"'embedding\.weight'.*Use path=\"plain\""):
        fast(broken_model()).clipped_sum(cohort(RAGGED), FlatClip(clip_norm=1.0))


def test_check_can_be_left_out() -> None:
    fast(broken_model(), check=False).clipped_sum(cohort(RAGGED), FlatClip(clip_norm=1.0))


def test_fault_that_shows_only_at_another_shape_is_caught_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = layers.per_user

    def wrong_when_long(tensor: Tensor, users: int) -> Tensor:
        split = sums(tensor, users)
        return split * 2 if split.shape[1] > 20 else split

    monkeypatch.setattr(layers, "per_user", wrong_when_long)
    model = shake(models_zoo.build("gpt2 tied"))
    clipping = fast(model)
    rule = FlatClip(clip_norm=1.0)
    clipping.clipped_sum(cohort([[5], [5], [5]]), rule)
    with pytest.raises(FastPathError):
        clipping.clipped_sum(cohort([[25], [25], [25]]), rule)


@pytest.mark.parametrize(
    ("compiled", "proven", "falling", "expected"),
    [
        (False, True, True, [11, 10, 8, 4]),
        # A longer batch than all before is always compared.
        (False, True, False, list(range(1, 12))),
        (False, False, True, list(range(11, 0, -1))),
        (True, True, False, list(range(1, 12))),
    ],
)
def test_shapes_are_checked_ever_more_rarely_in_proven_models_that_are_not_compiled(
    compiled: bool,
    proven: bool,
    falling: bool,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ragged cohorts have a new shape at every step: a check of each would cost more than it.
    checked: list[int] = []
    lengths = sorted(range(3, 14), reverse=falling)
    model = shake(models_zoo.build("lstm"))
    clipping = fast(model)
    monkeypatch.setattr(clipping, "_compile", compiled)
    shapes = ComparedShapes(every_shape=not proven, compiles=compiled)
    monkeypatch.setattr(clipping, "_compared", shapes)
    monkeypatch.setattr(clipping, "_execution", lambda _: Execution(record_loss=causal_lm_loss))
    compare = clipping._compare

    def noted(step: Any, users: Users) -> None:
        checked.append(users.batch["input_ids"].shape[1] - 2)
        compare(step, users)

    monkeypatch.setattr(clipping, "_compare", noted)
    for _ in range(2):
        for length in lengths:
            clipping.clipped_sum(cohort([[length], [length]]), FlatClip(clip_norm=1.0))
    assert checked == expected


@pytest.mark.parametrize(("dtype", "tries"), [(torch.bfloat16, 3), (torch.float32, 1)])
@pytest.mark.parametrize("halved", [1, 2, 3])
def test_users_scaled_by_a_power_of_two_at_one_clip_norm_are_compared_at_another(
    halved: int, dtype: torch.dtype, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In half precision a few users may be; a fault is one at every clip norm.
    clipping = fast(shake(models_zoo.build("gpt2 tied", dtype)))
    tried: list[float] = []

    def differs(self: Verification) -> None:
        tried.append(float(clipping._clip_norm))
        if len(tried) <= halved:
            raise FastPathError("halved")

    monkeypatch.setattr(Verification, "raise_if_different", differs)
    rule = FlatClip(clip_norm=0.5)
    if halved >= tries:
        with pytest.raises(FastPathError, match="halved"):
            clipping.clipped_sum(cohort([[5], [5]]), rule)
    else:
        clipping.clipped_sum(cohort([[5], [5]]), rule)
        assert float(clipping._clip_norm) == 0.5
    assert len(set(tried)) == len(tried) == min(halved + 1, tries)


def test_check_leaves_no_trace_in_the_sum_or_the_count() -> None:
    model = shake(models_zoo.build("gpt2 tied"))
    rule = FlatClip(clip_norm=0.5)
    groups = cohort(RAGGED)
    checked, unchecked = fast(model), fast(model, check=False)
    a, b = checked.clipped_sum(groups, rule), unchecked.clipped_sum(groups, rule)
    for ours, theirs in zip(a.total.views, b.total.views, strict=True):
        assert torch.equal(ours, theirs)
    assert int(a.num_within) == int(b.num_within)


def test_step_of_a_model_the_fast_path_gets_wrong_is_not_taken() -> None:
    model = broken_model()
    before = [p.detach().clone() for p in model.parameters()]
    plan = Plan.sample_users(
        num_users=4,
        expected_cohort_size=4,
        group_size=2,
        steps=1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    for clipping, steps in (("fast", 0), ("plain", 1)):
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan,
            UserIndex.from_owners([0, 0, 1, 1, 2, 2, 3, 3]),
            settings=StepSettings(path=clipping),  # type: ignore[arg-type]
        )
        rows = batch(8)
        groups = [{n: t[list(g)] for n, t in rows.items()} for g in step.draw()]
        if clipping == "fast":
            with pytest.raises(MixedExamplesError, match=r"all uses of 'embedding\.weight'"):
                step.apply(groups)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        else:
            step.apply(groups)
        assert step.ledger.steps == steps


def test_newly_compiled_code_is_compared_and_smaller_batches_that_it_runs_are_not() -> None:
    compared = ComparedShapes(every_shape=False, compiles=True)
    sizes = Sizes(max_tokens=2048)
    told: list[bool] = []
    # 20 users of one record each, then fewer; then users of a larger kind.
    for lengths in ([[15]] * 20, [[15]] * 9, [[15]] * 5, [[15]] * 3, [[15] * 40, [15]]):
        (users,) = pack_ragged(cohort(lengths), sizes)
        told.append(compared.compare_next(users, users.shape))
    # The first, the second and the fourth shape are compared anyway; the third has nothing new.
    assert told == [True, True, False, True, True]
    equal = ComparedShapes(every_shape=False, compiles=True)
    groups = (cohort([[15]] * number) for number in (6, 5, 4, 3, 2))
    batches = [
        users for group in groups for users in pack_equal(group, max_tokens=512, ladder=False)
    ]
    assert all(equal.compare_next(users, users.shape) for users in batches)
