"""Attacks on runs that go on: cut records, changed things, lost files, forks, copies."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import GaussianDpEvent

import userdp
from tiny import make_model, make_store
from userdp import Lora, Plan, load_model
from userdp.data.store import UserStore
from userdp.digests.of_runs import code_digest, model_digest, optimizer_digest
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.optimizers.by_name import make_optimizer
from userdp.prices.paid import Paid
from userdp.runs.checkpoints import Checkpoints, Saving
from userdp.runs.finalize import finalize
from userdp.training.loop import Run

STEPS = 6
DELTA = 1e-2


class Stopped(Exception):
    """The run is stopped here, as a kill would."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("durable") / "base"
    make_model(path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> UserStore:
    return make_store(tmp_path / "store", [1, 2, 3, 4, 2, 5] * 4)


def plan(steps: int = STEPS) -> Plan:
    return Plan.sample_users(
        num_users=24,
        expected_cohort_size=6,
        group_size=3,
        steps=steps,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=DELTA,
    )


def run(
    base: Path,
    store: UserStore,
    out: Path,
    *,
    steps: int = STEPS,
    stop_after: int | None = None,
    lora: Lora | None = None,
    every: int | None = 2,
    change: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> Run:
    model, tokenizer = load_model(base, lora=lora)
    change(model)

    def on_step(done: int) -> None:
        if done == stop_after:
            raise Stopped

    return userdp.train(
        model,
        tokenizer,
        store,
        plan(steps),
        optimizer=make_optimizer(model, "adamw", 0.01),
        sequence_length=16,
        # What is attacked here is the same on both paths, and this one is faster to set up.
        settings=options.pop("settings", userdp.StepSettings(path="plain")),
        out=out,
        saving=Saving(every_steps=every),
        on_step=on_step,
        **options,
    )


def stopped(base: Path, store: UserStore, out: Path, after: int, **options: Any) -> None:
    with pytest.raises(Stopped):
        run(base, store, out, stop_after=after, **options)


def keep_rows(out: Path, number: int) -> None:
    """Cut everything after the first rows off the ledger."""
    ledger = out / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:number]))


def spent(store: UserStore) -> float | None:
    return userdp.Population.of(store).spent(DELTA).epsilon


def test_a_cut_ledger_is_not_read_beside_its_checkpoints(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    run(base, store, tmp_path / "r")
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").steps == STEPS
    keep_rows(tmp_path / "r", 2)
    with pytest.raises(LedgerError, match="cut off"):
        Ledger.read(tmp_path / "r" / "ledger.jsonl")


def test_a_run_whose_rows_were_cut_is_not_forked(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    """The fork would have stated 1.07 for 7 steps that cost 2.10."""
    run(base, store, tmp_path / "r")
    keep_rows(tmp_path / "r", 2)
    with pytest.raises(LedgerError, match="cut off"):
        run(base, store, tmp_path / "r", fork=True, steps=STEPS + 1)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_cut_ledger_gives_nothing_back_to_the_budget(
    base: Path, store: UserStore, tmp_path: Path, rows: int
) -> None:
    """It would have counted as a run that was stopped before its first step, which is free."""
    out = tmp_path / "r"
    stopped(base, store, out, 5)
    keep_rows(out, rows)
    before = spent(store)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    with pytest.raises(LedgerError, match="cut off"):
        run(base, store, out, resume=True, steps=1)
    with pytest.raises(LedgerError, match="cut off"):
        finalize(out, unfinished=True)
    assert spent(store) == before
    assert sorted(path for path in out.rglob("*") if path.is_file()) == files


def test_what_was_settled_is_not_settled_for_less(store: UserStore) -> None:
    people = userdp.Population.of(store)
    people.reserve(
        run="a",
        what="training",
        where="",
        event=plan().event(),
        steps=STEPS,
        adjacency=plan().adjacency,
    )
    people.settle("a", 5, plan().event(5))
    before = people.spent(DELTA).epsilon
    # A copy of the run that is behind, or whose rows were cut, is forked.
    people.settle("a", 2, plan().event(2))
    assert people.spent(DELTA).epsilon == before


def test_a_finished_run_that_is_restored_carries_what_was_spent(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    """Training on would have stated 1.93 for 2.86."""
    run(base, store, tmp_path / "r")
    again = run(base, store, tmp_path / "r", resume=True)
    _, tokenizer = load_model(base)
    further = userdp.train(
        again.model, tokenizer, store, plan(), sequence_length=16, out=tmp_path / "further"
    )
    assert [item.steps for item in further.ledger.earlier] == [STEPS]
    assert further.statement.epsilon == pytest.approx(plan(2 * STEPS).epsilon(), rel=1e-3)


def test_another_scaling_of_adapters_does_not_repeat_steps(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every": None}
    stopped(base, store, tmp_path / "r", 4, lora=Lora(rank=2, alpha=4), **options)
    with pytest.raises(InputError, match="another model"):
        run(base, store, tmp_path / "r", resume=True, lora=Lora(rank=2, alpha=64), **options)
    assert run(
        base, store, tmp_path / "r", resume=True, lora=Lora(rank=2, alpha=4), **options
    ).statement.guarantee


def test_a_hook_that_mixes_users_is_not_slipped_in(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    stopped(base, store, tmp_path / "r", 3)

    def hook(_: Any, __: Any, found: Any) -> Any:
        return found

    with pytest.raises(InputError, match="another model"):
        run(
            base,
            store,
            tmp_path / "r",
            resume=True,
            change=lambda model: model.register_forward_hook(hook),
        )


def test_a_noise_key_of_another_run_is_refused(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    """Steps after the checkpoint would have been taken again with other noise, uncharged."""
    stopped(base, store, tmp_path / "r", 5)
    (tmp_path / "r" / "secret" / "noise.key").write_text("ab" * 32 + "\n")
    with pytest.raises(LedgerError, match="not the key that the run began with"):
        run(base, store, tmp_path / "r", resume=True)


def test_a_look_that_is_paid_for_later_is_not_left_out(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    stopped(base, store, tmp_path / "r", 3)
    look = Paid(what="group size", event=GaussianDpEvent(1.0))
    with pytest.raises(InputError, match="other paid looks"):
        run(base, store, tmp_path / "r", resume=True, paid=[look])


def test_resume_deletes_nobody_elses_files(base: Path, store: UserStore, tmp_path: Path) -> None:
    for name in ("checkpoints/mine", "secret/mine", "config.toml"):
        out = tmp_path / name.partition("/")[2] / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(InputError, match="no ledger"):
            run(base, store, out, resume=True)
        assert (out / name).read_text() == "mine"


def test_a_run_without_its_ledger_keeps_its_checkpoints(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    stopped(base, store, tmp_path / "r", 3)
    (tmp_path / "r" / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="the ledger is lost"):
        run(base, store, tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "checkpoints" / "step-000000002").is_dir()
    assert (tmp_path / "r" / "secret" / "noise.key").is_file()


def test_a_fork_cannot_declare_the_people_of_its_parent_to_be_others(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    """It would have stated 1.93 for people who spent 2.57."""
    run(base, store, tmp_path / "r")
    other = make_store(tmp_path / "more", [1, 2, 3, 4, 2, 5] * 4 + [1])
    with pytest.raises(InputError, match="24 users are in several"):
        run(base, other, tmp_path / "r", fork=True, steps=STEPS + 4, other_people=True)


def test_a_fork_that_was_killed_before_its_first_step_is_forked_again(
    base: Path, store: UserStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    run(base, store, out)

    def kill(*_: object, **__: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr("userdp.training.loop.PrivateStep", kill)
        with pytest.raises(Stopped):
            run(base, store, out, fork=True, steps=STEPS + 2)
    # To begin from nothing is not what `resume` says.
    with pytest.raises(InputError, match="say --fork"):
        run(base, store, out, resume=True, steps=STEPS + 2)
    found = run(base, store, out, fork=True, steps=STEPS + 2)
    assert (found.ledger.steps, len(found.ledger.earlier)) == (2, 1)
    assert spent(store) == pytest.approx(plan(STEPS + 2).epsilon(), rel=1e-3)


def test_a_parent_that_was_deleted_makes_no_room_for_another(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    run(base, store, out)
    for more in (1, 2):
        run(base, store, out, fork=True, steps=STEPS + more)
    shutil.rmtree(out / "earlier" / "001")
    kept = (out / "earlier" / "002" / "statement.json").read_bytes()
    run(base, store, out, fork=True, steps=STEPS + 3)
    assert (out / "earlier" / "002" / "statement.json").read_bytes() == kept
    assert Ledger.read(out / "earlier" / "003" / "ledger.jsonl").is_finished


def test_a_dry_run_is_one_of_its_own(base: Path, store: UserStore, tmp_path: Path) -> None:
    run(base, store, tmp_path / "dry", dry_run=True)
    with pytest.raises(InputError, match="nothing was trained"):
        run(base, store, tmp_path / "dry", resume=True)
    stopped(base, store, tmp_path / "r", 3)
    with pytest.raises(InputError, match="of its own"):
        run(base, store, tmp_path / "r", resume=True, dry_run=True)


class Later:
    """A schedule that begins to differ after some steps, so its first rate tells nothing."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def at(self, step: int) -> float:
        return self.factor if step > 2 else 1.0


def _late(factor: float, step: int) -> float:
    return factor if step > 2 else 1.0


def _by_table(factor: float) -> Callable[[int], float]:
    table = np.where(np.arange(9) > 2, factor, 1.0)
    return lambda step: float(table[step])


def _by_keyword(factor: float) -> Callable[[int], float]:
    def rate(step: int, *, late: float = factor) -> float:
        return late if step > 2 else 1.0

    return rate


@pytest.mark.parametrize(
    "kind",
    [
        lambda factor: functools.partial(_late, factor),
        lambda factor: Later(factor).at,
        _by_table,
        _by_keyword,
    ],
    ids=["partial", "method", "table", "keyword"],
)
def test_schedules_that_differ_later_have_other_names(kind: Any) -> None:
    def name(factor: float) -> str:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        return code_digest(torch.optim.lr_scheduler.LambdaLR(optimizer, kind(factor)))

    assert name(0.5) == name(0.5)
    assert name(0.5) != name(0.1)


def test_code_and_attributes_of_ones_own_have_other_names() -> None:
    class Scaled(torch.optim.SGD):
        scale: float

    layer = torch.nn.Linear(2, 1)
    first, second = (Scaled(layer.parameters(), lr=0.1) for _ in range(2))
    assert optimizer_digest(first) == optimizer_digest(second)
    second.scale = 2.0
    assert optimizer_digest(first) != optimizer_digest(second)

    def net(forward: Callable[[Any, Any], Any]) -> str:
        kind = type("Net", (torch.nn.Linear,), {"forward": forward})
        return model_digest(kind(2, 1))

    assert net(lambda _, x: x) == net(lambda _, x: x)
    assert net(lambda _, x: x) != net(lambda _, x: x + x.mean(0))


def test_a_finished_run_is_not_given_for_another_configuration(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    config = tmp_path / "train.toml"
    config.write_text("[training]\nlearning_rate = 0.01\n")
    run(base, store, tmp_path / "r", config=config)
    run(base, store, tmp_path / "r", config=config, resume=True)
    config.write_text("[training]\nlearning_rate = 0.5\n")
    with pytest.raises(InputError, match="under another configuration"):
        run(base, store, tmp_path / "r", config=config, resume=True)
    (tmp_path / "r" / "config.toml").unlink()
    with pytest.raises(LedgerError, match="restore it"):
        run(base, store, tmp_path / "r", config=config, resume=True)


def test_a_run_that_fails_holds_its_lock_until_its_save_has_ended(
    base: Path, store: UserStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Any = Checkpoints._write

    def slow(self: Checkpoints, *content: Any) -> None:
        time.sleep(0.5)
        write(self, *content)

    monkeypatch.setattr(Checkpoints, "_write", slow)
    stopped(base, store, tmp_path / "r", 3)
    assert (tmp_path / "r" / "checkpoints" / "step-000000002").is_dir()


def test_a_copy_that_is_forked_while_the_run_goes_on_takes_nothing_from_the_budget(
    base: Path, store: UserStore, tmp_path: Path
) -> None:
    """The budget would have said 1.74 for 2.26."""
    stopped(base, store, tmp_path / "r", 3)
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    model, tokenizer = load_model(base)

    def fork(done: int) -> None:
        if done == 4:
            run(base, store, tmp_path / "copy", fork=True, steps=4)

    userdp.train(
        model,
        tokenizer,
        store,
        plan(),
        optimizer=make_optimizer(model, "adamw", 0.01),
        sequence_length=16,
        settings=userdp.StepSettings(path="plain"),
        out=tmp_path / "r",
        resume=True,
        on_step=fork,
    )
    assert spent(store) == pytest.approx(plan(STEPS + 2).epsilon(), rel=1e-3)
