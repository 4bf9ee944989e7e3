"""Attacks on what a run remembers: cut ledgers, copies, shared seeds, and secrets that are left."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from cli_runner import userdp as userdp_command
from tiny import make_model, make_store
from userdp import Plan, Population, UserStore, load_model
from userdp.budget.debits import settle
from userdp.errors import BudgetExhaustedError, InputError, LedgerError
from userdp.files.remembered import SUMS
from userdp.ledger.book import Ledger
from userdp.optimizers.by_name import make_optimizer
from userdp.prices.earlier import Earlier
from userdp.runs.checkpoints import Saving
from userdp.runs.finalize import finalize
from userdp.streams import RunSecret
from userdp.training.loop import Run

DELTA = 1e-2


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("durable")
    make_store(path / "store", [1, 2, 3, 4, 2, 5] * 4)
    make_model(path / "base")
    return path


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A store and a model of one test alone, so that it has a budget of its own."""
    shutil.copytree(original, tmp_path / "root")
    return tmp_path / "root"


class Stopped(Exception):
    """The test stops the run here, as a kill would."""


def plan(steps: int = 6) -> Plan:
    return Plan.sample_users(
        num_users=24,
        expected_cohort_size=6,
        group_size=3,
        steps=steps,
        clip_norm=0.5,
        noise_multiplier=1.0,
        delta=DELTA,
    )


def train(
    root: Path,
    name: str | None = "run",
    *,
    model: Any = None,
    steps: int = 6,
    stop_after: int | None = None,
    lr: float = 0.01,
    seed: int | None = None,
    store: str = "store",
    **options: Any,
) -> Run:
    loaded, tokenizer = load_model(root / "base")
    model = loaded if model is None else model

    def on_step(done: int) -> None:
        if done == stop_after:
            raise Stopped

    return userdp.train(
        model,
        tokenizer,
        UserStore.open(root / store),
        plan(steps),
        optimizer=make_optimizer(model, "adamw", lr),
        sequence_length=16,
        # What is attacked here is the same on both paths, and this one is faster to set up.
        settings=userdp.StepSettings(path="plain"),
        out=None if name is None else root / name,
        secret=None if seed is None else RunSecret.fixed_for_tests(seed),
        saving=Saving(every_steps=2),
        on_step=options.pop("on_step", on_step),
        **options,
    )


def stopped(root: Path, name: str | None = "run", *, after: int = 5, **options: Any) -> None:
    with pytest.raises(Stopped):
        train(root, name, stop_after=after, **options)


def people(root: Path, store: str = "store") -> Population:
    return Population.of(UserStore.open(root / store))


def spent(root: Path, store: str = "store") -> float:
    found = people(root, store).spent(DELTA).epsilon
    assert found is not None
    return found


def cut(run: Path, steps: int) -> None:
    """Leave the rows up to so many steps. Without a key this can be done, and the chain holds."""
    kept: list[bytes] = []
    for line in (run / "ledger.jsonl").read_bytes().splitlines(keepends=True):
        kind = json.loads(line)["kind"]
        if kind == "end" or (kind == "step" and not steps):
            break
        steps -= kind == "step"
        kept.append(line)
    (run / "ledger.jsonl").write_bytes(b"".join(kept))


def test_a_fork_of_a_cut_ledger_is_refused(root: Path) -> None:
    # The fork would begin with the weights of 4 steps, and count 1 of them.
    stopped(root)
    cut(root / "run", 1)
    with pytest.raises(LedgerError, match="cut off"):
        train(root, fork=True, lr=0.02)
    assert spent(root) == pytest.approx(plan().epsilon())


@pytest.mark.parametrize("are_sums_known", [True, False])
def test_a_fork_of_a_ledger_cut_beside_its_model_is_refused(
    root: Path, are_sums_known: bool
) -> None:
    # The checkpoints are gone, too; that there is a model shows that the run came to its end.
    train(root)
    cut(root / "run", 1)
    shutil.rmtree(root / "run" / "checkpoints")
    if not are_sums_known:
        (root / "run" / SUMS).write_bytes(b"")
    with pytest.raises(LedgerError, match="cut off"):
        train(root, fork=True, lr=0.02)


@pytest.mark.parametrize("rows", ["first row", "empty", "gone"])
def test_a_run_whose_ledger_is_lost_is_not_deleted_and_stays_counted(root: Path, rows: str) -> None:
    stopped(root)
    ledger = root / "run" / "ledger.jsonl"
    if rows == "first row":
        cut(root / "run", 0)
    elif rows == "empty":
        ledger.write_bytes(b"")
    else:
        ledger.unlink()
    secret = (root / "run" / "secret" / "noise.key").read_bytes()
    with pytest.raises(LedgerError, match="Restore"):
        train(root, resume=True)
    assert (root / "run" / "secret" / "noise.key").read_bytes() == secret
    assert list((root / "run" / "checkpoints").glob("step-*"))
    assert spent(root) == pytest.approx(plan().epsilon())


def test_giving_up_a_cut_run_frees_nothing(root: Path) -> None:
    stopped(root)
    cut(root / "run", 1)
    with pytest.raises(LedgerError, match="rows were cut off"):
        finalize(root / "run", unfinished=True)
    assert spent(root) == pytest.approx(plan().epsilon())


def test_what_a_run_said_it_took_is_never_lowered(root: Path) -> None:
    train(root)
    cut(root / "run", 1)
    # Without checkpoints and sums beside it, a cut ledger looks like that of a shorter run.
    shutil.rmtree(root / "run" / "checkpoints")
    (root / "run" / SUMS).unlink()
    settle(people(root), Ledger.read(root / "run" / "ledger.jsonl"))
    assert spent(root) == pytest.approx(plan().epsilon())


@pytest.mark.parametrize("fixed_seed", [True, False])
def test_a_run_that_was_settled_or_has_a_fixed_seed_keeps_its_steps(
    root: Path, fixed_seed: bool
) -> None:
    train(root)
    before = spent(root)
    whole = {"event": plan().event(), "steps": 6}
    people(root).reserve(
        run="a" * 64, what="", where="", adjacency=plan().adjacency, fixed_seed=fixed_seed, **whole
    )
    both = spent(root)
    assert both > before
    if not fixed_seed:
        people(root).settle("a" * 64, **whole)
    # Of two runs with one seed the shorter one may end last; of a run, a copy that is older.
    people(root).settle("a" * 64, event=plan().event(2), steps=2)
    assert spent(root) == pytest.approx(both)


def test_forking_a_copy_of_a_run_takes_nothing_from_the_original(root: Path) -> None:
    stopped(root, after=3)
    shutil.copytree(root / "run", root / "copy")
    train(root, resume=True)
    stopped(root, "copy", after=1, fork=True, lr=0.02)
    # The fork began after 2 steps, or after none if that checkpoint was not saved yet.
    assert spent(root) >= plan(6 + 4).epsilon() * (1 - 1e-9)


def test_a_copy_that_is_given_up_meanwhile_leaves_all_steps_counted(root: Path) -> None:
    stopped(root, after=3)
    shutil.copytree(root / "run", root / "copy")

    def give_up_copy(done: int) -> None:
        if done == 5:
            settle(people(root), Ledger.read(root / "copy" / "ledger.jsonl"))

    train(root, resume=True, on_step=give_up_copy)
    assert spent(root) == pytest.approx(plan().epsilon())


def test_runs_of_one_seed_do_not_take_back_each_others_steps(root: Path) -> None:
    stopped(root, after=5, seed=7)
    stopped(root, None, after=1, seed=7)
    assert spent(root) == pytest.approx(plan().epsilon())


def test_more_steps_behind_the_weights_are_counted_when_they_come(root: Path) -> None:
    def reserve(run: str, steps: int) -> None:
        behind = Earlier(
            run="f" * 64,
            data="",
            plan=plan().to_json(),
            event=plan().event(steps),
            steps=steps,
            adjacency=plan().adjacency,
            fixed_seed=False,
        )
        people(root).reserve(
            run=run * 64,
            what="",
            where="",
            event=plan().event(),
            steps=6,
            adjacency=plan().adjacency,
            earlier=[behind],
        )

    reserve("a", 3)
    assert spent(root) == pytest.approx(plan(3 + 6).epsilon())
    reserve("b", 6)
    assert spent(root) == pytest.approx(plan(6 + 6 + 6).epsilon())


def test_a_copy_from_the_middle_of_a_run_inherits_its_whole_plan(root: Path) -> None:
    # The people of the first run are counted elsewhere, and its model is trained on twice.
    shutil.copytree(root / "store", root / "other")
    model, _ = load_model(root / "base")
    copies: list[torch.nn.Module] = []

    def keep(done: int) -> None:
        if done == 3:
            copies.append(copy.deepcopy(model))
            train(root, None, model=copies[0])

    train(root, None, model=model, store="other", on_step=keep)
    # Who copied the model after three steps may have looked at it: the whole run is inherited.
    assert spent(root) == pytest.approx(plan(6 + 6).epsilon())
    train(root, None, model=model)
    assert spent(root) == pytest.approx(plan(6 + 6 + 6).epsilon())


def test_finalize_destroys_the_secrets_of_the_runs_before_a_fork(root: Path) -> None:
    stopped(root)
    stopped(root, after=1, fork=True, lr=0.02)
    train(root, fork=True, lr=0.03)
    assert len(list((root / "run").rglob("noise.key"))) == 3
    finalize(root / "run")
    assert not list((root / "run").rglob("noise.key"))
    assert not list((root / "run").rglob("checkpoints"))


def test_a_finalized_run_takes_no_further_step(root: Path) -> None:
    # It would begin again with the first weights, and be charged for all steps.
    train(root)
    finalize(root / "run")
    with pytest.raises(InputError, match="finalized"):
        train(root, resume=True, steps=8)
    assert spent(root) == pytest.approx(plan().epsilon())


def test_a_run_stopped_before_its_first_step_leaves_its_room_to_the_next_try(root: Path) -> None:
    people(root).set_limit(plan().epsilon() * 1.01, DELTA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("userdp.training.loop.PrivateStep", stop_now)
        with pytest.raises(Stopped):
            train(root)
    assert spent(root) == pytest.approx(plan().epsilon())
    train(root, resume=True)
    assert spent(root) == pytest.approx(plan().epsilon())


def stop_now(*_: Any, **__: Any) -> None:
    raise Stopped


def test_a_fork_pays_for_the_whole_plan_of_its_parent(root: Path) -> None:
    # The parent planned six steps and took five. The fork begins after two of them.
    people(root).set_limit(plan(9).epsilon() * 1.001, DELTA)
    stopped(root)
    with pytest.raises(BudgetExhaustedError):
        train(root, fork=True, fork_step=2, lr=0.02)
    people(root).set_limit(plan(10).epsilon() * 1.001, DELTA)
    forked = train(root, fork=True, fork_step=2, lr=0.02)
    assert forked.statement.epsilon == pytest.approx(plan(6 + 4).epsilon())
    assert spent(root) == pytest.approx(plan(6 + 4).epsilon())


def test_a_run_that_is_given_up_pays_for_its_whole_plan(root: Path) -> None:
    stopped(root)
    assert not userdp_command("finalize", root / "run", "--unfinished").code
    assert spent(root) == pytest.approx(plan(6).epsilon())


def test_a_run_that_goes_on_elsewhere_is_not_settled_by_a_fork(root: Path) -> None:
    def fork_it(done: int) -> None:
        if done == 5:
            with pytest.raises(InputError, match="process"):
                train(root, fork=True, lr=0.02)

    train(root, on_step=fork_it)
    assert spent(root) == pytest.approx(plan().epsilon())


def test_a_fork_of_a_finalized_run_is_refused(root: Path) -> None:
    # Its checkpoints are destroyed: the fork would begin with the first weights.
    stopped(root)
    finalize(root / "run", unfinished=True)
    with pytest.raises(InputError, match="checkpoint"):
        train(root, fork=True, lr=0.02)


def test_giving_up_a_copy_without_steps_frees_nothing_that_the_original_took(root: Path) -> None:
    def copied_first(*args: Any, **options: Any) -> userdp.PrivateStep:
        shutil.copytree(root / "run", root / "copy")
        return userdp.PrivateStep(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("userdp.training.loop.PrivateStep", copied_first)
        stopped(root, after=5)
    (root / "copy" / "ledger.jsonl.lock").unlink(missing_ok=True)
    assert not userdp_command("finalize", root / "copy", "--unfinished").code
    assert spent(root) == pytest.approx(plan().epsilon())
