"""Randomness under attack: guessed, shared between runs, reused by a changed copy of a run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import userdp
from tiny import make_model, make_store
from userdp import (
    AdaptiveClip,
    Ledger,
    Plan,
    PrivateStep,
    StepSettings,
    UserIndex,
)
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.digests.of_runs import weights_digest
from userdp.runs import same as same_run
from userdp.runs.record import RunRecord
from userdp.streams import RunSecret, Streams
from userdp.training import loop as training

PUBLIC: dict[str, Any] = {
    "num_users": 40,
    "expected_cohort_size": 20,
    "group_size": 2,
    "steps": 4,
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "delta": 1e-3,
}


def test_the_secret_comes_from_the_system_and_from_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("userdp.streams.secrets.token_bytes", lambda count: b"s" * count)
    assert RunSecret.from_system().key == b"s" * 32


class Stopped(Exception):
    """The run is bound; training it would add nothing."""


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the noise of a run with these changes is bound to, under one fixed secret."""
    found: list[str] = []

    def stop(*args: Any, record: RunRecord, **options: Any) -> None:
        found.append(record.ledger.run_digest)
        raise Stopped

    monkeypatch.setattr(training, "PrivateStep", stop)
    store = make_store(tmp_path / "store", [2] * 40)
    model, tokenizer = make_model(tmp_path / "model")

    def run(**changes: Any) -> str:
        trained = changes.pop("model", model)
        made = changes.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
        optimizer = made(trained.parameters())
        scheduler = changes.pop("scheduler", lambda _: None)(optimizer)
        options = {"secret": RunSecret.fixed_for_tests(1), "sequence_length": 16} | changes
        with pytest.raises(Stopped):
            userdp.train(
                trained,
                options.pop("tokenizer", tokenizer),
                options.pop("store", store),
                options.pop("plan", Plan.sample_users(**PUBLIC)),
                optimizer=optimizer,
                scheduler=scheduler,
                **options,
            )
        return found[-1]

    run.model, run.tokenizer, run.root, run.store = model, tokenizer, tmp_path, store  # type: ignore[attr-defined]
    return run


def linear(rate: float) -> Callable[[Any], Any]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - rate * step)

    return schedule


def test_whatever_changes_the_released_values_changes_the_noise(bound: Any) -> None:
    moved = copy.deepcopy(bound.model)
    with torch.no_grad():
        next(moved.parameters()).view(-1)[0] += 1e-6
    other_config = copy.deepcopy(bound.model)
    other_config.config.attn_pdrop = 0.5
    tokenizer = copy.deepcopy(bound.tokenizer)
    tokenizer.chat_template = "x"
    edges = Edges.load(bound.store.path)
    chosen = np.ones(edges.num_records, dtype=np.int64)
    all_records = Selection.of(edges, chosen, 2, method="greedy")
    fewer = Selection.of(edges, np.where(np.arange(len(chosen)) == 3, 0, 1), 2, method="greedy")

    def stepped(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        return optimizer

    config = bound.root / "run.toml"
    config.write_text("x")
    step_lr = torch.optim.lr_scheduler.StepLR
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "learning rate": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.2)},
        "momentum": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
        "momentum so far": {"optimizer": stepped},
        "weight decay": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-4)},
        "optimizer": {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)},
        "schedule": {"scheduler": lambda o: step_lr(o, step_size=1, gamma=0.5)},
        "schedule's factor": {"scheduler": lambda o: step_lr(o, step_size=1, gamma=0.4)},
        "schedule's function": {"scheduler": linear(0.1)},
        "schedule's closure": {"scheduler": linear(0.2)},
        "sequence length": {"sequence_length": 8},
        "path": {"settings": StepSettings(path="plain")},
        "settings": {"settings": StepSettings(join_records=False)},
        "microbatch": {"settings": StepSettings(microbatch_records=1)},
        "weights": {"model": moved},
        "dtype": {"model": copy.deepcopy(bound.model).double()},
        "model's configuration": {"model": other_config},
        "tokenizer": {"tokenizer": tokenizer},
        "selection": {"selection": all_records},
        "another selection": {"selection": fewer},
        "plan": {"plan": Plan.sample_users(**(PUBLIC | {"noise_multiplier": 2.1}))},
        "data": {"store": make_store(bound.root / "other", [2] * 40, seed=1)},
        "configuration": {"config": config},
    }
    digests = {name: bound(**change) for name, change in changes.items()}
    for first, second in itertools.combinations(digests, 2):
        assert digests[first] != digests[second], (first, second)
    assert bound() == digests["as it is"]


def test_code_and_device_are_bound_too(bound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    monkeypatch.setattr(same_run, "code_version", lambda: "another version")
    assert bound() != before


def test_one_real_secret_never_gives_two_runs_the_same_noise(bound: Any) -> None:
    # Two nonces of 128 bits are alike with probability 2^-128.
    secret = RunSecret(key=b"k" * 32, fixed_seed=False)
    assert bound(secret=secret) != bound(secret=secret)
    # Not even with one key for both ledgers.
    first, second = (
        Ledger.create(Plan.sample_users(**PUBLIC), bound_to={}, fixed_seed=False, key=b"k" * 32)
        for _ in range(2)
    )
    assert first.run_digest != second.run_digest


def own_step(model: torch.nn.Module, **options: Any) -> PrivateStep:
    owners = options.pop("owners", [user for user in range(40) for _ in range(4)])
    return PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1)),
        options.pop("plan", None) or Plan.sample_users(**PUBLIC),
        UserIndex.from_owners(owners),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        **options,
    )


def a_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1)


def test_an_own_loop_that_goes_on_with_a_change_draws_other_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same secret and the same ledger: what is left to tell two continuations apart."""
    # Were the system's randomness to repeat, a change would still give other noise.
    monkeypatch.setattr("userdp.runs.record.secrets.token_hex", lambda count: "0" * 2 * count)
    secret = RunSecret(key=b"k" * 32, fixed_seed=False)
    plan = Plan.sample_users(**PUBLIC)
    (tmp_path / "0").mkdir()
    Ledger.create(plan, path=tmp_path / "0" / "ledger.jsonl", bound_to={}, fixed_seed=False).close()
    changes: list[dict[str, Any]] = [
        {},
        {"lr": 0.2},
        {"model": a_model(1)},
        {"owners": [user for user in range(39) for _ in range(4)]},
    ]
    keys: list[bytes] = []
    for number, change in enumerate([*changes, {}], start=1):
        home = Path(shutil.copytree(tmp_path / "0", tmp_path / str(number)))
        ledger = Ledger.open(home / "ledger.jsonl")
        model = change.pop("model", None) or a_model()
        keys.append(own_step(model, record=RunRecord(ledger, secret), **change).record._secret.key)
        ledger.close()
    assert len(set(keys)) == len(changes)
    assert keys[0] == keys[-1]


def test_copies_of_an_unfinished_run_share_no_noise_under_one_secret(tmp_path: Path) -> None:
    """The first row names data and weights, so nothing else tells the two runs apart."""
    plan = Plan.sample_users(**PUBLIC)
    named = {"initial_weights": weights_digest(a_model()), "data": "x"}
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "ledger.jsonl"
    Ledger.create(plan, path=path, bound_to=named, fixed_seed=False).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    secret = RunSecret(key=b"k" * 32, fixed_seed=False)
    steps = [
        own_step(
            a_model(seed),
            record=RunRecord(Ledger.open(tmp_path / name / "ledger.jsonl"), secret),
        )
        for seed, name in enumerate("ab")
    ]
    # One ledger in memory, two steps on it.
    ledger = Ledger.create(plan, bound_to=named, fixed_seed=False)
    steps += [own_step(a_model(), record=RunRecord(ledger, secret)) for _ in range(2)]
    assert len({step.record._secret.key for step in steps}) == 4
    for step in steps:
        step.ledger.close()


def test_an_own_loop_binds_weights_and_optimizer_without_a_ledger_too() -> None:
    secret = RunSecret.fixed_for_tests(1)
    keys = [
        own_step(model, secret=secret, lr=lr).record._secret.key
        for model, lr in ((a_model(), 0.1), (a_model(), 0.2), (a_model(1), 0.1))
    ]
    assert len(set(keys)) == 3


def cohorts(step: PrivateStep) -> list[list[int]]:
    found: list[list[int]] = []
    for cohort in step.cohorts():
        found.append(cohort.rows.tolist())
        step.apply([{"x": torch.ones(len(rows), 3)} for rows in cohort])
    return found


def test_cohorts_follow_the_secret_and_no_public_seed() -> None:
    # 40 coins a step: two secrets agree in a step with probability 2^-40. The seeds are fixed.
    first, second, again = (
        cohorts(own_step(a_model(), secret=RunSecret.fixed_for_tests(seed))) for seed in (1, 2, 1)
    )
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert all(a != b for a, b in itertools.pairwise(first))
    assert first == again


def test_the_rows_that_record_sampling_keeps_follow_the_secret() -> None:
    plan = Plan.sample_records(
        num_users=40, expected_batch_size=20, group_size=2, steps=2, clip_norm=1.0,
        noise_multiplier=2.0, delta=1e-3,
    )  # fmt: skip
    kept = [
        own_step(a_model(), plan=plan, secret=RunSecret.fixed_for_tests(seed))._index.rows.tolist()
        for seed in (1, 2, 1)
    ]
    # 40 users keep 2 of 4 rows each: alike with probability 6^-40.
    assert kept[0] != kept[1]
    assert kept[0] == kept[2]


def test_no_two_uses_of_randomness_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Streams, int, int]] = []
    honest = Streams.key

    def watched(self: Streams, step: int, piece: int = 0) -> bytes:
        asked.append((self, step, piece))
        return honest(self, step, piece)

    monkeypatch.setattr(Streams, "key", watched)
    clip = AdaptiveClip(clip_norm=1.0, count_noise=2.0)
    plan = Plan.sample_users(**(PUBLIC | {"clip_norm": None, "clip": clip}))
    cohorts(own_step(a_model(), plan=plan, secret=RunSecret.fixed_for_tests(1)))
    # A step draws its cohort, its noise and its noisy count, each from a stream of its own.
    assert len(asked) == len(set(asked)) >= 3 * plan.steps
    assert len({honest(*one) for one in asked}) == len(asked)


def test_the_count_of_adaptive_clipping_gets_fresh_noise_at_every_step() -> None:
    """Nobody is there, so only noise can move the clip norm differently from step to step."""
    clip = AdaptiveClip(clip_norm=1.0, count_noise=2.0)
    plan = Plan.sample_users(**(PUBLIC | {"clip_norm": None, "clip": clip}))
    ratios: list[list[float]] = []
    for seed in (1, 2):
        step = own_step(a_model(), plan=plan, owners=[], secret=RunSecret.fixed_for_tests(seed))
        norms = [step.clip_norm]
        for _ in range(plan.steps):
            step.draw()
            step.apply([])
            norms.append(step.clip_norm)
        ratios.append([after / before for before, after in itertools.pairwise(norms)])
    flat = [ratio for of_seed in ratios for ratio in of_seed]
    assert len({round(ratio, 9) for ratio in flat}) == len(flat)


def test_digest_of_weights_reads_every_byte_and_name_in_any_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
    whole = weights_digest(model)
    monkeypatch.setattr("userdp.digests.values.PIECE", 3)
    assert weights_digest(model) == whole
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        flat = tensor.data.view(-1)
        for position in range(flat.numel()):
            before = flat[position].clone()
            flat[position] = before + 1
            assert weights_digest(model) != whole, name
            flat[position] = before
    assert weights_digest(model) == whole
    renamed = torch.nn.ModuleDict({"a": model[0], "b": model[1]})
    assert weights_digest(renamed) != whole


def test_nothing_public_is_an_unkeyed_hash_of_the_data(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [2] * 40)
    model, tokenizer = make_model(tmp_path / "model")
    edges = Edges.load(store.path)
    selection = Selection.of(edges, np.ones(edges.num_records, dtype=np.int64), 2, method="greedy")
    plan = Plan.sample_users(**(PUBLIC | {"steps": 1}))
    userdp.train(
        model, tokenizer, store, plan, sequence_length=16, selection=selection, out=tmp_path / "run"
    )
    public = b"".join(
        path.read_bytes()
        for path in sorted((tmp_path / "run").rglob("*"))
        if path.is_file() and "secret" not in path.parts
    )
    known = {selection.sha256(), selection.edges_digest}
    for path in store.path.rglob("*"):
        if path.is_file():
            known.add(hashlib.sha256(path.read_bytes()).hexdigest())
            known.add(hashlib.blake2b(path.read_bytes()).hexdigest())
    assert not [digest for digest in known if digest.encode() in public]
    assert store.fingerprint.encode() in public
    for secret in (store.fingerprint_key.hex(), *(p.hex() for p in store.pseudonyms.to_pylist())):
        assert secret.encode() not in public
        assert bytes.fromhex(secret) not in public


def test_a_guess_cannot_be_tried_against_a_fingerprint_without_the_key(tmp_path: Path) -> None:
    same, again, other = (
        make_store(tmp_path / name, [2] * 5).fingerprint if key is None else guess(tmp_path / name)
        for name, key in (("a", None), ("b", None), ("c", bytes(32)))
    )
    assert same == again != other


def guess(path: Path) -> str:
    """All records right, under a key of the guesser's own."""
    from userdp.data.record import Record
    from userdp.data.store import UserStore, write_store

    store = make_store(path.with_name("truth"), [2] * 5)
    records = [
        Record(store.text(record), (f"u{record // 2}",), "x") for record in range(store.num_records)
    ]
    write_store(records, path, key=bytes(32))
    return UserStore.open(path).fingerprint
