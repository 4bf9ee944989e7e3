"""Runs that were stopped go on bit for bit; forks and longer runs are charged for what they add."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import userdp
from tiny import make_model, make_store
from userdp import Lora, Plan, load_model
from userdp.clipping.rules import AdaptiveClip, ScheduledClip
from userdp.data.store import UserStore
from userdp.digests.of_runs import trained_digest
from userdp.errors import BudgetExhaustedError, InputError, LedgerError
from userdp.files.interrupts import InterruptedRunError
from userdp.ledger.book import Ledger
from userdp.losses import Batch, causal_lm_loss
from userdp.names.optimizers import OPTIMIZERS
from userdp.noise import draw
from userdp.optimizers.by_name import make_optimizer, make_schedule
from userdp.runs.check import check_run
from userdp.runs.checkpoints import Saving, checkpoints_of
from userdp.streams import RunSecret
from userdp.tasks import CausalTask
from userdp.training.loop import Run
from userdp.updates.fedavg import FedAvg

STEPS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    make_store(path / "store", [1, 2, 3, 4, 2, 5] * 4)
    make_model(path / "base")
    return path


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 24,
        "expected_cohort_size": 6,
        "group_size": 3,
        "steps": STEPS,
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "delta": 1e-2,
    }
    return Plan.sample_users(**(settings | changes))


def store_of(root: Path, out: Path, name: str = "store") -> UserStore:
    """A copy of the store for one run, with a budget of its own."""
    own = out.parent / f"{out.name}-{name}"
    if not own.exists():
        shutil.copytree(root / name, own)
    return UserStore.open(own)


class Stopped(Exception):
    """The test stops the run here, as a kill would."""


def run(
    root: Path,
    out: Path,
    *,
    stop_after: int | None = None,
    lora: Lora | None = None,
    lr: float = 0.01,
    store: str = "store",
    chosen: Plan | None = None,
    seed: int | None = 3,
    every: int | None = 2,
    schedule: str = "linear",
    optimizer: str = "adamw",
    seen: list[dict[str, torch.Tensor]] | None = None,
    **options: Any,
) -> Run:
    torch.manual_seed(0 if lora is None else int.from_bytes(out.name.encode()) % 1000)
    model, tokenizer = load_model(root / "base", lora=lora)
    made = make_optimizer(model, optimizer, lr)
    wanted = chosen or plan()

    def on_step(done: int) -> None:
        if seen is not None:
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if stop_after is not None and done == stop_after:
            raise Stopped

    return userdp.train(
        model,
        tokenizer,
        store_of(root, out, store),
        wanted,
        optimizer=made,
        scheduler=make_schedule(made, schedule, wanted.steps),
        sequence_length=16,
        # Faster to set up; the fast path goes on in tests of its own.
        settings=options.pop("settings", userdp.StepSettings(path="plain")),
        out=out,
        secret=None if seed is None else RunSecret.fixed_for_tests(seed),
        saving=Saving(every_steps=every),
        on_step=on_step,
        **options,
    )


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def assert_same(one: Run, other: Run) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.path is not None
    assert other.path is not None
    for name in ("ledger.jsonl", "statement.json"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()
    for path in sorted((one.path / "model").iterdir()):
        assert path.read_bytes() == (other.path / "model" / path.name).read_bytes(), path.name


@pytest.fixture(scope="module")
def whole(root: Path) -> Run:
    return run(root, root / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {"update": FedAvg(local_learning_rate=0.5, local_batch_size=1, user_weight_cap=2.0)},
        {"update": FedAvg(local_learning_rate=0.5, estimator="f_c", min_weight=20.0)},
        {"clip_norm": None, "clip": ScheduledClip(phases=((0, 0.5), (3, 0.1)))},
    ],
    ids=["fedavg", "f_c", "schedule"],
)
def test_local_training_and_scheduled_clipping_go_on_bit_for_bit(
    root: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    chosen, settings = plan(**changes), userdp.StepSettings(path="fast")
    straight = run(root, tmp_path / "a", chosen=chosen, settings=settings)
    with pytest.raises(Stopped):
        run(root, tmp_path / "b", chosen=chosen, settings=settings, stop_after=3)
    assert_same(straight, run(root, tmp_path / "b", chosen=chosen, settings=settings, resume=True))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 6])
def test_a_stopped_run_ends_as_if_it_had_not_been(
    root: Path, whole: Run, tmp_path: Path, stop_after: int
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=stop_after)
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").steps == stop_after
    found = run(root, tmp_path / "r", resume=True)
    assert_same(found, whole)
    assert found.ledger.steps == STEPS


def test_two_stops_and_a_resume_that_is_stopped(root: Path, whole: Run, tmp_path: Path) -> None:
    for stop_after, options in ((3, {}), (4, {"resume": True}), (4, {"resume": True})):
        with pytest.raises(Stopped):
            run(root, tmp_path / "r", stop_after=stop_after, **options)
    assert_same(run(root, tmp_path / "r", resume=True), whole)


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_adaptive_clipping_and_the_plain_path_go_on(root: Path, tmp_path: Path, path: Any) -> None:
    clip = AdaptiveClip(clip_norm=0.1, learning_rate=0.5, count_noise=5.0)
    options = {
        "chosen": plan(clip=clip, clip_norm=None),
        "settings": userdp.StepSettings(path=path),
    }
    whole = run(root, tmp_path / "a", **options)
    with pytest.raises(Stopped):
        run(root, tmp_path / "b", stop_after=5, **options)
    assert_same(run(root, tmp_path / "b", resume=True, **options), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_goes_on(root: Path, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"chosen": plan(steps=3), "optimizer": name, "every": 1, "lr": 1e-3}
    whole = run(root, tmp_path / "a", **options)
    with pytest.raises(Stopped):
        run(root, tmp_path / "b", stop_after=2, **options)
    # The checkpoint after step 2 was being written when the run was stopped.
    assert_same(run(root, tmp_path / "b", resume=True, **options), whole)


def test_released_is_the_average_of_the_weights_after_each_step(root: Path, tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    found = run(root, tmp_path / "r", ema=0.6, seen=seen)
    shares = [0.6 ** (STEPS - 1 - step) for step in range(STEPS)]
    for name, weight in weights(found).items():
        together = zip(shares, seen, strict=True)
        expected = sum(share * after[name].double() for share, after in together) / sum(shares)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-7)
    loaded, _ = load_model(tmp_path / "r" / "model")
    assert all(torch.equal(p, weights(found)[name]) for name, p in loaded.named_parameters())
    assert found.ledger.end is not None
    assert found.ledger.end["digests"]["final_weights"] == trained_digest(found.model)
    assert check_run(tmp_path / "r").ok
    # A finished run gives what it released, not the weights that a longer run goes on from.
    assert_same(run(root, tmp_path / "r", ema=0.6, resume=True), found)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 3, STEPS])
def test_an_average_goes_on(root: Path, tmp_path: Path, stop_after: int) -> None:
    whole = run(root, tmp_path / "a", ema=0.9)
    with pytest.raises(Stopped):
        run(root, tmp_path / "b", stop_after=stop_after, ema=0.9)
    with pytest.raises(InputError, match=r"average of the weights \(ema\)"):
        run(root, tmp_path / "b", resume=True)
    assert_same(run(root, tmp_path / "b", resume=True, ema=0.9), whole)


@pytest.mark.slow
def test_a_longer_run_goes_on_from_the_weights_and_not_from_their_average(
    root: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"ema": 0.9, "chosen": plan(steps=STEPS + 2)}
    ended: list[Run] = []
    for name, stop_after in (("a", None), ("b", 1)):
        released = weights(run(root, tmp_path / name, ema=0.9))
        last = checkpoints_of(tmp_path / name).newest()
        if stop_after is not None:
            with pytest.raises(Stopped):
                run(root, tmp_path / name, resume=True, stop_after=stop_after, **options)
        ended.append(run(root, tmp_path / name, resume=True, **options))
        began, now = (
            checkpoints_of(tmp_path / name).initial(),
            checkpoints_of(tmp_path / name).newest(),
        )
        assert last is not None
        assert began is not None
        assert now is not None
        assert all(torch.equal(value, last.weights[n]) for n, value in began.weights.items())
        assert any(not torch.equal(value, released[n]) for n, value in began.weights.items())
        assert now.state["average"]["updates"] == STEPS + 2
    assert_same(*ended)


@pytest.mark.parametrize("freeze_a", [False, True])
def test_adapters_that_were_drawn_at_random_go_on(
    freeze_a: bool, root: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lora": Lora(rank=2, freeze_a=freeze_a), "every": None}
    with pytest.raises(Stopped):
        run(root, tmp_path / "one", stop_after=4, **options)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    # No step was saved: all are taken again, from the adapters that the first process drew.
    first = run(root, tmp_path / "one", resume=True, **options)
    assert_same(first, run(root, tmp_path / "two", resume=True, **options))
    assert first.ledger.steps == STEPS


def test_without_a_fixed_seed_the_secret_is_kept_for_the_owner_alone(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3, seed=None)
    secret = tmp_path / "r" / "secret" / "noise.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    ended = run(root, tmp_path / "r", resume=True, seed=None)
    assert ended.statement.guarantee
    assert [step for step, _ in ended.ledger.continuations] == [3]


def test_copies_of_a_run_that_go_on_repeat_what_was_charged_and_share_no_noise(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3, seed=None)
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    seen: dict[str, list[dict[str, torch.Tensor]]] = {"r": [], "copy": []}
    for name, found in seen.items():
        ended = run(root, tmp_path / name, resume=True, seed=None, seen=found)
        assert ended.statement.guarantee
    # The third step was charged: it is the same. Steps after it have noise of their own: with the
    # same noise, another callback in the copy would show the data.
    same = [
        all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in zip(seen["r"], seen["copy"], strict=True)
    ]
    assert same == [True, *[False] * (len(same) - 1)]
    rows = (tmp_path / "copy" / "ledger.jsonl").read_text().splitlines()
    kinds = [json.loads(row)["kind"] for row in rows]
    assert kinds[:6] == ["run", "step", "step", "step", "continued", "step"]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    root: Path, whole: Run, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=5)
    newest = sorted((tmp_path / "r" / "checkpoints").iterdir())[-1]
    (newest / "state.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=f"{newest.name}/state.safetensors: damaged"):
        found = run(root, tmp_path / "r", resume=True)
    assert_same(found, whole)


def test_a_torn_row_is_taken_again(root: Path, whole: Run, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3)
    ledger = tmp_path / "r" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert_same(run(root, tmp_path / "r", resume=True), whole)


def test_a_run_that_was_stopped_before_its_first_step_begins_again(
    root: Path, whole: Run, tmp_path: Path
) -> None:
    (tmp_path / "r" / "secret").mkdir(parents=True)
    (tmp_path / "r" / "secret" / "noise.key").write_text("half a ke")
    (tmp_path / "r" / "ledger.jsonl").write_text('{"kind": "ru')
    assert_same(run(root, tmp_path / "r", resume=True), whole)


def test_a_finished_run_stays_as_it_is(root: Path, whole: Run, tmp_path: Path) -> None:
    shutil.copytree(root / "whole", tmp_path / "r")
    (tmp_path / "r" / "statement.json").unlink()
    assert_same(run(root, tmp_path / "r", resume=True), whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.02}, "learning rate"),
        ({"schedule": "constant"}, "learning rate schedule"),
        ({"chosen": plan(noise_multiplier=2.0)}, "privacy settings"),
        ({"chosen": plan(steps=STEPS + 1)}, "learning rate schedule|privacy settings"),
        ({"settings": userdp.StepSettings(path="fast")}, "settings of the step"),
        ({"store": "other"}, "another store"),
        ({"lora": Lora(rank=2)}, "model"),
        ({"seed": None}, "secret is lost|kind of seed"),
    ],
)
def test_a_run_goes_on_only_as_it_began(
    root: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    if not (root / "other").exists():
        make_store(root / "other", [1, 2, 3, 4, 2, 5] * 4, seed=1)
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3)
    before = (tmp_path / "r" / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match=named):
        run(root, tmp_path / "r", resume=True, **changes)
    assert (tmp_path / "r" / "ledger.jsonl").read_bytes() == before


def twice(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return 2 * causal_lm_loss(model, batch)


class OwnTask(CausalTask):
    """A task of one's own that says nothing of its code by its name."""

    def batch(self, rows: Any, group: Any, rng: Any) -> Batch:
        return super().batch(rows, group, rng)


class OtherBatch(OwnTask):
    def batch(self, rows: Any, group: Any, rng: Any) -> Batch:
        return {name: values[:, :4] for name, values in super().batch(rows, group, rng).items()}


class OtherLoss(OwnTask):
    @property
    def record_loss(self) -> Any:
        return twice


@pytest.mark.parametrize("other", [OtherBatch, OtherLoss])
def test_a_run_goes_on_with_the_code_of_its_own_task_only(
    root: Path, tmp_path: Path, other: type[OwnTask]
) -> None:
    # As if somebody had edited the file of the task meanwhile.
    other.__qualname__ = OwnTask.__qualname__
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3, task=OwnTask(pad_token=0))
    with pytest.raises(InputError, match="code of its task or loss"):
        run(root, tmp_path / "r", resume=True, task=other(pad_token=0))
    run(root, tmp_path / "r", resume=True, task=OwnTask(pad_token=0))


def test_other_code_and_other_hardware_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=3)
    with monkeypatch.context() as patched:
        patched.setattr("userdp.runs.same.code_version", lambda: "another version")
        with pytest.raises(InputError, match="version of this package"):
            run(root, tmp_path / "r", resume=True)
    with monkeypatch.context() as patched:
        patched.setattr("userdp.runs.same.hardware_of", lambda _: "another chip")
        with pytest.raises(InputError, match=r"1 steps since the last checkpoint .* another chip"):
            run(root, tmp_path / "r", resume=True)
        # The checkpoint after step 2 is the ledger's end once its row of step 3 is gone.
        ledger = tmp_path / "r" / "ledger.jsonl"
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
        run(root, tmp_path / "r", resume=True)


def test_a_ledger_that_was_cut_below_a_checkpoint_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=5)
    ledger = tmp_path / "r" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(LedgerError, match="cut off"):
        run(root, tmp_path / "r", resume=True)


def test_weights_cannot_be_slipped_into_a_repeated_step(root: Path, tmp_path: Path) -> None:
    """Two runs of one step with one noise, from other weights, would show the step's data."""
    with pytest.raises(Stopped):
        run(root, tmp_path / "a", stop_after=3)
    with pytest.raises(Stopped):
        run(root, tmp_path / "b", stop_after=3, lr=0.5)
    ours, theirs = (tmp_path / name / "checkpoints" / "step-000000002" for name in "ab")
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    # Under a fixed seed both runs have one key; the ledger's hash tells them apart.
    with pytest.raises(LedgerError):
        run(root, tmp_path / "a", resume=True)


def test_a_fork_has_other_noise_and_is_charged(root: Path, whole: Run, tmp_path: Path) -> None:
    shutil.copytree(root / "whole", tmp_path / "r")
    found = run(root, tmp_path / "r", fork=True, fork_step=4, lr=0.0, chosen=plan(), resume=True)
    assert found.ledger.steps == STEPS - 4
    assert [item.steps for item in found.ledger.earlier] == [STEPS]
    together = userdp.Plan.epsilon(plan(steps=STEPS + STEPS - 4))
    assert found.statement.epsilon == pytest.approx(together, rel=1e-3)
    assert (tmp_path / "r" / "earlier" / "001" / "ledger.jsonl").is_file()
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").is_finished
    # A learning rate of zero keeps the weights of the checkpoint.
    kept = [d.name for d in sorted((tmp_path / "r" / "earlier" / "001" / "checkpoints").iterdir())]
    assert kept == ["step-000000004", "step-000000006"]


def test_a_fork_that_is_stopped_goes_on(root: Path, tmp_path: Path, whole: Run) -> None:
    ended: dict[str, Run] = {}
    for name, stop_after in (("a", None), ("b", 2)):
        shutil.copytree(root / "whole", tmp_path / name)
        options: dict[str, Any] = {"lr": 0.02, "chosen": plan(steps=STEPS + 3)}
        if stop_after is None:
            ended[name] = run(root, tmp_path / name, fork=True, **options)
            continue
        with pytest.raises(Stopped):
            run(root, tmp_path / name, fork=True, stop_after=stop_after, **options)
        ended[name] = run(root, tmp_path / name, resume=True, **options)
    assert_same(ended["a"], ended["b"])
    assert ended["a"].ledger.steps == 3


def test_a_finished_run_goes_on_with_more_steps(root: Path, whole: Run, tmp_path: Path) -> None:
    shutil.copytree(root / "whole", tmp_path / "r")
    longer = run(root, tmp_path / "r", resume=True, chosen=plan(steps=STEPS + 2))
    assert longer.ledger.steps == 2
    assert longer.statement.epsilon == pytest.approx(plan(steps=STEPS + 2).epsilon(), rel=1e-3)
    again = run(root, tmp_path / "r", resume=True, chosen=plan(steps=STEPS + 3))
    assert [item.steps for item in again.ledger.earlier] == [STEPS, 2]
    assert again.ledger.steps == 1


def test_a_fork_that_was_stopped_while_it_moved_files_begins_again(
    root: Path, whole: Run, tmp_path: Path
) -> None:
    shutil.copytree(root / "whole", tmp_path / "r")
    moved = tmp_path / "r" / "earlier" / "001"
    moved.mkdir(parents=True)
    (tmp_path / "r" / "checkpoints").rename(moved / "checkpoints")
    found = run(root, tmp_path / "r", fork=True, fork_step=4, lr=0.02)
    assert [item.steps for item in found.ledger.earlier] == [STEPS]


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_the_step_and_saves(
    root: Path, whole: Run, tmp_path: Path, number: int
) -> None:
    import signal

    def tell(done: int) -> None:
        if done == 3:
            signal.raise_signal(number)

    model, tokenizer = load_model(root / "base")
    optimizer = make_optimizer(model, "adamw", 0.01)
    with pytest.raises(InterruptedRunError, match="stopped after step 3") as stopped:
        userdp.train(
            model,
            tokenizer,
            store_of(root, tmp_path / "r"),
            plan(),
            optimizer=optimizer,
            scheduler=make_schedule(optimizer, "linear", STEPS),
            sequence_length=16,
            settings=userdp.StepSettings(path="plain"),
            out=tmp_path / "r",
            secret=RunSecret.fixed_for_tests(3),
            saving=Saving(every_steps=None),
            on_step=tell,
        )
    assert stopped.value.exit_code == 128 + number
    assert (tmp_path / "r" / "checkpoints" / "step-000000003").is_dir()
    assert_same(run(root, tmp_path / "r", resume=True), whole)


def test_a_run_in_memory_has_nothing_to_go_on_from(root: Path) -> None:
    model, tokenizer = load_model(root / "base")
    with pytest.raises(InputError, match="need `out`"):
        userdp.train(model, tokenizer, UserStore.open(root / "store"), plan(), resume=True)


def test_the_ledger_row_of_every_step_stays_where_it_was(
    root: Path, whole: Run, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(root, tmp_path / "r", stop_after=5)
    written = (tmp_path / "r" / "ledger.jsonl").read_bytes()
    run(root, tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "ledger.jsonl").read_bytes().startswith(written)
    lines = (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(STEPS))


def test_a_run_is_counted_once_for_its_people_however_often_it_is_stopped(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    people = userdp.Population.of(store_of(root, out))
    with pytest.raises(Stopped):
        run(root, out, stop_after=3, seed=None)
    # A stopped run may go on, so all its steps stay counted.
    assert people.spent(1e-2).epsilon == pytest.approx(plan().epsilon(), rel=1e-3)
    run(root, out, resume=True, seed=None)
    assert people.spent(1e-2).epsilon == pytest.approx(plan().epsilon(), rel=1e-3)
    # A fork of the last checkpoint adds its own steps to all of its parent's.
    longer = run(root, out, fork=True, seed=None, chosen=plan(steps=STEPS + 4), lr=0.02)
    assert people.spent(1e-2).epsilon == pytest.approx(plan(steps=STEPS + 4).epsilon(), rel=1e-3)
    assert longer.statement.others == ()
    # A run of its own names the others, and everything together.
    alone = run(root, tmp_path / "r2", seed=None, resume=False)
    assert alone.statement.others == ()
    model, tokenizer = load_model(root / "base")
    second = userdp.train(
        model, tokenizer, store_of(root, out), plan(), sequence_length=16, out=tmp_path / "second"
    )
    assert len(second.statement.others) == 2
    everything = plan(steps=2 * STEPS + 4).epsilon()
    assert second.statement.epsilon_of_all == pytest.approx(everything, rel=1e-3)
    assert second.statement.epsilon == pytest.approx(plan().epsilon(), rel=1e-3)


def test_a_run_that_would_pass_the_limit_is_refused_with_nothing_written(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    people = userdp.Population.of(store_of(root, out))
    people.set_limit(plan().epsilon() * 1.01, 1e-2)
    assert run(root, out).ledger.steps == STEPS
    before = (people.path / "budget.jsonl").read_bytes()
    model, tokenizer = load_model(root / "base")
    with pytest.raises(BudgetExhaustedError):
        userdp.train(
            model,
            tokenizer,
            store_of(root, out),
            plan(steps=1),
            sequence_length=16,
            out=tmp_path / "x",
        )
    assert (people.path / "budget.jsonl").read_bytes() == before
    assert not (tmp_path / "x").exists()


def test_a_run_that_is_refused_or_gives_up_before_its_first_step_costs_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    people = userdp.Population.of(store_of(root, out))

    def refuse(*_: object, **__: object) -> None:
        raise InputError("not with this model")

    def killed(*_: object, **__: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr("userdp.step.PrivateStep.check_model", refuse)
        with pytest.raises(InputError, match="not with this model"):
            run(root, out, seed=None)
        assert people.spent(1e-2).epsilon == 0
        patched.setattr("userdp.step.PrivateStep.check_model", killed)
        with pytest.raises(Stopped):
            run(root, out, seed=None)
    # The new run takes the place of the one that never began.
    run(root, out, seed=None, resume=True)
    assert people.spent(1e-2).epsilon == pytest.approx(plan().epsilon(), rel=1e-3)


def test_row_13_a_fork_at_step_50_shares_no_noise_with_its_parent(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[tuple[str, int], torch.Tensor] = {}
    name = ["parent"]
    real = draw.add_normal_

    def watched(values: torch.Tensor, *, step: int, streams: Any, **options: Any) -> None:
        real(values, step=step, streams=streams, **options)
        # The fork's step 0 comes after the parent's step 49.
        place = step - 50 if name[0] == "parent" else step
        if place in (0, 1):
            noise = torch.zeros(1_000_000)
            real(noise, offset=0, size=len(noise), stddev=1.0, step=step, streams=streams)
            drawn[name[0], place] = noise

    monkeypatch.setattr(draw, "add_normal_", watched)
    long, out = plan(steps=52), tmp_path / "r"
    run(root, out, chosen=long, every=50)
    name[0] = "fork"
    forked = run(root, out, chosen=long, every=50, fork=True, fork_step=50, lr=0.02)
    assert forked.ledger.steps == 2
    assert [item.steps for item in forked.ledger.earlier] == [52]
    everything = torch.stack(list(drawn.values()))
    assert len(everything) == 4
    # The standard error is 0.001 at a million numbers; one of six independent pairs is beyond 6 of
    # them with probability 1e-8. The seed is fixed, but noise is bound to the run, and so to each
    # version of this package.
    apart = torch.corrcoef(everything) - torch.eye(4)
    assert float(apart.abs().max()) < 0.006
