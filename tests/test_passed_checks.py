"""Checks that passed are remembered for exactly what they depend on, and for nothing else."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from userdp import passed_checks
from userdp.checked_model import CheckedModel
from userdp.clipping.checks import compared_shapes
from userdp.clipping.fast import FastClipping
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.losses import causal_lm_loss
from userdp.passed_checks import PassedChecks, passed_checks_of
from userdp.plan import Plan
from userdp.updates import MeanGradient


def gpt2(**changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    settings = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 40}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        **(settings | no_dropout | changes), bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def plan(clip_norm: float = 1.0) -> Plan:
    return Plan.sample_users(
        num_users=20,
        expected_cohort_size=4,
        group_size=2,
        steps=2,
        clip_norm=clip_norm,
        noise_multiplier=1.0,
        delta=1e-2,
    )


def checked(model: torch.nn.Module, **changes: Any) -> CheckedModel:
    parameters = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {
        "record_loss": causal_lm_loss,
        "settings": StepSettings(),
        "sequence_length": 8,
    }
    return CheckedModel(model, parameters, plan(), **(options | changes))


@pytest.fixture
def remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Checks are remembered on this device, too, in a folder of the test's own."""
    monkeypatch.setattr(passed_checks, "_saves_time", lambda device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "userdp" / "passed"


def probes_run(monkeypatch: pytest.MonkeyPatch, make: Callable[[], CheckedModel]) -> int:
    """How often the model was probed until it counted as checked."""
    from userdp import probe

    count = [0]
    honest = probe.run_probes

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return honest(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(probe, "run_probes", counted)
        model = make()
        model.check_model(None)
        assert model.is_checked
        assert model.summation.skip_failing
    return count[0]


def test_a_probe_that_passed_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 1
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 0
    (file,) = remembers.iterdir()
    assert file.read_bytes() == b""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(remembers.stat().st_mode) == 0o700


def test_whatever_a_check_depends_on_makes_it_run_again(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 1
    deeper, half = gpt2(n_layer=2), gpt2().to(torch.bfloat16)
    frozen, in_training = gpt2(), gpt2().train()
    frozen.transformer.wte.weight.requires_grad_(False)
    trained = gpt2()
    with torch.no_grad():
        trained.transformer.wte.weight[0, 0] += 1.0
    for other in (deeper, half, frozen, in_training, trained):
        assert probes_run(monkeypatch, lambda other=other: checked(other)) == 1
    longer = {"sequence_length": 9}
    packed = {"settings": StepSettings(microbatch_tokens=64)}
    for changes in (longer, packed):
        assert probes_run(monkeypatch, lambda changes=changes: checked(gpt2(), **changes)) == 1
    monkeypatch.setattr(passed_checks, "code_version", lambda: "another version")
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 1
    monkeypatch.setattr(passed_checks, "_words_of", lambda device: "another device")
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 1
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 0


def test_what_is_not_proven_is_checked_every_time(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    def hooked() -> CheckedModel:
        model = gpt2()
        model.transformer.h[0].register_forward_hook(lambda module, args, output: None)
        return checked(model)

    def own_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return causal_lm_loss(model, batch)

    makers = (
        hooked,
        lambda: checked(gpt2(), record_loss=own_loss),
        lambda: checked(gpt2(), is_shared=True),
        lambda: checked(gpt2(), settings=StepSettings(path="plain")),
    )
    for make in makers:
        assert [probes_run(monkeypatch, make) for _ in range(2)] == [1, 1]
    assert not remembers.exists()


def test_nothing_is_remembered_where_it_saves_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [probes_run(monkeypatch, lambda: checked(gpt2())) for _ in range(2)] == [1, 1]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    remembers.parent.mkdir(parents=True)
    remembers.write_text("a file where the folder would be")
    assert [probes_run(monkeypatch, lambda: checked(gpt2())) for _ in range(2)] == [1, 1]


def test_a_model_that_failed_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    from userdp import probe

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unsafe")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "run_probes", failing)
        with pytest.raises(AssertionError, match="unsafe"):
            checked(gpt2()).check_model(None)
    assert probes_run(monkeypatch, lambda: checked(gpt2())) == 1


def comparisons(monkeypatch: pytest.MonkeyPatch, passed: PassedChecks | None) -> int:
    """How many batch shapes were compared with the plain loop, of three cohorts."""
    model, rule = gpt2(), FlatClip(clip_norm=0.5)
    fast = FastClipping(
        model,
        list(model.parameters()),
        rule,
        record_loss=causal_lm_loss,
        every_shape=False,
        passed=passed,
    )
    count = [0]
    honest = fast._compare

    def counted(*args: Any) -> None:
        count[0] += 1
        honest(*args)

    monkeypatch.setattr(fast, "_compare", counted)
    for rows in (1, 2, 3):
        ids = torch.arange(rows * 8).view(rows, 8) % 40
        groups = [{"input_ids": ids, "labels": ids} for _ in range(3)]
        fast.clipped_sum(groups, rule)
    return count[0]


def test_a_comparison_that_passed_is_not_repeated_unless_code_was_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert comparisons(monkeypatch, None) == 3
    assert comparisons(monkeypatch, PassedChecks("a", tmp_path)) == 3
    assert comparisons(monkeypatch, PassedChecks("a", tmp_path)) == 0
    assert comparisons(monkeypatch, PassedChecks("b", tmp_path)) == 3
    monkeypatch.setattr(compared_shapes, "compiled_anew", lambda: True)
    assert comparisons(monkeypatch, PassedChecks("a", tmp_path)) == 3


def test_compiled_anew_follows_torchs_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as dynamo

    monkeypatch.setitem(dynamo.counters, "inductor", {"fxgraph_cache_hit": 9})
    assert not compared_shapes.compiled_anew()
    monkeypatch.setitem(dynamo.counters, "inductor", {"fxgraph_cache_miss": 1})
    assert compared_shapes.compiled_anew()


def test_the_digest_is_that_of_the_rule_too(remembers: Path) -> None:
    model = gpt2()
    options: dict[str, Any] = {
        "update": MeanGradient(),
        "record_loss": causal_lm_loss,
        "settings": StepSettings(),
        "sizes": (8, 2),
        "weights": lambda: "",
    }
    found = [
        passed_checks_of(model, list(model.parameters()), rule=rule, **options)
        for rule in (
            FlatClip(clip_norm=1.0),
            FlatClip(clip_norm=2.0),
            FlatClip(clip_norm=torch.inf),
        )
    ]
    digests = [each._digest for each in found if each is not None]
    assert digests[0] == digests[1] != digests[2]


def test_nothing_is_remembered_where_the_driver_is_unknown(
    monkeypatch: pytest.MonkeyPatch, remembers: Path
) -> None:
    monkeypatch.setattr(passed_checks, "_words_of", lambda device: None)
    assert [probes_run(monkeypatch, lambda: checked(gpt2())) for _ in range(2)] == [1, 1]
    assert not remembers.exists()
    # This machine, or CI's, may have a driver or not: it is never guessed.
    monkeypatch.setattr(passed_checks.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    assert passed_checks._driver_version() is None
