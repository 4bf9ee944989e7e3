"""What was spent is never forgotten: continued models, second runs, unpriced plans, selections."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

import userdp
from cli_runner import userdp as command
from tiny import WORDS, make_model, make_store
from userdp import Adjacency, Ledger, Lora, Plan, PrivateStep, UserIndex, load_model
from userdp.accounting.heavy_hitters import Votes
from userdp.bounding.edges import Edges
from userdp.bounding.selection import Selection
from userdp.budget.population import Population
from userdp.clipping.rules import FlatClip
from userdp.clipping.settings import StepSettings
from userdp.config.file import load_config
from userdp.data.record import Record
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import tokenise
from userdp.errors import InputError, LedgerError, UnaccountedPlanError
from userdp.history import ANCESTRY_FILE, history_of, merged
from userdp.ledger.lineage import UNCOMPARED_PAST, begin_run, earlier_runs
from userdp.noise.gaussian import Gaussian
from userdp.runs.opening import UNCHECKED_PEOPLE
from userdp.runs.record import RunRecord
from userdp.sampling import PoissonUsers
from userdp.streams import RunSecret
from userdp.training import rows as training_rows
from userdp.training.loop import Run

FIXED_GRAPH = [Adjacency.FIXED_GRAPH_ZERO_OUT, Adjacency.FIXED_GRAPH_REPLACE]
PUBLIC: dict[str, Any] = {
    "num_users": 20,
    "expected_cohort_size": 10,
    "group_size": 2,
    "steps": 3,
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "delta": 1e-3,
}


def the_plan(**changes: Any) -> Plan:
    return Plan.sample_users(**(PUBLIC | changes))


def oracle(plan: Plan, steps: int) -> float:
    """Another library's epsilon of so many steps."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(plan.event(steps))
    return float(accountant.get_epsilon(plan.delta))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores, a base model, and a finished run on the first store."""
    found = tmp_path_factory.mktemp("spending")
    store = make_store(found / "store", [2] * 20)
    make_model(found / "base")
    records = [
        Record(" ".join(np.random.default_rng(i).choice(WORDS, 5)), (f"v{i}",), "x")
        for i in range(20)
    ]
    write_store(records, found / "others", key=bytes(range(32)))
    write_store(records, found / "other key", key=bytes(32))
    model, tokenizer = load_model(found / "base")
    trained(model, tokenizer, store, out=found / "run")
    return found


def trained(model: Any, tokenizer: Any, store: UserStore, **options: Any) -> Run:
    plan = options.pop("plan", None) or the_plan()
    return userdp.train(
        model,
        tokenizer,
        store,
        plan,
        sequence_length=16,
        settings=StepSettings(path="plain"),
        **options,
    )


@pytest.mark.parametrize("adjacency", FIXED_GRAPH)
def test_user_sampling_under_a_fixed_graph_cannot_be_planned(adjacency: Adjacency) -> None:
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        the_plan(adjacency=adjacency)
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        the_plan(adjacency=adjacency, epsilon=4.0, noise_multiplier=None)
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        Plan(
            sampler=PoissonUsers(user_sampling_prob=0.5, group_size=2),
            clip=FlatClip(clip_norm=1.0),
            noise=Gaussian(noise_multiplier=2.0),
            steps=3,
            divisor=10.0,
            num_users=20,
            delta=1e-3,
            adjacency=adjacency,
        )
    with pytest.raises(UnaccountedPlanError, match="no accounting rule"):
        Plan.from_json(the_plan().to_json() | {"adjacency": adjacency.value})
    numbers = "--rate 0.5 --steps 3 --noise-multiplier 2 --delta 1e-3".split()
    assert command("account", *numbers, "--adjacency", adjacency.value).code == 2


def shared_store(path: Path) -> tuple[UserStore, Edges]:
    """One user owns five records together with others."""
    records = [Record(" ".join(WORDS[i : i + 3]), ("x", f"u{i}"), "r") for i in range(5)]
    records += [Record(" ".join(WORDS[i : i + 4]), (f"v{i}",), "s") for i in range(5)]
    write_store(records, path, key=bytes(range(32)))
    return UserStore.open(path), Edges.load(path)


def records_plan(group_size: int) -> Plan:
    return Plan.sample_records(
        num_users=20, num_records=10, expected_batch_size=5, group_size=group_size, steps=2,
        clip_norm=1.0, noise_multiplier=4.0, delta=1e-3, adjacency=Adjacency.FIXED_GRAPH_ZERO_OUT,
    )  # fmt: skip


def test_a_selection_larger_than_the_plan_or_of_other_edges_is_refused(
    tmp_path: Path, root: Path
) -> None:
    store, edges = shared_store(tmp_path / "shared")
    model, tokenizer = load_model(root / "base")
    selection = Selection.of(edges, np.ones(10, dtype=np.int64), 5, method="greedy")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(InputError, match=r"up to 5 records; the plan covers 4"):
        trained(model, tokenizer, store, plan=records_plan(4), selection=selection)
    elsewhere = Edges.from_lists([[i] for i in range(10)], num_users=10)
    foreign = Selection.of(elsewhere, np.ones(10, dtype=np.int64), 5, method="greedy")
    with pytest.raises(InputError, match="made for other edges"):
        trained(model, tokenizer, store, plan=records_plan(5), selection=foreign)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert trained(model, tokenizer, store, plan=records_plan(5), selection=selection).statement


@pytest.mark.parametrize("unit", ["user", "record"])
def test_the_realised_bound_is_not_used_where_it_is_secret(root: Path, unit: str) -> None:
    edges = Edges.load(root / "store")
    selection = Selection.of(edges, np.ones(40, dtype=np.int64), 7, method="greedy")
    assert selection.realised_bound == 2
    selection.save(root / "selection.npz")
    size = "expected_cohort_size" if unit == "user" else "expected_batch_size"
    (root / "selected.toml").write_text(
        f'[data]\nstore = "{root}/store"\nselection = "{root}/selection.npz"\n'
        f'[model]\npath = "{root}/base"\n[privacy]\nunit = "{unit}"\nnum_users = 20\n{size} = 5\n'
        "clip_norm = 1.0\nnoise_multiplier = 2.0\ndelta = 1e-3\n[training]\nsteps = 2\n"
    )
    assert load_config(root / "selected.toml").plan().sampler.group_size == 7


def test_a_saved_model_says_what_was_spent_and_training_on_composes_it(root: Path) -> None:
    store = UserStore.open(root / "store")
    model, tokenizer = load_model(root / "run" / "model")
    (entry,) = history_of(model).entries
    assert (entry["steps"], entry["data"]) == (3, store.fingerprint)
    assert model.userdp_ancestry is not None
    second = trained(model, tokenizer, store).statement
    # The same model again, in memory: three runs of three steps.
    third = trained(model, tokenizer, store, out=root / "third").statement
    for statement, steps in ((second, 6), (third, 9)):
        truth = oracle(the_plan(), steps)
        assert truth * (1 - 2e-3) <= statement.epsilon <= truth * (1 + 2e-3)
        assert statement.guarantee
        assert any("3 steps of an earlier run" in entry for entry in statement.earlier)
    assert Ledger.read(root / "third" / "ledger.jsonl").statement() == third
    saved = json.loads((root / "third" / "model" / ANCESTRY_FILE).read_text())
    assert [run["steps"] for run in saved["runs"]] == [3, 3, 3]


def own_loop(
    model: torch.nn.Module, plan: Plan | None = None, *, ledger: Ledger | None = None
) -> PrivateStep:
    return PrivateStep(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        plan or the_plan(),
        UserIndex.from_owners(range(20)),
        settings=StepSettings(path="plain"),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        record=None if ledger is None else RunRecord(ledger),
    )


def take(step: PrivateStep, count: int) -> None:
    for _ in range(count):
        step.apply([{"x": torch.ones(len(rows), 3)} for rows in step.draw()])


@pytest.mark.parametrize(
    "next_model",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), torch.nn.Sequential],
    ids=["same", "copy", "pickle", "wrapped"],
)
def test_a_second_private_step_on_a_model_composes_the_first(next_model: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    take(own_loop(model), 2)
    again = own_loop(next_model(model))
    take(again, 3)
    # Both plans of three steps: who ended the first after two may have looked at the weights.
    assert again.statement().epsilon == pytest.approx(the_plan().epsilon(6), rel=1e-4)


def test_a_part_of_a_trained_model_carries_what_was_spent() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    take(own_loop(model), 2)
    assert [item.steps for item in own_loop(model[0]).ledger.earlier] == [3]


def test_an_earlier_step_cannot_go_on_behind_the_back_of_a_later_one() -> None:
    model = torch.nn.Linear(3, 1)
    first = own_loop(model)
    take(first, 1)
    second = own_loop(model)
    with pytest.raises(InputError, match="another private run was begun"):
        take(first, 1)
    take(second, 1)
    assert second.statement().epsilon == pytest.approx(the_plan().epsilon(6), rel=1e-4)


def test_a_step_on_the_whole_cannot_go_on_behind_the_back_of_one_on_a_part() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    whole = own_loop(model)
    part = own_loop(model[1])
    take(part, 1)
    with pytest.raises(InputError, match="a part of it"):
        take(whole, 1)


def declared(model: torch.nn.Module, steps: int, *, other_people: bool) -> PrivateStep:
    """A run in memory, with or without the declaration that its people are others."""
    plan = the_plan(steps=steps)
    ledger = Ledger.create(plan, bound_to={}, fixed_seed=False)
    ledger.inherit(earlier_runs(model, other_people=other_people))
    step = own_loop(model, plan, ledger=ledger)
    take(step, steps)
    return step


def test_people_of_two_joined_histories_count_as_the_same() -> None:
    """The first of one may be the second of the other: their numbers cannot be compared."""
    parts = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
    for part, steps in zip(parts, ((4, 1), (1, 4)), strict=True):
        declared(part, steps[0], other_people=False)
        declared(part, steps[1], other_people=True)
    assert [item.people for item in earlier_runs(parts[0], other_people=True)] == [2, 1]
    last = declared(torch.nn.Sequential(*parts), 1, other_people=True)
    # Somebody may be in both runs of four steps.
    assert last.statement().epsilon >= the_plan().epsilon(8)


def test_a_history_that_holds_all_of_another_keeps_who_was_declared_to_be_others() -> None:
    base = torch.nn.Linear(3, 1)
    declared(base, 1, other_people=False)
    old = history_of(copy.deepcopy(base))
    declared(base, 1, other_people=True)
    joined = merged(old, history_of(base))
    assert [entry["people"] for entry in joined.entries] == [1, 0]


def test_adapters_on_a_model_with_a_past_compose_it(root: Path) -> None:
    model, _ = load_model(root / "run" / "model", lora=Lora(rank=2))
    assert [item.steps for item in own_loop(model).ledger.earlier] == [3]


def test_other_people_are_not_added_up_and_the_largest_epsilon_is_stated(root: Path) -> None:
    model, tokenizer = load_model(root / "run" / "model")
    others, store = UserStore.open(root / "others"), UserStore.open(root / "store")
    undeclared = trained(copy.deepcopy(model), tokenizer, others).statement
    assert undeclared.epsilon == pytest.approx(the_plan().epsilon(6), rel=1e-4)
    gentle = the_plan(noise_multiplier=5.0)
    declared = trained(copy.deepcopy(model), tokenizer, others, plan=gentle, other_people=True)
    # Those of the first run have spent more than those of this one, and are covered too.
    assert declared.statement.epsilon == pytest.approx(the_plan().epsilon(3), rel=1e-4)
    assert any("are others" in entry for entry in declared.statement.assumptions)
    with pytest.raises(InputError, match="on this very data"):
        trained(model, tokenizer, store, other_people=True)
    # Whoever goes on without a declaration may be in both.
    last = trained(declared.model, tokenizer, others, plan=gentle).statement
    assert last.epsilon > declared.statement.epsilon


def test_other_people_are_compared_with_the_users_of_the_earlier_runs(
    root: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(root / "run" / "model")
    # The same users with other texts: the data has another name, the people have not.
    same = make_store(tmp_path / "same", [2] * 20, seed=5)
    with pytest.raises(InputError, match="20 users are in several of the runs"):
        trained(model, tokenizer, same, other_people=True)
    others = UserStore.open(root / "others")
    checked = trained(copy.deepcopy(model), tokenizer, others, other_people=True).statement
    assert UNCHECKED_PEOPLE not in checked.cautions
    # Ids under another key, or a model without its run's list: said, not passed over.
    other_key = UserStore.open(root / "other key")
    shutil.copytree(root / "run" / "model", tmp_path / "alone")
    alone, _ = load_model(tmp_path / "alone")
    for start, store in ((model, other_key), (alone, others)):
        statement = trained(start, tokenizer, store, other_people=True).statement
        assert UNCHECKED_PEOPLE in statement.cautions


def config_on(root: Path, path: Path, **changes: str) -> Path:
    """A configuration that trains on from the run's model."""
    values = {"store": "others", "data": "", "privacy": "", "model": f"{root}/run/model"} | changes
    path.write_text(
        f'[data]\nstore = "{root}/{values["store"]}"\nsequence_length = 16\n{values["data"]}\n'
        f'[model]\npath = "{values["model"]}"\n[privacy]\nnum_users = 20\n'
        "expected_cohort_size = 10\ngroup_size = 2\nclip_norm = 1.0\nnoise_multiplier = 2.0\n"
        f'delta = 1e-3\n{values["privacy"]}\n[training]\nsteps = 2\npath = "plain"\n'
    )
    return path


def test_the_command_does_not_say_that_costs_are_composed_when_they_are_not(
    root: Path, tmp_path: Path
) -> None:
    config = config_on(root, tmp_path / "a.toml", privacy="other_people = true")
    result = command("train", config, "--out", tmp_path / "run")
    assert result.code == 0
    assert "composed with this one" not in result.err
    assert "the largest epsilon is stated" in result.err


def test_no_loss_on_the_users_of_an_earlier_run_is_printed(root: Path, tmp_path: Path) -> None:
    config = config_on(root, tmp_path / "a.toml", data=f'evaluation = "{root}/store"')
    result = command("train", config, "--out", tmp_path / "run")
    assert result.code == 2
    assert "20 of its users are training users too" in result.err
    # Refused before anything is spent.
    assert not (tmp_path / "run").exists()


def edited_past(directory: Path) -> None:
    """Let the model's file say that one step was taken, not three."""
    path = directory / ANCESTRY_FILE
    data = json.loads(path.read_text())
    data["runs"][0]["steps"] = data["runs"][0]["event"]["count"] = 1
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def test_a_past_that_the_runs_own_ledger_contradicts_is_refused(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root / "run", tmp_path / "earlier"))
    edited_past(run / "model")
    config = config_on(root, tmp_path / "a.toml", model=str(run / "model"))
    result = command("train", config, "--out", tmp_path / "run")
    assert result.code == 2
    assert f"model/{ANCESTRY_FILE} is not what the ledger's closing row names" in result.err
    assert not (tmp_path / "run").exists()
    # A loop of the caller's own is refused as well.
    model, _ = load_model(run / "model")
    with pytest.raises(LedgerError, match="cannot be trusted"):
        own_loop(model)


def test_what_cannot_be_priced_together_is_refused_before_the_first_step() -> None:
    model = torch.nn.Linear(3, 1)
    take(own_loop(model), 1)
    before = model.weight.clone()
    with pytest.raises(UnaccountedPlanError, match="cannot be priced together"):
        own_loop(model, the_plan(adjacency=Adjacency.REPLACE))
    bare = torch.nn.Linear(3, 1)
    take(own_loop(bare, the_plan(noise_multiplier=0.0, non_private=True)), 1)
    with pytest.raises(UnaccountedPlanError, match="without privacy"):
        own_loop(bare)
    assert torch.equal(before, model.weight)


def test_a_fixed_seed_in_the_past_is_never_forgotten(root: Path) -> None:
    model, tokenizer = load_model(root / "base")
    store = UserStore.open(root / "store")
    trained(model, tokenizer, store, secret=RunSecret.fixed_for_tests(1))
    assert not trained(model, tokenizer, store).statement.guarantee


def test_a_run_configured_with_epsilon_meets_it_with_what_was_spent_before(root: Path) -> None:
    text = (
        f'[data]\nstore = "{root}/store"\n[model]\npath = "{root}/run/model"\n[privacy]\n'
        "num_users = 20\nexpected_cohort_size = 5\ngroup_size = 2\nclip_norm = 1.0\n"
        "epsilon = {epsilon}\ndelta = 1e-3\n[training]\nsteps = 2\n"
    )
    (root / "on.toml").write_text(text.format(epsilon=6.0))
    config = load_config(root / "on.toml")
    reached = config.plan().epsilon(earlier=config.load_earlier())
    assert 0.995 * 6.0 <= reached <= 6.0
    (root / "off.toml").write_text(text.format(epsilon=1.0))
    with pytest.raises(InputError, match="leaves nothing for the steps"):
        load_config(root / "off.toml").plan()


@pytest.mark.parametrize("content", [None, "{", '{"format": 1, "runs": []}', '{"runs": [3]}'])
def test_a_model_of_a_run_that_lost_its_past_is_not_loaded(
    root: Path, tmp_path: Path, content: str | None
) -> None:
    run = Path(shutil.copytree(root / "run", tmp_path / "run"))
    if content is None:
        (run / "model" / ANCESTRY_FILE).unlink()
    else:
        (run / "model" / ANCESTRY_FILE).write_text(content)
    with pytest.raises(LedgerError, match=ANCESTRY_FILE):
        load_model(run / "model")


def test_an_edited_past_is_refused(root: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(root / "run" / "model", tmp_path / "model"))
    data = json.loads((copied / ANCESTRY_FILE).read_text())
    data["runs"][0]["event"]["event"]["event"]["noise_multiplier"] = 90.0
    (copied / ANCESTRY_FILE).write_text(json.dumps(data))
    model, tokenizer = load_model(copied)
    with pytest.raises(LedgerError, match="edited"):
        trained(model, tokenizer, UserStore.open(root / "store"))


def test_evaluate_finds_training_users_from_anywhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in (root / "run", root / "run" / "model"):
        refused = command("evaluate", model, root / "store")
        assert refused.code == 2
        assert "20 of its users are training users too" in refused.err
        assert command("evaluate", model, root / "others", "--json").json["users"] == 20
    # A model is that of its run, where the run is: an unfinished one is refused under both names.
    shutil.copytree(root / "run", tmp_path / "cut")
    ledger = tmp_path / "cut" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    for model in (tmp_path / "cut", tmp_path / "cut" / "model"):
        assert command("evaluate", model, root / "others").code == 2
    shutil.copytree(root / "run", tmp_path / "moved")
    assert command("evaluate", tmp_path / "moved", root / "store").code == 2


def test_evaluate_refuses_where_overlap_cannot_be_known(root: Path, tmp_path: Path) -> None:
    lost = Path(shutil.copytree(root / "run", tmp_path / "lost"))
    shutil.rmtree(lost / "secret" / "users")
    copied = Path(shutil.copytree(root / "run" / "model", tmp_path / "copied"))
    for model, store in (
        (lost, root / "others"),
        (copied, root / "others"),
        (root / "run", root / "other key"),
    ):
        refused = command("evaluate", model, store)
        assert refused.code == 2
        assert "cannot be checked" in refused.err
        assert "--allow-overlap" in refused.err
        allowed = command("evaluate", model, store, "--allow-overlap", "--json").json
        assert allowed["overlap_checked"] is False


def test_evaluate_knows_the_users_of_the_runs_before(root: Path) -> None:
    model, tokenizer = load_model(root / "run" / "model")
    trained(model, tokenizer, UserStore.open(root / "others"), out=root / "later")
    for store in ("store", "others"):
        assert "training users too" in command("evaluate", root / "later", root / store).err


def test_a_changed_cache_of_tokens_is_refused_by_train(root: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [2] * 20)
    model, tokenizer = load_model(root / "base")
    tokenise(store, tokenizer, sequence_length=16)
    (cache,) = (store.path / "tokens").iterdir()
    tokens = np.fromfile(cache / "tokens.i32", np.int32)
    np.where(tokens == 1, 2, tokens).astype(np.int32).tofile(cache / "tokens.i32")
    with pytest.raises(InputError, match="cache of tokens changed"):
        trained(model, tokenizer, store)
    shutil.rmtree(cache)
    assert trained(model, tokenizer, store).statement.guarantee


def test_a_store_that_changed_since_its_import_is_refused_by_train(
    root: Path, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store", [2] * 20)
    path = store.path / "records.arrow"
    path.write_bytes(path.read_bytes().replace(b"red", b"tea", 1))
    model, tokenizer = load_model(root / "base")
    with pytest.raises(InputError, match="changed since the import"):
        trained(model, tokenizer, UserStore.open(store.path))


def test_rows_of_a_selection_are_taken_from_a_verified_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, edges = shared_store(tmp_path / "shared")
    _, tokenizer = load_model(root / "base")
    selection = Selection.of(edges, np.ones(10, dtype=np.int64), 5, method="greedy")
    training_rows.rows_of(store, tokenizer, records_plan(5), selection, 16)
    (cache,) = (store.path / "tokens").iterdir()
    (cache / "digests.json").unlink()
    with pytest.raises(InputError, match="cache of tokens changed"):
        training_rows.rows_of(store, tokenizer, records_plan(5), selection, 16)


@pytest.mark.parametrize("place", ["best", "kept/best", "link"])
def test_a_copy_inside_a_run_is_held_to_the_runs_ledger(
    root: Path, tmp_path: Path, place: str
) -> None:
    run = Path(shutil.copytree(root / "run", tmp_path / "earlier"))
    if place == "link":
        copied = Path(shutil.copytree(run / "model", tmp_path / "elsewhere"))
        (run / place).symlink_to(copied)
    else:
        copied = Path(shutil.copytree(run / "model", run / place))
    model, _ = load_model(run / place)
    # The same files under another name are the run's model.
    assert own_loop(model) is not None
    edited_past(copied)
    model, tokenizer = load_model(run / place)
    with pytest.raises(LedgerError, match="not the model that the run closed with"):
        own_loop(copy.deepcopy(model))
    with pytest.raises(LedgerError, match="not the model that the run closed with"):
        trained(model, tokenizer, UserStore.open(root / "others"))


def doubts_of(model: torch.nn.Module) -> list[list[str]]:
    """What the next run on the model is told of each earlier one."""
    return [list(item.doubts) for item in earlier_runs(model)]


def test_no_copy_and_no_joining_loses_a_doubt() -> None:
    model = torch.nn.Linear(2, 2)
    ledger = Ledger.create(the_plan(), bound_to={}, fixed_seed=False)
    begin_run(model, ledger)
    ledger.charge_step()
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(copied))
    ledger.doubt("the paths differ")
    for found in (model, copied, copy.deepcopy(copied), copy.deepcopy(model)):
        assert doubts_of(found) == [["the paths differ"]]
    # What was written away before the doubt cannot know it; what it is joined with does.
    assert doubts_of(pickled) == [[]]
    for parts in ([pickled, model], [model, pickled]):
        assert doubts_of(torch.nn.ModuleList(parts)) == [["the paths differ"]]
    later = Ledger.create(the_plan(), bound_to={}, fixed_seed=False)
    begin_run(copied, later)
    later.charge_step()
    assert later.statement().guarantee is False


def test_an_entry_that_spends_nothing_is_refused(root: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(root / "run" / "model", tmp_path / "model"))
    data = json.loads((copied / ANCESTRY_FILE).read_text())
    data["runs"][0] |= {"steps": 0, "event": None}
    (copied / ANCESTRY_FILE).write_text(json.dumps(data))
    model, tokenizer = load_model(copied)
    with pytest.raises(LedgerError, match="nothing was spent"):
        trained(model, tokenizer, UserStore.open(root / "others"))
    with pytest.raises(LedgerError, match="nothing was spent"):
        own_loop(model)


def test_a_past_without_its_ledger_is_told_in_the_statement(root: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(root / "run" / "model", tmp_path / "model"))
    others = UserStore.open(root / "others")
    for directory, told in (
        (copied, True),
        (root / "run" / "model", False),
        (root / "base", False),
    ):
        model, tokenizer = load_model(directory)
        statement = trained(copy.deepcopy(model), tokenizer, others).statement
        assert (UNCOMPARED_PAST in statement.cautions) is told
        assert (UNCOMPARED_PAST in own_loop(model).statement().cautions) is told


def emptied(users: Path) -> None:
    (path,) = users.glob("*.bin")
    mark, name, _ = path.read_bytes().split(b"\n", 2)
    path.write_bytes(mark + b"\n" + name + b"\n")


def without_mark(users: Path) -> None:
    (path,) = users.glob("*.bin")
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


def without_key(users: Path) -> None:
    (users.parent / "ledger.key").unlink()


@pytest.mark.parametrize("spoil", [emptied, without_mark, without_key])
def test_a_list_of_users_that_its_owner_did_not_write_is_unknown(
    root: Path, tmp_path: Path, spoil: Any
) -> None:
    run = Path(shutil.copytree(root / "run", tmp_path / "earlier"))
    spoil(run / "secret" / "users")
    model, tokenizer = load_model(run / "model")
    # The same people with other texts: they would be refused by the list as it was.
    same = make_store(tmp_path / "same", [2] * 20, seed=5)
    later = trained(model, tokenizer, same, other_people=True, out=tmp_path / "later")
    assert UNCHECKED_PEOPLE in later.statement.cautions
    # Nor does a later run take such a list over.
    assert len(list((tmp_path / "later" / "secret" / "users").glob("*.bin"))) == 1


def test_a_second_home_of_a_store_in_storage_begins_no_budget_of_its_own(tmp_path: Path) -> None:
    local = make_store(tmp_path / "local", [3, 1, 4])
    shutil.copytree(local.path, tmp_path / "bucket" / "store")
    url = f"file://{tmp_path}/bucket/store"
    # Both are made before anything is counted.
    first, second = (UserStore.open(url, home=tmp_path / name) for name in ("a", "b"))
    Population.of(first).debit("a look", GaussianDpEvent(1.0), Adjacency.ADD_REMOVE)
    third = UserStore.open(url, home=tmp_path / "c")
    for store in (second, third):
        assert Population.of(store).path == tmp_path / "a.population"
        assert Population.of(store).spent(1e-6).epsilon == Population.of(first).spent(1e-6).epsilon
    # Another machine cannot see that budget.
    (tmp_path / "a.population").rename(tmp_path / "away")
    for store in (second, third):
        with pytest.raises(LedgerError, match="not there"):
            Population.of(store)


def test_a_delta_too_small_for_a_dictionary_is_not_called_a_run_without_privacy(
    tmp_path: Path,
) -> None:
    people = Population.of(make_store(tmp_path / "store", [3, 1, 4]))
    rule = Votes.calibrated(
        words_per_user=4, epsilon=8.0, delta=1e-5, adjacency=Adjacency.ADD_REMOVE
    )
    people.debit("dictionary", rule.event, Adjacency.ADD_REMOVE)
    found = people.spent(1e-7)
    assert found.epsilon == np.inf
    assert "threshold of a dictionary" in found.problems[0]
    assert (people.spent(1e-5).epsilon or np.inf) <= 8.0
