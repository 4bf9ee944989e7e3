"""Attacks through the model: padding, memory, company, values that no model can read."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import families
import tiny
from cli_runner import userdp as run_cli
from userdp import FlatClip, Plan, PrivateStep, StepSettings, UserIndex, train, verify
from userdp.clipping.checks.made_up import MadeUp
from userdp.clipping.checks.verify import FastPathError
from userdp.clipping.fast import FastClipping
from userdp.clipping.plain import PlainClipping
from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.errors import InputError, MixedExamplesError
from userdp.losses import causal_lm_loss
from userdp.models.proven import is_proven
from userdp.streams import RunSecret

MADE_UP = MadeUp.tokens(families.VOCABULARY)
SMALL = [MADE_UP.group(1, 10, seed=i) for i in range(30)]
LONG = MADE_UP.group(1, 14, seed=99)
RULE = FlatClip(clip_norm=0.05)


def clipping(model: nn.Module, kind: str, **settings: Any) -> FastClipping | PlainClipping:
    parameters = list(model.parameters())
    if kind == "plain":
        return PlainClipping(model, parameters, record_loss=causal_lm_loss)
    return FastClipping(
        model,
        parameters,
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(join_records=False, **settings),
    )


def everybody(users: int, *, group_size: int = 1, steps: int = 2) -> Plan:
    """All users at every step."""
    return Plan.sample_users(
        num_users=users,
        expected_cohort_size=users,
        group_size=group_size,
        steps=steps,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-3,
    )


def movement(
    make: Callable[[], nn.Module],
    kind: str,
    extra: dict[str, Tensor],
    others: list[dict[str, Tensor]] = SMALL,
) -> float:
    """How far one more user moves the sum, in clip norms; the user comes first."""
    sums = [
        clipping(families.build(make), kind).clipped_sum(groups, RULE).total.values.clone()
        for groups in (others, [extra, *others])
    ]
    return float((sums[1] - sums[0]).norm()) / RULE.bound


@pytest.mark.parametrize("name", ["bert", "llama, long rotation"])
def test_padding_of_another_user_is_seen_before_the_sum_counts(name: str) -> None:
    make = families.PLAIN_ONLY[name]
    assert movement(make, "plain", LONG) <= 1 + 1e-5
    with pytest.raises(FastPathError, match="padding of other users"):
        movement(make, "fast", LONG)


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_rotary_embeddings_that_grow_forget_the_user_before(kind: str) -> None:
    make = families.PLAIN_ONLY["llama, dynamic rotation"]
    # All are longer than the 12 positions from which on the embeddings grow.
    long, others = MADE_UP.group(1, 40, seed=98), [MADE_UP.group(1, 15, seed=i) for i in range(9)]
    assert movement(make, kind, long, others) <= 1 + 1e-5
    # Nor does a later step know who was in an earlier one.
    model = families.build(make)
    fresh = clipping(model, kind).clipped_sum(others, RULE).total.values.clone()
    used = clipping(model, kind)
    used.clipped_sum([long], RULE)
    assert torch.equal(used.clipped_sum(others, RULE).total.values, fresh)


class TokenMajor(nn.Module):
    """Rows and tokens flattened token first, as in sequence-first models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        flat = x.transpose(0, 1).reshape(tokens * rows, width)
        return self.inner(flat).view(tokens, rows, width).transpose(0, 1)


def distance(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum((1, 2))


def quiet_users(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (0.05 * torch.randn(count, 8, 4, generator=generator) for _ in range(2))
    return x, y


def test_users_that_are_not_told_apart_are_found_while_nobody_is_clipped() -> None:
    torch.manual_seed(0)
    model = TokenMajor()
    x, y = quiet_users(8)
    groups = [{"x": x[i : i + 1], "y": y[i : i + 1]} for i in range(8)]
    rule = FlatClip(clip_norm=1.0)
    fast = FastClipping(model, list(model.parameters()), rule, record_loss=distance)
    with pytest.raises(FastPathError, match=r"inner\.weight"):
        fast.clipped_sum(groups, rule)


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_no_step_of_such_a_model_is_taken_on_the_fast_path(path: Any) -> None:
    torch.manual_seed(0)
    model = TokenMajor()
    x, y = quiet_users(8)
    plan = everybody(8)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners(range(8)),
        record_loss=distance,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(0),
    )
    batches = [{"x": x[rows], "y": y[rows]} for rows in step.draw()]
    if path == "fast":
        with pytest.raises(MixedExamplesError, match="does not tell the users of a batch apart"):
            step.apply(batches)
        assert step.ledger.steps == 0
    else:
        step.apply(batches)


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("value", [1e10, 1e25, math.inf, math.nan])
def test_one_users_value_never_ends_a_run_nor_changes_another_users_update(
    path: Any, value: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, generator=generator), torch.randn(16, generator=generator)
    owners = [u for u in range(8) for _ in range(2)]
    # The first user has one record more than the others have rows of: theirs are padded.
    owners[2] = 0

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    def sums(first: float) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        plan = everybody(8, group_size=3, steps=3)
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            plan,
            UserIndex.from_owners(owners),
            record_loss=squares,
            settings=StepSettings(path=path),
            secret=RunSecret.fixed_for_tests(1),
        )
        found: list[Tensor] = []
        release = step._release
        step._release = lambda total: (found.append(total.total.values.clone()), release(total))[1]  # type: ignore[method-assign]
        own = y.clone()
        own[0] = first
        for cohort in step.cohorts():
            step.apply({"x": x[rows], "y": own[rows]} for rows in cohort)
        return found

    for usual, odd in zip(sums(0.5), sums(value), strict=True):
        assert float((usual - odd).norm()) <= 2 * (1 + 1e-5)


def test_a_user_with_no_finite_number_zeroes_nobody_else() -> None:
    # Rows that pad a user are copies of its own: of the first user's they would be not finite.
    model = nn.Linear(3, 1, dtype=torch.float64)

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    generator = torch.Generator().manual_seed(0)
    groups = [
        {
            "x": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
            "y": torch.randn(rows, generator=generator, dtype=torch.float64),
        }
        for rows in (3, 2, 3, 2, 2)
    ]
    poisoned = [{"x": groups[0]["x"], "y": torch.full_like(groups[0]["y"], math.inf)}, *groups[1:]]
    rule = FlatClip(clip_norm=0.3)
    parameters = list(model.parameters())
    expected = PlainClipping(model, parameters, record_loss=squares).clipped_sum(groups[1:], rule)
    for mix in (False, True):
        fast = FastClipping(
            model, parameters, rule, record_loss=squares, settings=StepSettings(mix_sizes=mix)
        )
        found = fast.clipped_sum(poisoned, rule)
        torch.testing.assert_close(found.total.values, expected.total.values)


@pytest.mark.parametrize("mix", [False, True])
def test_a_user_with_no_finite_number_zeroes_nobody_whose_records_lie_before(mix: bool) -> None:
    # Attention moves joined records into rows as long as the longest one: what stands behind a
    # shorter record must not be the next user's.
    model: Any = families.build(families.SAFE["llama"])
    poison = families.VOCABULARY - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    groups = [MADE_UP.group(1, 3, seed=i) for i in range(20)]
    groups[0] = MADE_UP.group(1, 30, seed=20)
    for group in groups:
        group["input_ids"].clamp_(max=poison - 1)
        group["labels"] = group["input_ids"].clone()
    fast = FastClipping(
        model,
        list(model.parameters()),
        RULE,
        record_loss=causal_lm_loss,
        settings=StepSettings(join_records=True, mix_sizes=mix),
        sequence_length=30,
    )
    with_all = fast.clipped_sum(groups, RULE).total.values.clone()
    for bad in range(len(groups)):
        cohort = [{name: tensor.clone() for name, tensor in group.items()} for group in groups]
        cohort[bad]["input_ids"][:] = poison
        moved = (fast.clipped_sum(cohort, RULE).total.values - with_all).norm()
        assert float(moved) <= RULE.clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_group_that_the_model_cannot_read_counts_as_zero(
    path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Longer than the model has positions, or a token it does not know: one user's data.
    model = families.build(families.SAFE["gpt2"])
    odd = MADE_UP.group(1, families.POSITIONS + 3, seed=5)
    unknown = MADE_UP.group(1, 10, seed=6)
    unknown["input_ids"][0, 3] = families.VOCABULARY + 5
    for bad in (odd, unknown):
        usual = clipping(model, path).clipped_sum(SMALL, RULE).total.values.clone()
        with pytest.raises(IndexError):
            clipping(model, path).clipped_sum([bad, *SMALL], RULE)
        tolerant = clipping(model, path)
        tolerant.skip_failing = True
        found = tolerant.clipped_sum([bad, *SMALL], RULE)
        torch.testing.assert_close(found.total.values, usual)
        assert found.num_updates == len(SMALL) + 1
        # A cohort in which everything fails is logged, not raised: with one more it is not all.
        with caplog.at_level("WARNING", logger="userdp"):
            nothing = tolerant.clipped_sum([bad, bad], RULE)
        assert float(nothing.total.values.abs().max()) == 0
        assert "all 2 groups of a step failed (the last: IndexError)" in caplog.text
        caplog.clear()


def test_joining_follows_from_each_users_own_records() -> None:
    model = families.build(families.SAFE["gpt2"])
    parameters = list(model.parameters())
    ragged = MADE_UP.group(6, 20, seed=7)
    ragged["labels"][1:, 2:] = -100

    def second_step(first: list[dict[str, Tensor]]) -> Tensor:
        fast = FastClipping(model, parameters, RULE, record_loss=causal_lm_loss)
        fast.clipped_sum([*SMALL[:4], *first], RULE)
        return fast.clipped_sum(SMALL, RULE).total.values.clone()

    assert torch.equal(second_step([]), second_step([ragged]))


def test_join_records_is_refused_before_any_data_is_seen() -> None:
    model = families.build(families.SAFE["mistral, window"])
    settings = StepSettings(join_records=True)
    with pytest.raises(InputError, match="records of length 48 were tried"):
        FastClipping(
            model, list(model.parameters()), RULE, record_loss=causal_lm_loss, settings=settings
        )


def config(tmp_path: Any, store: str, training: str = "", length: int = 32) -> Any:
    path = tmp_path / f"{store}.toml"
    path.write_text(
        f"""[data]
store = "{tmp_path / store}"
sequence_length = {length}
[model]
path = "{tmp_path / "m"}"
[privacy]
num_users = 40
expected_cohort_size = 20
group_size = 3
clip_norm = 1.0
epsilon = 8.0
delta = 1e-3
[training]
steps = 2
{training}
"""
    )
    return path


def test_sequence_length_above_the_models_positions_is_refused_whoever_is_there(
    tmp_path: Any,
) -> None:
    rng = np.random.default_rng(0)
    short = [
        Record(" ".join(rng.choice(tiny.WORDS, size=6)), (f"u{i}",), f"r{i}") for i in range(40)
    ]
    long = Record(" ".join(rng.choice(tiny.WORDS, size=90)), ("target",), "t")
    write_store([*short, long], tmp_path / "with", key=bytes(32))
    write_store(short, tmp_path / "without", key=bytes(32))
    tiny.make_model(tmp_path / "m")
    for store in ("with", "without"):
        result = run_cli(
            "train", config(tmp_path, store, length=128), "--out", tmp_path / f"run_{store}"
        )
        assert result.code == 2
        assert "sequence_length=128 is above the 64 positions" in result.err
        assert not (tmp_path / f"run_{store}").exists()


def test_an_encoder_is_not_trained_from_the_command_line(tmp_path: Any) -> None:
    import transformers

    from userdp.quickstart import word_tokenizer

    tiny.make_store(tmp_path / "s", [3] * 40)
    tokenizer = word_tokenizer(tiny.WORDS)
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    transformers.BertLMHeadModel(settings).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    result = run_cli("train", config(tmp_path, "s"), "--out", tmp_path / "run")
    assert result.code == 2
    assert "depends on how far it is padded" in result.err
    assert not (tmp_path / "run").exists()
    result = run_cli("verify", config(tmp_path, "s"), "--json")
    assert result.code == 1
    found = json.loads(result.out)
    assert found["safe"] is False
    assert "padded" in found["cause"]
    assert found["largest_movement"] > 1
    assert max(probe["coupling"] for probe in found["details"]) > 0.01
    plain = config(tmp_path, "s", training='path = "plain"')
    result = run_cli("verify", plain, "--json")
    assert (result.code, result.json["safe"], result.json["cause"]) == (0, True, None)
    assert result.json["largest_movement"] <= 1 + 1e-5
    assert result.json["probes"] == len(result.json["details"]) > 30


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_step_goes_on_without_the_user_that_cannot_be_read(path: Any) -> None:
    model = families.build(families.SAFE["gpt2"])
    plan = everybody(6)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners(range(6)),
        settings=StepSettings(path=path),
        sequence_length=families.LENGTH,
        secret=RunSecret.fixed_for_tests(0),
    )
    for number, cohort in enumerate(step.cohorts()):
        groups = [MADE_UP.group(1, 8, seed=int(rows[0])) for rows in cohort]
        if number == 0:
            groups[0] = MADE_UP.group(1, families.POSITIONS + 9, seed=50)
        else:
            groups[0]["input_ids"][0, 2] = families.VOCABULARY + 1
        step.apply(groups)
    assert step.ledger.steps == 2


def test_what_fails_in_the_loss_of_one_user_counts_as_zero() -> None:
    # A record that the caller's own loss cannot handle, at the second step.
    def picky(model: nn.Module, batch: Any) -> Tensor:
        if bool((batch["kind"] == 7).any()):
            raise ValueError("cannot handle this one")
        return (model(batch["x"])[:, 0] - batch["kind"]) ** 2

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    plan = everybody(5)
    for path in ("fast", "plain"):
        step = _picky_step(model, plan, picky, path)
        for number, cohort in enumerate(step.cohorts()):
            kinds = torch.tensor([7 if number and i == 2 else i for i in range(5)])
            step.apply({"x": torch.ones(1, 3), "kind": kinds[rows]} for rows in cohort)
        assert step.ledger.steps == 2


def _picky_step(model: nn.Module, plan: Plan, loss: Any, path: Any) -> PrivateStep:
    own = copy.deepcopy(model)
    return PrivateStep(
        own,
        torch.optim.SGD(own.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners(range(5)),
        record_loss=loss,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(0),
    )


class MixesInTraining(nn.Module):
    """Subtracts the mean over the batch, in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.tanh(y - y.mean(0)) if self.training else torch.tanh(y)


def test_a_model_is_probed_in_the_mode_that_it_is_trained_in() -> None:
    torch.manual_seed(0)
    model = MixesInTraining()

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    batch = {"x": torch.zeros(1, 3), "y": torch.zeros(1)}
    assert verify(model.eval(), batch, record_loss=squares, path="fast").safe
    assert not verify(model.train(), batch, record_loss=squares, path="fast").safe
    assert model.training


def test_comparisons_see_made_up_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a run goes on must not depend on what users' values do to a comparison.
    seen: list[Tensor] = []
    monkeypatch.setattr(
        "userdp.clipping.fast.compare_with_plain",
        lambda model, parameters, rule, users, run, **how: seen.append(users.batch["input_ids"]),
    )
    model = families.build(families.SAFE["gpt2"])
    clipping(model, "fast").clipped_sum(SMALL, RULE)
    (made_up,) = seen
    own = torch.cat([group["input_ids"] for group in SMALL])
    assert made_up.shape == own.shape
    assert float((made_up == own).float().mean()) < 0.2


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


class MixesLargeBatches(nn.Module):
    """Rows see each other, but only in batches that are larger than those of a probe."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + 10 * y.mean(0) if len(x) > 12 else y


class PassesOn(nn.Module):
    """Rows from the seventeenth on see those before them: the last users of a batch do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cat([y[:16], y[16:] + 10 * y[:16].mean(0)])


@pytest.mark.parametrize("kind", [MixesLargeBatches, PassesOn])
def test_what_only_a_whole_batch_shows_never_reaches_a_release(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    def sums(first: float) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind()
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            everybody(40, steps=5),
            UserIndex.from_owners(range(40)),
            record_loss=squares,
            secret=RunSecret.fixed_for_tests(1),
        )
        found: list[Tensor] = []
        release = step._release
        step._release = lambda total: (found.append(total.total.values.clone()), release(total))[1]  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 3, generator=generator), torch.randn(40, generator=generator)
        y[0] = first
        for cohort in step.cohorts():
            step.apply({"x": x[rows], "y": y[rows]} for rows in cohort)
        return found

    with caplog.at_level("WARNING", logger="userdp"):
        usual, odd = sums(-1e3), sums(1e3)
    assert max(float((a - b).norm()) for a, b in zip(usual, odd, strict=True)) <= 2 * (1 + 1e-5)
    assert "one at a time" in caplog.text


def test_one_users_short_rows_do_not_make_the_probe_see_nothing() -> None:
    model = families.build(families.PLAIN_ONLY["bert"])
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        everybody(4),
        UserIndex.from_owners(range(4)),
        secret=RunSecret.fixed_for_tests(0),
    )
    lengths = [1, 14, 9, 9]
    groups = [MADE_UP.group(1, lengths[int(rows[0])], seed=3) for rows in step.draw()]
    with pytest.raises(MixedExamplesError, match="padded"):
        step.apply(groups)


class SeesByData(nn.Module):
    """Writes what it saw through `.data`, which torch does not count as a write."""

    def __init__(self, *, in_training: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.in_training = in_training

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.in_training:
            self.seen.data.mul_(0.9).add_(x.detach().mean(0))
        return self.inner(x)


@pytest.mark.parametrize("in_training", [False, True])
def test_what_is_written_through_data_is_found(in_training: bool) -> None:
    batch = {"x": torch.zeros(1, 3), "y": torch.zeros(1)}
    model = SeesByData(in_training=in_training).train(in_training)
    found = verify(model, batch, record_loss=squares, path="plain")
    assert "'seen' is written during the forward pass" in found.cause


class OneScale(nn.Module):
    """Quantises by one scale for the whole batch, as dynamic low-precision training does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().clamp(min=64.0) / 4096
        return self.inner(torch.round(x / scale) * scale)


def test_a_user_of_large_numbers_is_tried() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.zeros(1, 3)}
    found = verify(
        OneScale(), batch, record_loss=lambda m, b: torch.tanh(m(b["x"])[:, 0]), path="fast"
    )
    assert not found.safe


def test_a_changed_model_is_not_called_proven() -> None:
    model: Any = families.build(families.SAFE["gpt2"])
    assert is_proven(model)
    handle = model.register_forward_hook(lambda *_: None)
    assert not is_proven(model)
    handle.remove()
    model.lm_head.forward = model.lm_head.forward
    assert not is_proven(model)


def test_joined_and_long_users_share_a_cohort_in_mixed_batches() -> None:
    # A kind of group seen later made rows longer than those already judged to fit.
    model = families.build(families.SAFE["gpt2"])
    large = MADE_UP.group(80, 21, seed=1)
    ragged = MADE_UP.group(4, 40, seed=2)
    ragged["labels"][1:, 3:] = -100
    parameters, settings = list(model.parameters()), StepSettings(mix_sizes=True)
    fast = FastClipping(model, parameters, RULE, record_loss=causal_lm_loss, settings=settings)
    expected = clipping(model, "plain").clipped_sum([large, ragged], RULE).total.values
    found = fast.clipped_sum([large, ragged], RULE).total.values
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


ODD_GROUPS: dict[str, Any] = {
    "no token": lambda g: {name: tensor[:, :0] for name, tensor in g.items()},
    "labels longer than ids": lambda g: g | {"labels": torch.cat([g["labels"]] * 2, 1)},
    "more labels than rows": lambda g: g | {"labels": torch.cat([g["labels"]] * 2, 0)},
    "a label beyond the vocabulary": lambda g: g | {"labels": g["labels"] + families.VOCABULARY},
    "ids in three dimensions": lambda g: g | {"input_ids": g["input_ids"][..., None]},
    "ids in one dimension": lambda g: g | {"input_ids": g["input_ids"][:, 0]},
    "ids that are no integers": lambda g: g | {"input_ids": g["input_ids"].float() * math.nan},
}


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("kind", ODD_GROUPS)
def test_groups_that_do_not_fit_together_count_as_zero(kind: str, path: Any) -> None:
    model = families.build(families.SAFE["gpt2"])
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        everybody(4, steps=1),
        UserIndex.from_owners(range(4)),
        settings=StepSettings(path=path),
        sequence_length=families.LENGTH,
        secret=RunSecret.fixed_for_tests(0),
    )
    groups = [MADE_UP.group(1, 8, seed=int(rows[0])) for rows in step.draw()]
    groups[0] = ODD_GROUPS[kind](groups[0])
    step.apply(groups)
    assert step.ledger.steps == 1


def test_two_unreadable_users_of_one_batch_end_nothing() -> None:
    model = families.build(families.SAFE["gpt2"])
    fast = clipping(model, "fast")
    fast.skip_failing = True
    bad = [MADE_UP.group(1, families.POSITIONS + 3, seed=i) for i in range(2)]
    usual = fast.clipped_sum(SMALL, RULE).total.values.clone()
    torch.testing.assert_close(fast.clipped_sum([*SMALL, *bad], RULE).total.values, usual)


class Classifier(nn.Module):
    """Three classes, for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids)))


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    logits, wanted = model(batch["input_ids"]), batch["labels"]
    if wanted.dim() == 1:
        # Padding is token 0 and does not count.
        real = (batch["input_ids"] > 0).float()
        pooled = (logits * real[..., None]).sum(1)
        return nn.functional.cross_entropy(pooled, wanted, reduction="none")
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), wanted, reduction="none", ignore_index=-100
    )
    return losses.sum(1)


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("labels", [torch.tensor([1]), torch.tensor([[1] * 6])])
def test_classification_in_a_loop_of_ones_own(labels: Tensor, path: Any) -> None:
    # One label a record, or few classes: labels are no tokens.
    torch.manual_seed(0)
    model = Classifier()
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        everybody(4),
        UserIndex.from_owners(range(4)),
        record_loss=class_loss,
        settings=StepSettings(path=path),
        secret=RunSecret.fixed_for_tests(0),
    )
    for cohort in step.cohorts():
        ids = torch.arange(1, 7)[None]
        step.apply({"input_ids": ids + int(rows[0]), "labels": labels} for rows in cohort)
    assert step.ledger.steps == 2


class TwoWays(nn.Module):
    """A model of one's own that looks at what follows, and so at padding."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(torch.tanh(x + 3 * x.mean(1, keepdim=True)))


def test_a_model_of_ones_own_is_probed_before_train_takes_a_step(tmp_path: Any) -> None:
    store = tiny.make_store(tmp_path / "s", [3] * 30)
    _, tokenizer = tiny.make_model(tmp_path / "m")
    torch.manual_seed(0)
    model = TwoWays(len(tokenizer))
    plan = everybody(30, group_size=3)
    with pytest.raises(MixedExamplesError, match="padded"):
        train(model, tokenizer, store, plan, sequence_length=16, learning_rate=0.01)
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan, UserIndex.from_owners(range(30))
    )
    # Without an example nothing is known of its rows: it is not taken for checked.
    step.check_model()
    step.draw()
    with pytest.raises(MixedExamplesError, match="padded"):
        step.apply([MadeUp.tokens(len(tokenizer)).group(1, 5, seed=i) for i in range(30)])


def test_the_probe_leaves_every_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    model.train()
    model[0].eval()
    batch = {"x": torch.zeros(1, 3), "y": torch.zeros(1)}
    verify(model, batch, record_loss=squares, path="plain")
    assert [module.training for module in model] == [False, True, True]


def test_a_label_beyond_the_vocabulary_is_found_before_the_model_runs() -> None:
    # On a GPU it would end the process, not only this user's update.
    model = families.build(families.SAFE["gpt2"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = PrivateStep(model, optimizer, everybody(4), UserIndex.from_owners(range(4)))
    group = MADE_UP.group(1, 8, seed=0)
    assert step._checked.reads(group)
    assert not step._checked.reads(group | {"labels": group["labels"] + families.VOCABULARY})


def test_the_norm_of_a_weight_of_millions_of_values_is_not_too_small() -> None:
    # torch's norm on a CPU adds up one square after the other: four million values lost 8e-5 of
    # it, and a clipped update was larger than the clip norm by that.
    torch.manual_seed(0)
    model = nn.Linear(2, 2**21, bias=False)
    generator = torch.Generator().manual_seed(1)
    groups = [
        {
            "x": torch.randn(1, 2, generator=generator),
            "y": torch.randn(1, 2**21, generator=generator),
        }
        for _ in range(2)
    ]

    def product(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) * batch["y"]).sum(1)

    rule = FlatClip(clip_norm=1.0)
    fast = FastClipping(
        model,
        list(model.parameters()),
        rule,
        record_loss=product,
        settings=StepSettings(check=False),
    )
    together = fast.clipped_sum(groups, rule).total.values.double().clone()
    for own, other in (groups, groups[::-1]):
        alone = fast.clipped_sum([other], rule).total.values.double()
        assert float((together - alone).norm()) <= 1 + 1e-6
        assert float(fast.clipped_sum([own], rule).total.values.double().norm()) <= 1
