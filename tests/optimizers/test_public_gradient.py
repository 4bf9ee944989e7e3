"""Public gradients: mixed in after the noise, free of charge, and never of protected people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from stores import KEY, sentences
from userdp import FlatClip, Plan, load_model
from userdp.config.file import load_config
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import tokenise
from userdp.errors import InputError
from userdp.losses import causal_lm_loss
from userdp.optimizers.public_gradient import DECLARED, UNCHECKED, PublicData
from userdp.streams import RunSecret
from userdp.tasks import CausalTask
from userdp.training import from_config as training_from_config
from userdp.training.loop import Run
from userdp.updates.fedavg import FedAvg
from userdp.updates.mean_gradient import MEAN_GRADIENT

STEPS = 2


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> UserStore:
    out = tmp_path_factory.mktemp("public") / "public"
    write_store(sentences(users=4, records_per_user=2, seed=5, prefix="p"), out, key=KEY)
    return UserStore.open(out)


def trained(
    base: Path, store: Path, *, out: Path | None = None, lr: float = 0.5, **options: Any
) -> tuple[Run, list[torch.Tensor]]:
    model, tokenizer = load_model(base)
    before = [p.detach().clone() for p in model.parameters()]
    plan = Plan.sample_users(
        num_users=20,
        expected_cohort_size=6,
        group_size=3,
        steps=STEPS,
        clip=options.pop("clip", None),
        update=options.pop("update", MEAN_GRADIENT),
        noise_multiplier=1.0,
        delta=1e-2,
    )
    run = userdp.train(
        model,
        tokenizer,
        UserStore.open(store),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        sequence_length=16,
        settings=userdp.StepSettings(path="plain"),
        secret=RunSecret.fixed_for_tests(3),
        out=out,
        **options,
    )
    return run, before


def test_all_public_records_push_as_their_clipped_mean_gradient_does(
    base_model: Path, train_store: Path, public: UserStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []
    import userdp.optimizers.public_gradient as module

    mix = module._mix

    def watched(public: Any, step: Any, *rest: Any) -> None:
        weights = [p.detach().clone() for p in step.model.parameters()]
        noised = [p.grad.clone() for p in step.model.parameters()]
        mix(public, step, *rest)
        seen.append((weights, noised, [p.grad.clone() for p in step.model.parameters()]))

    monkeypatch.setattr(module, "_mix", watched)
    data = PublicData(store=public, weight=0.25, batch_size=1000)
    trained(base_model, train_store, public=data, clip=FlatClip(clip_norm=0.1))
    assert len(seen) == STEPS

    # The same by hand: every public record once, through autograd.
    model, tokenizer = load_model(base_model)
    rows = tokenise(public, tokenizer, sequence_length=16)
    task = CausalTask(pad_token=tokenizer.pad_token_id)
    for weights, noised, mixed in seen:
        total = [torch.zeros_like(p) for p in model.parameters()]
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        for row in range(len(rows)):
            batch = task.batch(rows, torch.tensor([row]).numpy(), None)  # type: ignore[arg-type]
            model.zero_grad()
            causal_lm_loss(model, batch).sum().backward()
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.grad / len(rows)
        norm = torch.cat([t.flatten() for t in total]).norm()
        assert norm > 0.1
        for one, before, after in zip(total, noised, mixed, strict=True):
            torch.testing.assert_close(
                after, 0.75 * before + 0.25 * one * (0.1 / norm), rtol=1e-4, atol=1e-7
            )


@pytest.mark.slow
def test_price_is_that_of_the_private_steps_and_the_statement_says_what_is_public(
    base_model: Path, train_store: Path, public: UserStore
) -> None:
    with_public, _ = trained(base_model, train_store, public=PublicData(store=public))
    without, _ = trained(base_model, train_store)
    assert with_public.statement.epsilon == without.statement.epsilon
    assert DECLARED in with_public.statement.cautions
    assert DECLARED not in without.statement.cautions
    ours, theirs = with_public.model.parameters(), without.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert with_public.ledger.bound_to["public"].startswith(public.fingerprint)


def test_protected_users_cannot_be_public(
    base_model: Path, train_store: Path, tmp_path: Path, public: UserStore
) -> None:
    with pytest.raises(InputError, match="20 users of the private store are in the public store"):
        trained(base_model, train_store, public=PublicData(store=UserStore.open(train_store)))
    write_store(
        sentences(users=2, records_per_user=2, seed=5, prefix="p"),
        tmp_path / "other",
        key=KEY[::-1],
    )
    other = PublicData(store=UserStore.open(tmp_path / "other"))
    assert other.cautions(UserStore.open(train_store), [], []) == [DECLARED, UNCHECKED]


def test_users_of_an_earlier_run_cannot_be_public(
    base_model: Path, train_store: Path, tmp_path: Path, public: UserStore
) -> None:
    trained(base_model, train_store, out=tmp_path / "first")
    write_store(
        sentences(users=3, records_per_user=2, seed=6, prefix="c"), tmp_path / "others", key=KEY
    )
    second = tmp_path / "first" / "model", tmp_path / "others"
    protected = PublicData(store=UserStore.open(train_store))
    with pytest.raises(InputError, match="20 users of an earlier run are in the public store"):
        trained(*second, public=protected)
    # Where the list of the earlier users is gone, nobody can tell.
    (users,) = (tmp_path / "first" / "secret" / "users").glob("*.bin")
    users.unlink()
    run, _ = trained(*second, public=protected)
    assert UNCHECKED in run.statement.cautions


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_public_records(
    base_model: Path, train_store: Path, tmp_path: Path, public: UserStore
) -> None:
    data = PublicData(store=public, batch_size=2)
    whole, _ = trained(base_model, train_store, out=tmp_path / "a", public=data)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(base_model, train_store, out=tmp_path / "b", public=data, on_step=stop)
    with pytest.raises(InputError, match="set of public records"):
        trained(base_model, train_store, out=tmp_path / "b", resume=True)
    again, _ = trained(base_model, train_store, out=tmp_path / "b", public=data, resume=True)
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # The optimizer is the caller's: the hook is gone with the run.
    assert not whole.ledger.doubts


def test_public_gradients_are_not_mixed_with_ways_of_weights(
    config_file: Callable[..., Path], base_model: Path, train_store: Path, public: UserStore
) -> None:
    text = f'public = "{public.path}"'
    training = (
        'update = "fedavg"\nlocal_epochs = 1\nlocal_batch_size = 2\nlocal_learning_rate = 0.1'
    )
    with pytest.raises(InputError, match="whose scale is another"):
        load_config(config_file(data=text, training=training))
    load_config(config_file(training=training))
    rule = FedAvg(local_epochs=1, local_batch_size=2, local_learning_rate=0.1)
    clip = FlatClip(clip_norm=1.0)
    with pytest.raises(InputError, match="Leave out public"):
        trained(base_model, train_store, public=PublicData(store=public), update=rule, clip=clip)


def test_configuration_names_public_records(
    config_file: Callable[..., Path], tmp_path: Path, public: UserStore
) -> None:
    path = config_file(data=f'public = "{public.path}"\npublic_weight = 0.1')
    config = load_config(path)
    run = training_from_config.train_from_config(path, config, config.plan(), tmp_path / "run")
    assert run.ledger.bound_to["public"].startswith(f"{public.fingerprint} 0.1 32 ")
    path = config_file(data="public_weight = 0.1", name="alone.toml")
    config = load_config(path)
    with pytest.raises(InputError, match="no meaning without"):
        training_from_config.train_from_config(path, config, config.plan(), tmp_path / "alone")
    for change in ({"weight": 1.0}, {"batch_size": 0}):
        with pytest.raises(InputError, match="public_"):
            PublicData(store=public, **change)
