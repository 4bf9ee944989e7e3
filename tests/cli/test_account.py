"""`userdp account`, `calibrate` and `plan`: the contract's options and keys."""

from __future__ import annotations

import json
import subprocess
import sys

import mcmahan
import pytest
from typer.testing import CliRunner

from tiny import make_store
from userdp.cli import app
from userdp.errors import InputError
from userdp.statement import round_up

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


PLAN = "plan --users 1024 --records-per-user 8 --epsilon 4 --delta 1e-6 --steps 100 --compute 32"


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
