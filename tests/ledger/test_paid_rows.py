"""Looks at the data beside the steps: charged, read back, priced, and shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from typer.testing import CliRunner

from tiny import make_model, make_store
from userdp.accounting import best_of_runs, gaussian
from userdp.cli import app
from userdp.cli.quantile import answers
from userdp.errors import InputError, LedgerError, UnaccountedPlanError
from userdp.files import chain
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.prices.paid import Paid, read_paid, write_paid
from userdp.statement import round_up
from userdp.units import Adjacency

LOOKS = {
    "group size by private quantile": dp_event.GaussianDpEvent(4.0),
    "clip norm, three looks": dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(9.0), 3),
}


def the_plan(**others) -> Plan:
    return Plan.sample_users(
        **{
            "num_users": 200,
            "expected_cohort_size": 20,
            "group_size": 4,
            "steps": 50,
            "clip_norm": 1.0,
            "noise_multiplier": 1.5,
            "delta": 1e-4,
        }
        | others
    )


def charged(plan: Plan, path: Path | None = None, *, steps: int) -> Ledger:
    ledger = Ledger.create(plan, path=path, bound_to={}, fixed_seed=False)
    for what, event in LOOKS.items():
        ledger.charge(event, what=what)
    for _ in range(steps):
        ledger.charge_step()
    if path is not None:
        ledger.finish({})
    return ledger


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def exit_code(result) -> int:
    """What `main` would exit with."""
    error = result.exception
    return error.exit_code if isinstance(error, InputError) else result.exit_code


def test_paid_rows_survive_the_disk_and_do_not_count_as_steps(tmp_path):
    charged(the_plan(), tmp_path / "ledger.jsonl", steps=7)
    ledger = Ledger.read(tmp_path / "ledger.jsonl")
    assert ledger.steps == 7
    assert {item.what: item.event for item in ledger.paid} == LOOKS
    statement = ledger.statement()
    assert [entry.split(":")[0] for entry in statement.paid] == list(LOOKS)
    assert statement.to_json()["paid"] == statement.paid
    assert all(f"paid for: {what}" in str(statement) for what in LOOKS)


def test_a_look_takes_no_step_from_the_budget():
    from userdp import PrivateStep, RunRecord, UserIndex  # torch

    torch = pytest.importorskip("torch")
    plan = the_plan(num_users=4, expected_cohort_size=2, steps=2)
    model = torch.nn.Linear(1, 1)
    ledger = charged(plan, steps=0)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        UserIndex.from_owners(list("abcd")),
        record_loss=lambda model, batch: model(batch["x"])[:, 0] ** 2,
        record=RunRecord(ledger),
    )
    taken = 0
    for cohort in step.cohorts():
        step.apply({"x": torch.ones(len(rows), 1)} for rows in cohort)
        taken += 1
    assert taken == 2
    assert len(step.statement().paid) == len(LOOKS)


@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_the_statement_prices_looks_and_steps_together(adjacency):
    from userdp.accounting import certificate

    plan = the_plan(adjacency=adjacency)
    ledger = charged(plan, steps=50)
    accountant = PLDAccountant(certificate.relation(adjacency), value_discretization_interval=1e-3)
    for event in LOOKS.values():
        accountant.compose(event)
    accountant.compose(plan.event(50))
    library = accountant.get_epsilon(plan.delta)
    told = ledger.statement().epsilon
    # The oracle's own discretisation is pessimistic, by less than this.
    assert library * (1 - 2e-3) <= told <= library * (1 + 1e-3)
    assert plan.epsilon() < told
    assert plan.epsilon(paid=ledger.paid) == told


def test_a_look_alone_has_a_price_before_the_first_step():
    plan = the_plan()
    statement = charged(plan, steps=0).statement()
    joined = dp_event.GaussianDpEvent((1 / 4.0**2 + 3 / 9.0**2) ** -0.5)
    assert statement.epsilon == pytest.approx(
        plan.epsilon(0, paid=[Paid(what="both", event=joined)]), rel=1e-4
    )
    assert plan.statement(steps=0).epsilon == 0


def test_nothing_is_promised_by_paying_for_a_run_without_noise():
    plan = the_plan(noise_multiplier=0.0, non_private=True)
    assert charged(plan, steps=1).statement().epsilon == math.inf


def test_a_look_after_the_first_step_is_refused():
    ledger = charged(the_plan(), steps=1)
    with pytest.raises(LedgerError, match="before the first"):
        ledger.charge(dp_event.GaussianDpEvent(4.0), what="late")


@pytest.mark.parametrize(
    "event",
    [
        dp_event.GaussianDpEvent(-1.0),
        dp_event.GaussianDpEvent(math.nan),
        # A negative count would give budget back.
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(4.0), -3),
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(4.0), 0.5),
        dp_event.PoissonSampledDpEvent(1.5, dp_event.GaussianDpEvent(4.0)),
        dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(0.0)]),
    ],
)
def test_numbers_no_mechanism_has_are_refused(event):
    ledger = charged(the_plan(), steps=0)
    with pytest.raises(LedgerError, match="paid event"):
        ledger.charge(event, what="wrong")
    assert len(ledger.paid) == len(LOOKS)


def tuned(plan: Plan, mean_runs: float = 5.0, **others) -> dp_event.DpEvent:
    return best_of_runs.randomly_stopped(plan.event(), mean_runs=mean_runs, **others)


def test_tuning_that_nothing_prices_is_refused_before_training():
    records = Plan.sample_records(
        num_users=200,
        expected_batch_size=20,
        group_size=4,
        steps=50,
        clip_norm=1.0,
        noise_multiplier=1.5,
        delta=1e-4,
    )
    with pytest.raises(UnaccountedPlanError, match="RepeatAndSelect"):
        charged(the_plan(), steps=0).charge(tuned(records), what="learning rate")


@pytest.mark.parametrize("shape", [best_of_runs.GEOMETRIC, best_of_runs.POISSON])
def test_paid_tuning_enters_the_ledger_and_the_statement_says_how_it_is_priced(tmp_path, shape):
    plan, path = the_plan(noise_multiplier=3.0), tmp_path / "ledger.jsonl"
    tuning = tuned(the_plan(noise_multiplier=6.0, steps=10), shape=shape)
    ledger = Ledger.create(plan, path=path, bound_to={}, fixed_seed=False)
    ledger.charge(tuning, what="learning rate, best of a random number of runs")
    for _ in range(plan.steps):
        ledger.charge_step()
    ledger.close()
    read = Ledger.read(path)
    assert [item.event for item in read.paid] == [tuning]
    statement = read.statement()

    def library(accountant, *parts: dp_event.DpEvent, delta: float) -> float:
        for part in parts:
            accountant.compose(part)
        return float(accountant.get_epsilon(delta))

    steps, half = plan.event(), plan.delta / 2
    alone = library(RdpAccountant(), tuning, delta=plan.delta)
    assert statement.epsilon > max(alone, plan.epsilon())
    whole = library(RdpAccountant(), tuning, steps, delta=plan.delta)
    added = library(RdpAccountant(), tuning, delta=half)
    added += library(PLDAccountant(value_discretization_interval=1e-4), steps, delta=half)
    assert statement.epsilon == pytest.approx(min(whole, added), rel=1e-3)
    how = "RDP for everything" if whole < added else "basic composition, half of delta each"
    assert how in statement.certified_by
    assert statement.paid == (
        "learning rate, best of a random number of runs: alone epsilon="
        f"{round_up(alone):g}, included in the total",
    )
    assert statement.not_covered[0].endswith("except as listed under paid for")
    json.loads(path.read_text().splitlines()[1], parse_constant=pytest.fail)


@pytest.mark.parametrize("change", [{"mean": 0.5}, {"mean": "many"}, {"shape": -1.0}])
def test_numbers_of_runs_that_nobody_can_draw_are_refused(change):
    item = Paid(what="learning rate", event=tuned(the_plan())).to_json()
    with pytest.raises(LedgerError, match="paid event"):
        Paid.from_json(item | {"event": item["event"] | change})


def plans(kind: str, **others) -> Plan:
    """Users or records sampled, or everybody in every step."""
    common = {"num_users": 200, "group_size": 4, "steps": 50, "clip_norm": 1.0, "delta": 1e-4}
    if kind == "records":
        # Few, because each step of the search prices mixtures.
        few = {"expected_batch_size": 20, "group_size": 2, "steps": 10}
        return Plan.sample_records(**common | few | others)
    cohort = 200 if kind == "everybody" else 20
    return Plan.sample_users(**common | {"expected_cohort_size": cohort} | others)


@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
@pytest.mark.parametrize("kind", ["users", "records", "everybody"])
@pytest.mark.parametrize("target", [3.0, 8.0])
def test_noise_is_calibrated_for_the_steps_and_what_was_paid(kind, adjacency, target):
    paid = [Paid(what=what, event=event) for what, event in LOOKS.items()]
    plan = plans(kind, epsilon=target, paid=paid, adjacency=adjacency)
    reached = plan.statement(paid=paid).epsilon
    assert 0.999 * target <= reached <= target
    assert plan.epsilon() < plans(kind, epsilon=target, adjacency=adjacency).epsilon() <= target


@pytest.mark.parametrize("kind", ["users", pytest.param("records", marks=pytest.mark.slow)])
def test_noise_is_calibrated_for_the_steps_and_paid_tuning(kind):
    paid = [Paid(what="learning rate", event=tuned(the_plan(noise_multiplier=6.0, steps=10)))]
    plan = plans(kind, epsilon=2.0, paid=paid)
    assert 0.999 * 2.0 <= plan.statement(paid=paid).epsilon <= 2.0


@pytest.mark.parametrize("share", [0.9, 0.99, 0.999])
def test_little_left_for_the_steps_is_used_up_too(share):
    # The look alone costs this share of the target: most of the noise does not move epsilon.
    target = 2.0
    look = Paid(
        what="dear",
        event=dp_event.GaussianDpEvent(1 / gaussian.sensitivity(share * target, 1e-4)),
    )
    plan = plans("users", epsilon=target, paid=[look])
    assert 0.999 * target <= plan.epsilon(paid=[look]) <= target


def test_looks_that_leave_nothing_for_the_steps_say_what_they_cost():
    with pytest.raises(InputError, match=r"epsilon=0\.5 leaves nothing .* costs 1\.\d+ alone"):
        the_plan(
            noise_multiplier=None,
            epsilon=0.5,
            paid=[Paid(what=what, event=event) for what, event in LOOKS.items()],
        )


@pytest.mark.parametrize("what", ["", "two\nlines", "x" * 200])
def test_what_was_paid_for_is_one_short_line(what):
    with pytest.raises(InputError, match="printable line"):
        charged(the_plan(), steps=0).charge(dp_event.GaussianDpEvent(4.0), what=what)


def _edit_noise(rows):
    rows[1]["event"]["noise_multiplier"] = 400.0


def _drop_look(rows):
    del rows[1]


@pytest.mark.parametrize("edit", [_edit_noise, _drop_look])
def test_an_edited_or_missing_look_breaks_the_chain(tmp_path, edit):
    path = tmp_path / "ledger.jsonl"
    charged(the_plan(), path, steps=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edit(rows)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    with pytest.raises(LedgerError, match="chain breaks"):
        Ledger.read(path)


def _late(rows):
    rows.append(rows.pop(1))


def _free(rows):
    rows[2]["event"]["count"] = -1


def _unknown_event(rows):
    rows[1]["event"]["type"] = "os.system"


def _extra_field(rows):
    rows[1]["event"]["more"] = 1


def _no_event(rows):
    del rows[1]["event"]


def _other_kind(rows):
    rows[1]["kind"] = "refund"


@pytest.mark.parametrize(
    "edit", [_late, _free, _unknown_event, _extra_field, _no_event, _other_kind]
)
def test_rows_that_make_no_sense_are_refused_though_the_chain_holds(tmp_path, edit):
    path = tmp_path / "ledger.jsonl"
    charged(the_plan(), path, steps=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edit(rows)
    before, lines, key = "", [], chain.read_key(path)
    assert key is not None
    for row in rows:
        del row["hash"], row["tag"]
        sealed = chain.sealed(before, row, key)
        before = sealed["hash"]
        lines.append(json.dumps(sealed, sort_keys=True))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: |paid|type"):
        Ledger.read(path)


@pytest.mark.statistical
def test_quantile_command_says_a_private_median_and_writes_its_price(tmp_path):
    # The seed is the system's. 300 users at 3 and 100 at 8: for another answer the noise of 20
    # bins, of standard deviation below 2 each, would have to add up to 200, above 20 of its own
    # standard deviations (9): probability below 1e-80.
    make_store(tmp_path / "store", [3] * 300 + [8] * 100)
    price = tmp_path / "paid.json"
    options = ["--quantile", 0.5, "--epsilon", 4, "--out", price, "--json"]
    result = invoke("quantile", tmp_path / "store", "--of", "records-per-user", *options)
    found = json.loads(result.stdout)
    assert found["value"] == 3
    assert 3.99 <= found["epsilon"] <= 4
    assert read_paid(price).to_json() == {"what": found["what"], "event": found["event"]}
    # A second look is a second price: the first is not overwritten.
    again = invoke("quantile", tmp_path / "store", *options)
    assert exit_code(again) == 2


def test_answers_do_not_depend_on_the_data():
    assert answers(1) == [1.0]
    assert np.all(np.diff(answers(1000)) > 0)
    assert answers(1000)[-1] == 1000


@pytest.mark.parametrize(
    "options", ["--epsilon 0", "--epsilon 1 --quantile 1", "--epsilon 1 --largest 0"]
)
def test_wrong_quantiles_exit_with_2(tmp_path, options):
    make_store(tmp_path / "store", [1, 2])
    assert exit_code(invoke("quantile", tmp_path / "store", *options.split())) == 2
    assert exit_code(invoke("quantile", tmp_path / "none", "--epsilon", 1)) == 2


CONFIG = """
[data]
store = "{root}/store"
sequence_length = 16
[model]
path = "{root}/model"
[privacy]
num_users = 12
expected_cohort_size = 4
group_size = 2
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-2
paid = {paid}
[training]
steps = 3
"""


def test_a_configured_run_charges_its_ledger_first_and_says_so(tmp_path):
    make_store(tmp_path / "store", [2] * 12)
    make_model(tmp_path / "model")
    price = tmp_path / "paid.json"
    assert invoke("quantile", tmp_path / "store", "--epsilon", 1, "--out", price).exit_code == 0
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG.format(root=tmp_path, paid=json.dumps([str(price)])))
    result = invoke("train", config, "--out", out, "--json")
    assert result.exception is None, result.stderr
    ledger = Ledger.read(out / "ledger.jsonl")
    assert (ledger.steps, len(ledger.paid)) == (3, 1)
    epsilon = ledger.statement().epsilon
    assert json.loads(result.stdout)["epsilon"] == epsilon > ledger.plan.epsilon()
    assert invoke("report", out).exit_code == 0
    phrase = "records per user, private 0.5 quantile"
    for name in ("report.html", "MODEL_CARD.md", "statement.json"):
        assert phrase in (out / name).read_text(), name
    found = json.loads(invoke("account", out, "--json").stdout)
    assert found["paid"][0].startswith(phrase)
    assert found["epsilon"] == epsilon


@pytest.mark.slow
def test_a_run_configured_with_epsilon_meets_it_with_all_that_was_paid(tmp_path):
    make_store(tmp_path / "store", [2] * 12)
    make_model(tmp_path / "model")
    tried = Plan.sample_users(
        num_users=12, expected_cohort_size=4, group_size=2, steps=3, clip_norm=1.0,
        noise_multiplier=6.0, delta=1e-2,
    )  # fmt: skip
    items = {
        "tuned": Paid(what="learning rate, random stopping", event=tuned(tried)),
        "look": Paid(what="group size", event=dp_event.GaussianDpEvent(4.0)),
    }
    for name, item in items.items():
        write_paid(tmp_path / f"{name}.json", item, value=0.001)
    text = CONFIG.format(
        root=tmp_path, paid=json.dumps([str(tmp_path / f"{name}.json") for name in items])
    )
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(text.replace("noise_multiplier = 1.0", "epsilon = 4.0"))
    result = invoke("train", config, "--out", out, "--json")
    assert result.exception is None, result.stderr
    epsilon = json.loads(result.stdout)["epsilon"]
    assert 0.999 * 4.0 <= epsilon <= 4.0
    assert json.loads(invoke("account", out, "--json").stdout)["epsilon"] == epsilon
    assert invoke("report", out).exit_code == 0
    assert "RDP" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "not JSON",
        "[]",
        '{"what": "x", "event": {}}',
        '{"format": 1, "what": "x"}',
        '{"format": 1, "what": "x", "event": "free"}',
        '{"format": 1, "what": 3, "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0}}',
        '{"format": 1, "what": "x", "event": {"type": "GaussianDpEvent"}}',
        '{"format": 1, "what": "x", "event": {"type": "GaussianDpEvent", "noise_multiplier": "9"}}',
    ],
)
def test_a_wrong_paid_file_exits_with_2_before_anything_is_written(tmp_path, content):
    wrong = tmp_path / "wrong.json"
    if content is not None:
        wrong.write_text(content)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(root=tmp_path, paid=json.dumps([str(wrong)])))
    result = invoke("train", config, "--out", tmp_path / "run")
    assert exit_code(result) == 2
    assert "wrong.json" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_price_is_never_overwritten(tmp_path):
    item = Paid(what="once", event=dp_event.GaussianDpEvent(4.0))
    write_paid(tmp_path / "paid.json", item, value=1.0)
    assert read_paid(tmp_path / "paid.json") == item
    with pytest.raises(InputError, match="name another"):
        write_paid(tmp_path / "paid.json", item, value=2.0)
