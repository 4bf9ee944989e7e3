"""The CUDA path against the CPU path: same sum, fresh noise of the stated size, same ledger."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

import models_zoo
from userdp.clipping.batches.equal import pack_equal
from userdp.clipping.batches.ragged import Sizes, pack_ragged
from userdp.clipping.execute import chunked_head
from userdp.clipping.execute.execution import Execution
from userdp.clipping.factors import clip_factors
from userdp.clipping.fast import FastClipping
from userdp.clipping.flat import ClippedSum, FlatBuffer
from userdp.clipping.gradients import chunk_choice, many_users, probes
from userdp.clipping.kernels import reference
from userdp.clipping.kernels.running import same_every_time
from userdp.clipping.kernels.user_sums import user_sums
from userdp.clipping.plain import PlainClipping
from userdp.clipping.rules import ClipRule, FlatClip, PerVectorClip
from userdp.clipping.settings import StepSettings
from userdp.errors import InputError
from userdp.files.remembered import SUMS
from userdp.index import UserIndex
from userdp.losses import causal_lm_loss
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.noise import Banded, Gaussian, Noise
from userdp.noise.draw import add_normal_
from userdp.plan import Plan
from userdp.runs.checkpoints import Saving, checkpoints_of
from userdp.runs.record import RunRecord
from userdp.runs.state import Checkpoint, restore
from userdp.step import PrivateStep
from userdp.streams import RunSecret

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _noise(step: int, size: int = 1_000_000) -> torch.Tensor:
    noise = torch.zeros(size, device="cuda")
    streams = RunSecret.fixed_for_tests(7).streams("noise")
    add_normal_(noise, offset=0, size=size, stddev=2.0, step=step, streams=streams)
    return noise.cpu()


def test_cuda_noise_is_gaussian_of_the_stated_size() -> None:
    # Fixed seed 7; a correct generator fails this p < 0.001 for one seed in a thousand.
    sample = _noise(0).numpy() / 2.0
    assert kstest(sample[:100_000], "norm").pvalue > 0.001
    assert abs(sample.std() - 1) < 0.005


@pytest.mark.parametrize("strategy", ["optimised", "inverse-square-root", "buffered"])
def test_cuda_correlated_noise_is_the_inverse_of_its_strategy_times_what_is_drawn(
    strategy: Any,
) -> None:
    size, steps = 5_000, 12
    noise = Banded(noise_multiplier=1.0, bands=4, steps=steps, strategy=strategy)
    streams = RunSecret.fixed_for_tests(7).streams("noise")

    def through(part: Noise, first: int, last: int) -> torch.Tensor:
        started, found = part.started(), torch.zeros(steps, last - first, device="cuda")
        for step in range(steps):
            started.add_(
                found[step], offset=first, size=size, noise_stddev=2.0, step=step, streams=streams
            )
        return found

    whole, drawn = through(noise, 0, size), through(Gaussian(noise_multiplier=1.0), 0, size)
    expected = torch.from_numpy(noise.mixing(steps)) @ drawn.double().cpu()
    torch.testing.assert_close(whole.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(through(noise, 1_234, 4_321), whole[:, 1_234:4_321])


def test_cuda_noise_repeats_for_a_step_and_differs_between_steps() -> None:
    assert torch.equal(_noise(3), _noise(3))
    correlation = np.corrcoef(_noise(3).numpy(), _noise(4).numpy())[0, 1]
    # Standard error 0.001 at a million draws: 4 of them, failure probability 6e-5.
    assert abs(correlation) < 0.004


def test_cuda_noise_drawn_in_pieces_shares_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("userdp.noise.draw.PIECE", 250_000)
    sample = _noise(5).numpy() / 2.0
    assert kstest(sample[:100_000], "norm").pvalue > 0.001
    # Six pairs of pieces; standard error 0.002: five of them, failure probability 3e-6 in all. One
    # seed in a thousand fails the test above.
    correlations = np.corrcoef(sample.reshape(4, -1)) - np.eye(4)
    assert np.abs(correlations).max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_noise_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    owners = [user for user in range(12) for _ in range(3)]
    torch.manual_seed(0)
    inputs = torch.randn(len(owners), 8)
    weights: dict[str, torch.Tensor] = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device, dtype)
        plan = Plan.sample_users(
            num_users=12,
            expected_cohort_size=6,
            group_size=2,
            steps=5,
            clip_norm=0.1,
            noise_multiplier=0.0,
            delta=1e-2,
            non_private=True,
        )
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            plan,
            UserIndex.from_owners(owners),
            record_loss=lambda model, batch: model(batch["x"])[:, 0].float() ** 2,
            secret=RunSecret.fixed_for_tests(1),
        )
        for cohort in step.cohorts():
            step.apply({"x": inputs[rows].to(device, dtype)} for rows in cohort)
        weights[device] = torch.cat(
            [p.detach().float().flatten().cpu() for p in model.parameters()]
        )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(weights["cpu"], weights["cuda"], atol=tolerance)


def _model(name: str) -> nn.Module:
    """Wide enough for rounding to average out as in a real model; vocabulary of unaligned width."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_embd=256, n_head=4, vocab_size=5003, n_positions=128
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=2,
                hidden_size=256,
                intermediate_size=640,
                num_attention_heads=8,
                num_key_value_heads=2,
                vocab_size=5003,
                max_position_embeddings=128,
                tie_word_embeddings=name == "llama tied",
            )
        )
    return model.cuda().eval()


def flat(found: ClippedSum) -> torch.Tensor:
    """A copy of the sum over all parameters, without the room between them."""
    return torch.cat([view.flatten() for view in found.total.views])


def _ragged_groups(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Users of 1 to 3 rows, one without a record, and one larger than a batch."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 20), (3, 100), (0, 5), (2, 128), (1, 64), (3, 31), (1, 128), (40, 128)]
    groups: list[dict[str, torch.Tensor]] = []
    for rows, length in sizes:
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        groups.append({"input_ids": ids, "labels": ids})
    return groups


def _exact_and_coarse(
    model: nn.Module, groups: list[dict[str, torch.Tensor]], rule: FlatClip
) -> tuple[torch.Tensor, float]:
    """The plain loop's sum in float32, and how far from it that loop is in bfloat16."""
    parameters = list(model.parameters())
    exact, coarse = (
        flat(
            PlainClipping(
                model, parameters, record_loss=causal_lm_loss, compute_dtype=dtype
            ).clipped_sum(groups, rule)
        )
        for dtype in (None, torch.bfloat16)
    )
    return exact, float((coarse - exact).norm())


@pytest.mark.parametrize("option", [None, "checkpoint_blocks", "join_records", "chunk_logits"])
def test_captured_cohort_sums_are_as_close_to_float32_as_the_plain_loop_in_bfloat16(
    option: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several pieces, also for short users.
    monkeypatch.setattr(chunked_head, "CUDA_LOGITS_AT_ONCE", 2**20)
    monkeypatch.setattr(chunk_choice, "pair_is_cheaper", lambda *sizes: False)
    model = _model("gpt2")
    parameters = list(model.parameters())
    groups = _ragged_groups(5003)
    rule = FlatClip(clip_norm=0.5)
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(
            microbatch_tokens=2048,
            compute_dtype=torch.bfloat16,
            checkpoint_blocks=option == "checkpoint_blocks",
            join_records=option == "join_records",
            chunk_logits=option == "chunk_logits",
        ),
    )
    # The second sum replays what the first captured; the third has another clip norm.
    for clip_norm in (0.5, 0.5, 0.1):
        rule = FlatClip(clip_norm=clip_norm)
        expected, allowed = _exact_and_coarse(model, groups, rule)
        # What is neither set nor cleared is seen.
        fast._total.values.fill_(torch.nan)
        found = fast.clipped_sum(groups, rule)
        error = float((flat(found) - expected).norm())
        assert error <= 1.1 * allowed, (clip_norm, error / float(expected.norm()), allowed)
        # One of the groups has no record.
        assert found.num_updates == len(groups) - 1


@pytest.mark.parametrize(
    "rule",
    [
        FlatClip(clip_norm=0.02),
        # Norms of their own are filled in on the device: a captured step sends nothing there.
        PerVectorClip(norms=(0.02, 0.01, 0.03), groups=("embedding.*", "*_gate.*", "*")),
    ],
    ids=lambda rule: rule.name,
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_captured_sums_of_the_word_lstm_are_those_of_the_plain_loop(
    dtype: torch.dtype | None, rule: ClipRule
) -> None:
    torch.manual_seed(0)
    config = WordLSTMConfig(vocab_size=2003, embedding_size=32, state_size=64)
    model: Any = WordLSTM(config)
    model.cuda().eval()
    groups = _ragged_groups(2003)
    parameters = list(model.parameters())
    plain = PlainClipping(model, parameters, record_loss=causal_lm_loss)
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(compute_dtype=dtype),
        sequence_length=128,
    )
    expected = flat(plain.clipped_sum(groups, rule))
    for _ in range(2):
        found = flat(fast.clipped_sum(groups, rule))
        assert not fast.differs
        # What is around the model, such as the loss, is in bfloat16 where that is asked for.
        assert float((found - expected).norm()) <= (1e-4 if dtype is None else 0.05) * float(
            expected.norm()
        )


def test_captured_steps_serve_cohorts_of_one_batch_and_of_several() -> None:
    # Cohorts of one batch, of four of the same shape, of three and another, and of one again.
    model = _model("gpt2")
    parameters = list(model.parameters())
    rule = FlatClip(clip_norm=0.5)
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(microbatch_tokens=1024, compute_dtype=torch.bfloat16),
    )
    for users in (8, 32, 26, 8):
        groups = _equal_groups(1, 128, users, seed=users)
        expected, allowed = _exact_and_coarse(model, groups, rule)
        fast._total.values.fill_(torch.nan)
        error = float((flat(fast.clipped_sum(groups, rule)) - expected).norm())
        assert error <= 1.1 * allowed, (users, error / float(expected.norm()), allowed)


def _equal_groups(
    group_size: int, length: int, users: int, seed: int = 1
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (users, group_size, length)
    ids = torch.randint(0, 5003, shape, generator=generator)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama tied"])
def test_bfloat16_error_is_no_larger_than_the_plain_loops(
    name: str, length: int, group_size: int
) -> None:
    # Short users go by Gram pairs, long ones by stored gradients; both compiled and captured.
    model = _model(name)
    parameters = list(model.parameters())
    groups = _equal_groups(group_size, length, users=16)
    unclipped, _ = _exact_and_coarse(model, groups[:1], FlatClip(clip_norm=float("inf")))
    # Most of the users are clipped.
    rule = FlatClip(clip_norm=0.9 * float(unclipped.norm()))
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(compute_dtype=torch.bfloat16),
    )
    expected, allowed = _exact_and_coarse(model, groups, rule)
    for _ in range(2):
        # One batch, which sets the sum.
        fast._total.values.fill_(torch.nan)
        error = float((flat(fast.clipped_sum(groups, rule)) - expected).norm())
        assert error <= 1.1 * allowed, (error / float(expected.norm()), allowed)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("length", [8, 128, "128 stored"])
@pytest.mark.parametrize("name", ["gpt2", "llama tied"])
def test_no_user_adds_more_than_the_clip_norm_on_cuda(
    name: str, length: int | str, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Factors of all users but one set to zero, where the fast path has just computed them.
    stored = isinstance(length, str)
    if isinstance(length, str):
        length = 128
        monkeypatch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
        monkeypatch.setattr(probes.Probes, "_prefers_pair", lambda self, layer: False)
    model = _model(name)
    parameters = list(model.parameters())
    rule = FlatClip(clip_norm=0.3)
    if mixed:
        # Users of one to three rows; the last of the batch's rows are nobody's.
        groups = [_equal_groups(1 + user % 3, length, 1, seed=user)[0] for user in range(29)]
        (users,) = pack_ragged(groups, Sizes(max_tokens=64 * length))
    else:
        groups = _equal_groups(1, length, users=59)
        (users,) = pack_equal(groups, max_tokens=64 * 128, ladder=True)
    assert users.count >= 64
    users = users.with_tensors([tensor.cuda() for tensor in users.tensors])
    execution = Execution(record_loss=causal_lm_loss, compute_dtype=torch.bfloat16)
    fast = many_users.ManyUsers(model, parameters, rule, users, execution=execution)
    if stored and _has_products_with_squares():
        assert any("squares" in tape.probes for tape in fast._probes.tapes.values())
    chosen = 0

    def alone(squared: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        factors = clip_factors(squared, *args, **options)  # type: ignore[arg-type]
        return torch.where(
            torch.arange(squared.shape[1], device=squared.device) == chosen, factors, 0.0
        )

    monkeypatch.setattr(many_users, "clip_factors", alone)
    for chosen in range(users.count):
        total = FlatBuffer(parameters)
        fast(users, total.views)
        norm = float(total.values.double().norm())
        if chosen < len(groups):
            assert 0.99 * 0.3 <= norm <= 0.3 * (1 + 1e-5)
        else:
            assert norm == 0.0


def test_gradients_of_users_of_unlike_size_are_formed_in_grouped_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Users of 5 to 8 rows of 128 tokens: stored, by user, for every weight; captured.
    monkeypatch.setattr(probes, "MOST_VALUES_BY_ROW", 0)
    model = _model("gpt2")
    parameters = list(model.parameters())
    groups = [_equal_groups(5 + user % 4, 128, 1, seed=user)[0] for user in range(9)]
    rule = FlatClip(clip_norm=0.2)
    expected, allowed = _exact_and_coarse(model, groups, rule)
    fast = FastClipping(
        model,
        parameters,
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(microbatch_tokens=8192, compute_dtype=torch.bfloat16),
    )
    for _ in range(2):
        error = float((flat(fast.clipped_sum(groups, rule)) - expected).norm())
        assert error <= 1.1 * allowed, (error / float(expected.norm()), allowed)


@pytest.mark.parametrize("length", [17, 128, 300])
def test_gram_kernels_match_exact_norms_from_above(length: int) -> None:
    from userdp.clipping.kernels.gram import GramTable

    torch.manual_seed(0)
    make = lambda width: torch.randn(3, length, width, device="cuda").bfloat16()  # noqa: E731
    x, ys, narrow = make(96), [make(200), make(64)], make(48)
    entries = [(x, ys), (ys[0], [narrow])]
    table = GramTable(entries, [True, False])

    def exact(x: torch.Tensor, ys: list[torch.Tensor]) -> torch.Tensor:
        products = [torch.einsum("uli,ulo->uoi", x.double(), y.double()) for y in ys]
        return sum(product.square().sum((1, 2)) for product in products)  # type: ignore[return-value]

    found, _ = (values.double() for values in table.squared_norms(entries))
    expected = torch.stack([exact(x, ys), exact(ys[0], [narrow])])
    assert (found >= expected).all()
    assert (found <= expected * 1.001).all()
    factors = torch.tensor([[0.3, 0.0, 1.7]], device="cuda")
    (scaled_x, scaled_y), moved = table.scaled(entries, [0, 0], factors)
    for scaled, side in ((scaled_x, x), (scaled_y, narrow)):
        assert torch.equal(scaled, reference.scaled(side, factors[0]))
    errors = [reference.rounding_errors(side, factors[0]) for side in (x, narrow)]
    whole = torch.stack([exact(errors[0], ys), exact(ys[0], [errors[1]])]).sqrt()
    # Tiles of a user are taken to have moved the same way: up to the root of their number.
    assert (moved.double() >= whole).all()
    # The second user is silent.
    assert (moved.double() <= whole * 1.15 * (-(-length // 128)) ** 0.5 + 1e-9).all()


def _has_products_with_squares() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("programs", [None, 1, 7])
@pytest.mark.parametrize(
    ("ends", "depth"),
    [
        (None, 64),
        (None, 32),
        ([0, 64, 64, 960, 3520, 3584, 3584], 64),
        ([0, 32, 64, 992, 3520, 3584, 3584, 3584, 3584, 3584], 32),
    ],
)
@pytest.mark.parametrize("shape", [(128, 128), (136, 384), (1000, 264), (2304, 768)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_the_librarys_and_their_squares_those_of_their_values(
    dtype: torch.dtype,
    shape: tuple[int, int],
    ends: list[int] | None,
    depth: int,
    programs: int | None,
) -> None:
    from userdp.clipping.kernels.products import can_square

    if not _has_products_with_squares():
        pytest.skip("the kernel is for GPUs of the Hopper kind")
    assert can_square(768, 3072, tokens=depth, dtype=dtype, device=torch.device("cuda", 0))
    from userdp.clipping.kernels.hopper import products_with_squares

    torch.manual_seed(0)
    users = 8 if ends is None else len(ends)
    a, b = (torch.randn(3584, width, device="cuda").to(dtype) for width in shape)
    # Large values beside small ones, and a user that is not finite.
    b[64:128] *= 100
    a[-64:, 3] = torch.inf
    places = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    used = torch.ones(users, dtype=torch.bool, device="cuda")
    if places is not None:
        used = places.diff(prepend=places.new_zeros(1)) > 0
    finite = used.clone()
    finite[used.nonzero()[-1]] = False
    lasts = ends or range(448, 3585, 448)
    each = [a[i:j].t() @ b[i:j] for i, j in itertools.pairwise([0, *lasts])]
    wanted = torch.stack(each)[finite].double()
    for _ in range(3):
        found, squares = products_with_squares(a, b, users, places, depth=depth, programs=programs)
        assert not squares[:, ~used].any()
        assert not torch.isfinite(squares.sum(0))[used & ~finite].any()
        own = found[finite].double()
        difference = (own - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert (difference <= 1e-3).all()
        norms = own.square().sum((1, 2))
        # From above, by less than clipping aims below the bound.
        above = squares.double().sum(0)[finite] / norms - 1
        assert (above >= 0).all()
        assert (above <= 8e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_users_tokens_are_exact_and_leave_out_what_is_nobodys(dtype: torch.dtype) -> None:
    # Seed 0. The tokens behind the last user's are not finite, and no user's sum shows it.
    generator = torch.Generator().manual_seed(0)
    counts = [480, 0, 2_048, 32, 1_056, 0]
    values, others = torch.randn(2, sum(counts) + 64, 776, generator=generator).to(dtype)
    values[-64:] = float("nan")
    ends = torch.tensor(counts).cumsum(0).int().cuda()
    found = user_sums(values.cuda(), others.cuda(), ends)
    for whole, sums in zip(
        (values.double(), values.double() * others.double()), found, strict=True
    ):
        exact = torch.stack([part.sum(0) for part in whole[:-64].split(counts)])
        torch.testing.assert_close(sums.double().cpu(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_in_attention_a_user_that_is_not_finite_reaches_nobody(value: float, width: int) -> None:
    from userdp.clipping.batches.joined_records import ROW
    from userdp.clipping.kernels import record_attention

    # Five users of one record each, of 3, 2, 1, 1 and 4 rows; tiles hold tokens of two of them.
    row, rows = ROW["cuda"], [3, 2, 1, 1, 4]
    position = torch.cat([torch.arange(count * row) for count in rows]).int().cuda()
    left = torch.cat([torch.arange(count * row - 1, -1, -1) for count in rows]).int().cuda()
    torch.manual_seed(0)
    shape = (sum(rows), 2, row, width)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    d_out = torch.randn(shape, device="cuda").bfloat16().transpose(1, 2).contiguous()

    def run() -> list[torch.Tensor]:
        out, sums = record_attention.forward(q, k, v, position, 0.1)
        given = (d_out, q, k, v, position, left, out, sums, 0.1)
        return [out, *record_attention.backward(*given)]

    before = run()
    own = slice(3, 5)
    for tensor in (q, k, v, d_out):
        tensor[own] = value
    others = torch.ones(sum(rows), dtype=torch.bool)
    others[own] = False
    for old, new in zip(before, run(), strict=True):
        assert torch.equal(old[others], new[others])
        assert not new[own].isfinite().all()


def test_gram_norms_of_long_sums_of_like_terms_are_not_read_too_small() -> None:
    # Tensor cores cut digits off: what that loses grows with the number of columns.
    from userdp.clipping.kernels.gram import GramTable

    for value in (1.0078125, 1.4140625, 1.9921875):
        x = torch.full((2, 128, 64), value, device="cuda").bfloat16()
        y = torch.full((2, 128, 50_304), value, device="cuda").bfloat16()
        found, _ = GramTable([(x, [y])], [True]).squared_norms([(x, [y])])
        exact = 64 * 50_304 * (128 * value**2) ** 2
        assert bool((found.double() >= exact).all())
        assert bool((found.double() <= exact * 1.001).all())


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("length", [17, 128, 300])
def test_inner_products_of_tied_weights_are_the_exact_ones_from_above(
    length: int, runs: bool
) -> None:
    from userdp.clipping.kernels import inner

    torch.manual_seed(0)
    starts = torch.tensor([0, 3, 4, 4, 6] if runs else range(7), dtype=torch.int32, device="cuda")
    ids = torch.randint(0, 500, (6, length), device="cuda")
    e, x = torch.randn(2, 6, length, 96, device="cuda")
    x, y = x.bfloat16(), torch.randn(6, length, 512, device="cuda").bfloat16()
    where, most_rows = (starts, 3) if runs else (None, 1)
    found = inner.inner_with_pair(ids, e, x, y, where, most_rows=most_rows)
    for user in range(len(starts) - 1):
        own = slice(*starts[user : user + 2].tolist())
        tokens, e_T, x_T, y_T = (t[own].flatten(0, 1) for t in (ids, e, x, y))
        picked = y_T.double()[:, tokens]
        exact = (picked * (x_T.double() @ e_T.double().T)).sum()
        sizes = x_T.double().norm(dim=1)[:, None] * e_T.double().norm(dim=1)
        above = float(found[user].double() - exact)
        assert 0 <= above <= 2.0**-14 * float((picked.abs() * sizes).sum())


def _resumable(
    path: Path,
    *,
    stop_after: int | None,
    resume: bool,
    secret: RunSecret | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """A run on ragged users in captured bfloat16 steps, saved after four steps; its weights.

    `secret` None is one of the run's own; `seed` decides the users' records.
    """
    torch.manual_seed(0)
    model = models_zoo.gpt2(vocabulary=512, width=64, positions=128).cuda().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = Plan.sample_users(
        num_users=60,
        expected_cohort_size=12,
        group_size=4,
        steps=8,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=1e-2,
    )
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(60), rng.integers(1, 7, 60))
    lengths = rng.integers(8, 96, len(owners))
    of_seed = np.random.default_rng(seed)
    tokens = torch.from_numpy(of_seed.integers(0, 512, (len(owners), 96)))
    settings = StepSettings(compute_dtype=torch.bfloat16)
    saving = Saving(every_steps=4)
    moment = checkpoints_of(path).newest() if resume else None
    if resume:
        record = RunRecord.resume(
            plan,
            model,
            optimizer,
            path=path,
            moment=moment,
            bound_to={},
            secret=secret,
            saving=saving,
        )
    else:
        record = RunRecord.create(
            plan, model, optimizer, settings=settings, path=path, secret=secret, saving=saving
        )
    with record.closing():
        step = PrivateStep(
            model,
            optimizer,
            plan,
            UserIndex.from_owners(owners),
            settings=settings,
            sequence_length=96,
            record=record,
        )
        example = {"input_ids": tokens[:1], "labels": tokens[:1]}
        if moment is not None:
            restore(moment, model, optimizer, None, step, example)
        step.check_model(example)
        checkpoint = Checkpoint(record, model, optimizer, None, step, 0)
        for cohort in step.cohorts():
            groups = []
            for rows in cohort:
                longest = int(lengths[rows].max())
                ids = tokens[rows, :longest]
                kept = torch.arange(longest)[None] < torch.from_numpy(lengths[rows])[:, None]
                groups.append({"input_ids": ids, "labels": ids.masked_fill(~kept, -100)})
            step.apply(groups)
            if checkpoint.is_due:
                checkpoint.begin_saving()
            if record.steps == stop_after:
                if checkpoint.is_due:
                    checkpoint.begin_saving()
                assert record.checkpoints is not None
                record.checkpoints.wait()
                break
    return [p.detach().cpu() for p in model.parameters()]


def test_a_stopped_run_goes_on_bit_for_bit_on_cuda(tmp_path: Path) -> None:
    secret = RunSecret.fixed_for_tests(1)
    with same_every_time(True):
        whole = _resumable(tmp_path / "whole", stop_after=None, resume=False, secret=secret)
        _resumable(tmp_path / "stopped", stop_after=6, resume=False, secret=secret)
        found = _resumable(tmp_path / "stopped", stop_after=None, resume=True, secret=secret)
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "stopped")]
    assert ledgers[0] == ledgers[1]


def test_steps_taken_again_are_known_by_their_sums_on_cuda(tmp_path: Path) -> None:
    # Kernels may add in another order each time; the sums are close enough to be the same.
    _resumable(tmp_path, stop_after=6, resume=False)
    before = (tmp_path / SUMS).read_text().splitlines()
    assert [json.loads(row)["step"] for row in before] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="its sum is not the one that it had"):
        _resumable(tmp_path, stop_after=None, resume=True, seed=1)
    _resumable(tmp_path, stop_after=None, resume=True)


def test_out_of_memory_halves_the_batches_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = models_zoo.gpt2(vocabulary=512, width=64, positions=128).cuda().eval()
    groups = [models_zoo.ragged_batch([64, 60], seed=number) for number in range(24)]
    rule = FlatClip(clip_norm=0.5)
    fast = FastClipping(
        model,
        list(model.parameters()),
        rule,
        record_loss=causal_lm_loss,
        settings=StepSettings(compute_dtype=torch.bfloat16, microbatch_tokens=2048),
        sequence_length=64,
    )
    expected = [view.clone() for view in fast.clipped_sum(groups, rule).total.views]
    add = fast._add_users

    def limited(users: Any, make: Any) -> None:
        if users.batch["input_ids"].numel() > 1024:
            raise torch.OutOfMemoryError("out of memory")
        add(users, make)

    monkeypatch.setattr(fast, "_add_users", limited)
    found = fast.clipped_sum(groups, rule).total.views
    size = sum(float(e.square().sum()) for e in expected) ** 0.5
    gap = sum(float((e - f).square().sum()) for e, f in zip(expected, found, strict=True)) ** 0.5
    assert gap < 1e-2 * size
    assert fast.state_dict()["packing"]["max_tokens"] <= 1024
