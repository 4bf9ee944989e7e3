"""`userdp account`, `calibrate` and `plan`: the contract's options and keys."""

from __future__ import annotations

import json
import subprocess
import sys

import mcmahan
import pytest
from typer.testing import CliRunner

from cli_runner import userdp
from tiny import make_store
from userdp.accounting import accountant, events
from userdp.cli import app
from userdp.cli.sampled import SamplerName
from userdp.errors import InputError
from userdp.sampling import SAMPLERS
from userdp.statement import round_up
from userdp.units import Adjacency

pytestmark = pytest.mark.usefixtures("_mechanisms_are_compared_once")
RUN = "--rate 0.01 --steps 200 --noise-multiplier 2 --delta 1e-6"
TARGET = "--rate 0.01 --steps 200 --epsilon 2 --delta 1e-6"


def run(arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments.split(), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_account_has_the_keys_of_the_contract():
    found = run(f"account {RUN}")
    assert {"epsilon", "delta", "adjacency", "unit", "accountant", "certified_by"} <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--adjacency zero-out", "--adjacency replace", "--cap 60 --users 5000",
        "--accountant rdp", "--accountant moments", "--unit record --group-size 4",
        "--unit record --group-size 4 --accountant group-privacy",
        "--unit record --group-size 4 --accountant rdp",
        "--unit record --group-size 4 --adjacency replace",
    ],
)  # fmt: skip
def test_account_and_calibrate_take_every_option(options: str):
    # Few steps: what an option costs is tested beside its accountant.
    assert run(f"account {RUN.replace('200', '20')} {options}")["epsilon"] > 0
    found = run(f"calibrate {TARGET.replace('200', '20')} {options}")
    assert {"noise_multiplier", "epsilon", "delta", "certified_by", "seconds"} <= set(found)
    assert 0.99 * 2 <= found["epsilon"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("entry", [mcmahan.table_1()[3][3], *mcmahan.table_2()[:2]])
def test_moments_of_mcmahan_2018_stand_beside_pld_on_the_command_line(entry: mcmahan.Entry):
    found = run(f"account {entry.options} --accountant moments")
    assert entry.as_printed(found["epsilon"]) == entry.printed
    exact = run(f"account {entry.options}")
    assert found["epsilon_pld"] == exact["epsilon"] == exact["epsilon_pld"] < found["epsilon"]
    text = CliRunner().invoke(app, f"account {entry.options} --accountant moments".split()).stdout
    assert f"by PLD epsilon={round_up(exact['epsilon']):g}, certified by dp_accounting" in text


@pytest.mark.parametrize(
    "options", ["--accountant rdp", "--unit record --group-size 4 --accountant group-privacy"]
)
def test_beside_every_looser_accountant_stands_pld(options: str):
    found = run(f"account {RUN} {options}")
    assert 0 < found["epsilon_pld"] < found["epsilon"]
    found = run(f"calibrate {TARGET} --accountant rdp")
    assert 0 < found["epsilon_pld"] < found["epsilon"]


def test_banded_noise_needs_only_participations():
    found = run("account --noise banded --participations 4 --noise-multiplier 4 --delta 1e-6")
    assert found["epsilon"] == pytest.approx(2.254084650219736, rel=1e-4)
    found = run("calibrate --noise banded --participations 16 --epsilon 4 --delta 1e-6")
    assert found["noise_multiplier"] == pytest.approx(4.774074348631938, rel=1e-4)


# One line a sampler: its options, and the event that its numbers stand for.
MANY = {"steps": 100, "noise_multiplier": 2.0}
SAMPLED = {
    "--sampler poisson --rate 0.1": events.repeated(
        events.poisson_users_gaussian(user_sampling_prob=0.1, noise_multiplier=2.0), 100
    ),
    "--sampler capped-poisson --rate 0.1 --cap 120 --users 1000": events.repeated(
        events.capped_poisson_users_gaussian(
            user_sampling_prob=0.1, cap=120, num_users=1000, noise_multiplier=2.0
        ),
        100,
    ),
    "--sampler cyclic-poisson --rate 0.3 --parts 8": events.cyclic_poisson_banded(
        user_sampling_prob=0.3, bands=8, **MANY
    ),
    # Three coins a user, and not one: all records of a user are in one part.
    "--sampler cyclic-poisson --rate 0.3 --parts 8 --unit record --group-size 3": events.repeated(
        events.poisson_records_gaussian(
            record_sampling_prob=0.3, group_size=3, noise_multiplier=2.0
        ),
        13,
    ),
    "--sampler cyclic-poisson --rate 0.3 --parts 8 --noise banded --bands 8": (
        events.cyclic_poisson_banded(user_sampling_prob=0.3, bands=8, **MANY)
    ),
    "--sampler balls-in-bins --parts 8": events.balls_in_bins_gaussian(
        bins=8, rounds=13, noise_multiplier=2.0
    ),
    "--sampler balanced-iteration --rate 0.125": events.balanced_iteration_gaussian(
        round_length=8, rounds=13, noise_multiplier=2.0
    ),
    "--sampler allocation --participations 7": events.random_allocation_gaussian(
        participations=7, **MANY
    ),
    "--sampler without-replacement --rate 0.1 --users 1000": events.repeated(
        events.without_replacement_gaussian(num_users=1000, cohort_size=100, noise_multiplier=2.0),
        100,
    ),
    "--noise banded --bands 8": events.min_separated_gaussian(
        participations=13, noise_multiplier=2.0
    ),
}


@pytest.mark.parametrize("options", SAMPLED)
def test_every_sampler_is_priced_as_its_numbers_say(options: str):
    found = run(f"account --steps 100 --noise-multiplier 2 --delta 1e-6 {options}")
    exact = accountant.evaluate(SAMPLED[options], delta=1e-6, adjacency=Adjacency.ADD_REMOVE)
    assert found["epsilon"] == exact.epsilon
    assert found["certified_by"] == exact.certified_by


def test_every_sampler_of_the_command_line_is_one_of_configurations():
    names = {part.name for part in SAMPLERS}
    assert {name.value for name in SamplerName} <= names
    # A fixed order is what --noise banded alone means, and shuffling has no price.
    assert names - {name.value for name in SamplerName} <= {"min-separated", "shuffled"}


@pytest.mark.parametrize(
    "options",
    [
        "--sampler allocation --participations 4",
        "--sampler without-replacement --rate 0.1 --users 1000 --adjacency replace",
        "--sampler cyclic-poisson --rate 0.3 --parts 8 --noise banded --bands 4",
    ],
)
def test_calibrate_takes_the_same_words(options: str):
    found = run(f"calibrate --steps 40 --epsilon 2 --delta 1e-6 {options}")
    again = run(
        f"account --steps 40 --noise-multiplier {found['noise_multiplier']} --delta 1e-6 {options}"
    )
    assert 1.99 < found["epsilon"] == again["epsilon"] <= 2.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sampler allocation --steps 9", "--participations is missing"),
        ("--sampler allocation --participations 3", "--steps is missing"),
        ("--sampler allocation --participations 12 --steps 9", "participations=12 of 9"),
        ("--sampler allocation --participations 3 --steps 9 --rate 0.1", "--rate has no meaning"),
        ("--sampler poisson --rate 0.1 --steps 9 --parts 3", "belongs to --sampler cyclic"),
        ("--sampler allocation --participations 3 --steps 9 --unit record", "--unit user"),
        ("--sampler balls-in-bins --steps 9", "--parts or --rate"),
        ("--sampler balls-in-bins --steps 9 --rate 2", "not a probability"),
        ("--sampler without-replacement --rate 0.1 --steps 9", "--users is missing"),
        ("--sampler cyclic-poisson --rate 0.1 --parts 3 --steps 9 --noise banded", "--bands"),
        ("--rate 0.1 --steps 9 --bands 3", "--bands belongs to --noise banded"),
        ("--noise banded --bands 3", "--steps"),
        ("--noise banded --participations 3 --cap 4 --users 9", "--cap is about sampling"),
        (
            "--sampler cyclic-poisson --rate 0.1 --parts 3 --steps 9 --noise banded --bands 4",
            "bands=4 with parts=3",
        ),
        (
            "--sampler allocation --participations 3 --steps 9 --adjacency replace",
            "no accounting rule",
        ),
    ],
)
def test_options_that_a_sampler_lacks_or_would_ignore_are_named(options: str, said: str):
    with pytest.raises(InputError, match=said):
        run(f"account {options} --noise-multiplier 1 --delta 1e-6")


@pytest.mark.parametrize(
    "arguments",
    [
        "account --rate 0.01", f"account {RUN} --cap 10", f"account {RUN} --participations 3",
        f"account {RUN} --accountant group-privacy",
        f"account {RUN} --unit record --cap 5 --users 9",
        "account --noise banded --noise-multiplier 1 --delta 1e-6",
        "account --noise banded --participations 2 --rate 0.1 --noise-multiplier 1 --delta 1e-6",
        "account --rate 2 --steps 5 --noise-multiplier 1 --delta 1e-6",
        "account --rate 0.1 --steps 5 --noise-multiplier 0 --delta 1e-6",
        "account --rate 0.1 --steps 5 --noise-multiplier nan --delta 1e-6",
        "calibrate --rate 0.1 --steps 5 --epsilon -1 --delta 1e-6",
        "plan --epsilon 1 --delta 1e-6 --steps 10 --compute 4",
        "plan --users 100 --records-per-user 4 --epsilon 1 --delta 1e-6 --steps 10 --compute 4 "
        "--plot plan.png",
    ],
)  # fmt: skip
def test_wrong_input_is_an_input_error(arguments: str):
    with pytest.raises(InputError):
        run(arguments)


PLAN = (
    "plan --users 1024 --records-per-user 8 --epsilon 4 --delta 1e-6 --steps 100 --compute 32"
    " --noise-memory 0"
)


def test_plan_has_the_keys_of_the_contract_and_a_certified_number():
    found = run(f"{PLAN} --assume orthogonal --times-users 10")
    keys = {"method", "group_size", "cohort_size", "noise_multiplier", "noise_stddev"}
    assert keys <= set(found)
    assert all(keys <= set(candidate) for candidate in found["candidates"])
    assert all(candidate["hypothetical"] for candidate in found["hypothetical"])
    assert 0.999 * 4 <= found["epsilon"] <= 4
    assert found["not_covered"] == []


def test_plan_needs_the_users_and_epsilon_alone():
    found = run("plan --users 1024 --records-per-user 8 --epsilon 4")
    assert (found["delta"], found["steps"]) == (4e-4, 500)
    # 51.2 users with 4 records each.
    assert found["group_size"] * found["cohort_size"] == 128
    assert found["clipping"] == "automatic"
    assert found["learning_rate_full"] < found["learning_rate_lora"]
    text = CliRunner().invoke(app, "plan --users 99 --records-per-user 2 --epsilon 4".split())
    assert "automatic clipping" in text.stdout


def test_plan_draws_and_takes_estimated_norms(tmp_path):
    norms = tmp_path / "norms.json"
    norms.write_text('{"1": 2.0, "4": 1.2}')
    picture = tmp_path / "plan.svg"
    found = run(f"{PLAN} --gradient-norms {norms} --plot {picture}")
    assert picture.read_text().startswith("<svg")
    assert found["not_covered"]


@pytest.mark.slow
def test_a_plan_without_norms_says_which_group_sizes_the_extremes_would_choose(tmp_path):
    options = "plan --users 5000 --records-per-user 10 --epsilon 8 --noise-memory 0"
    found = {assumed: run(f"{options} --assume {assumed}") for assumed in ("same", "orthogonal")}
    assert found["same"]["group_size"] < found["orthogonal"]["group_size"]
    for plan in found.values():
        assert f"G={found['same']['group_size']} if all" in plan["reasons"][-1]
        assert f"G={found['orthogonal']['group_size']} if they" in plan["reasons"][-1]
    norms = tmp_path / "norms.json"
    norms.write_text('{"1": 2.0, "4": 1.2}')
    reasons = run(f"{options} --steps 10 --gradient-norms {norms}")["reasons"]
    assert not any("no gradient norms were given" in reason for reason in reasons)


def test_plan_text_marks_what_is_hypothetical():
    result = CliRunner().invoke(app, f"{PLAN} --times-users 10".split())
    assert "HYPOTHETICAL" in result.stdout
    assert result.stdout.count("hypothetical") == 2


def test_plan_takes_a_stores_median_and_says_that_it_peeked(tmp_path):
    # Median 3, mean 12: one user writes most.
    make_store(tmp_path / "store", [1, 2, 3, 3, 51])
    options = "--epsilon 4 --delta 1e-3 --steps 10 --compute 4"
    found = run(f"plan {tmp_path / 'store'} {options}")
    els = [one for one in found["candidates"] if one["method"] == "ELS"]
    assert els[0]["group_size"] == 3
    assert [entry.split(",")[0] for entry in found["peeked"]] == [
        "number of users",
        "median records of a user",
    ]
    assert len(found["not_covered"]) == 2
    text = CliRunner().invoke(app, f"plan {tmp_path / 'store'} {options}".split()).stdout
    assert text.count("looked at private data for free") == 2


def test_declared_numbers_are_no_peek(tmp_path):
    make_store(tmp_path / "store", [1, 2, 3, 3, 51])
    options = "--epsilon 4 --delta 1e-3 --steps 10 --compute 4 --records-per-user 4"
    found = run(f"plan {tmp_path / 'store'} {options}")
    assert [entry.split(",")[0] for entry in found["peeked"]] == ["number of users"]
    found = run(f"plan {tmp_path / 'store'} {options} --users 5")
    assert found["peeked"] == found["not_covered"] == []
    els = [one for one in found["candidates"] if one["method"] == "ELS"]
    assert els[0]["group_size"] == 4


@pytest.mark.slow
def test_accounting_needs_no_torch():
    modules = "userdp.cli.plan, userdp.cli.account, userdp.cli.quantile"
    code = f"import sys; import {modules}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_two_looks_of_the_quantile_have_different_noise(tmp_path, monkeypatch):
    # The noise itself is seen: twice the same look, on the same store.
    make_store(tmp_path / "store", [1, 2, 3, 3, 5])
    seen: list[bytes] = []
    from userdp.cli import quantile as command

    def look(values, *, rng, **request):
        seen.append(rng.normal(size=8).tobytes())
        return found(values, rng=rng, **request)

    found = command.private_quantile
    monkeypatch.setattr(command, "private_quantile", look)
    for _ in range(2):
        run(f"quantile {tmp_path / 'store'} --epsilon 1 --delta 1e-3")
    assert seen[0] != seen[1]


def test_the_price_of_a_quantile_is_rounded_up(tmp_path, monkeypatch):
    from userdp.accounting.certificate import Evaluation
    from userdp.cli import quantile as command

    make_store(tmp_path / "store", [1, 2, 3, 3, 5])
    told = Evaluation(epsilon=3.000157, certified_by="test", error_bound=0.0)
    monkeypatch.setattr(command.accountant, "evaluate", lambda *given, **named: told)
    options = f"quantile {tmp_path / 'store'} --epsilon 4 --delta 1e-3"
    text = CliRunner().invoke(app, options.split()).stdout
    assert "(epsilon=3.01, " in text


def test_calibrated_noise_is_printed_rounded_up():
    for options in (TARGET, TARGET.replace("0.01", "0.02"), TARGET.replace("200", "300")):
        exact = run(f"calibrate {options}")["noise_multiplier"]
        text = CliRunner().invoke(app, f"calibrate {options}".split()).stdout
        shown = float(text.splitlines()[0].removeprefix("noise_multiplier="))
        assert exact <= shown <= 1.00001 * exact


def test_discrete_noise_is_priced_by_its_own_rule() -> None:
    options = ("--rate", 0.01, "--steps", 2000, "--noise-multiplier", 2.0, "--delta", 1e-6)
    found = userdp("account", *options, "--noise", "discrete", "--json").json
    # dp_accounting 0.6's RDP accountant at whole orders says 1.120; Gaussian noise costs 1.035.
    assert found["epsilon"] == pytest.approx(1.120, abs=2e-3)
    assert "RDP at whole orders" in found["certified_by"]
