"""The command line as a contract: options, JSON keys, exit codes, what it imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from cli_runner import Result, python, userdp
from userdp import cli
from userdp.errors import BudgetExhaustedError, InputError, LedgerError, UnaccountedPlanError

ACCOUNT = (
    "account",
    *("--unit", "user"),
    *("--rate", "0.01"),
    *("--steps", "2000"),
    *("--noise-multiplier", "2"),
    *("--delta", "1e-6"),
)
CALIBRATE = (
    "calibrate",
    *("--unit", "user"),
    *("--rate", "0.0625"),
    *("--steps", "256"),
    *("--epsilon", "1"),
    *("--delta", "1e-6"),
)

# Adding, renaming or removing an option is a decision: it changes this table.
OPTIONS = {
    "account": {
        "run",
        "--unit",
        "--rate",
        "--steps",
        "--noise-multiplier",
        "--delta",
        "--group-size",
        "--adjacency",
        "--cap",
        "--users",
        "--accountant",
        "--noise",
        "--sampler",
        "--participations",
        "--parts",
        "--bands",
        "--unfinished",
        "--json",
    },
    "bound": {
        "source",
        "--max-records-per-user",
        "--out",
        "--method",
        "--engine",
        "--finish-below",
        "--weight",
        "--time-limit",
        "--few-owners",
        "--few-run",
        "--many-run",
        "--grid",
        "--steps",
        "--batch-size",
        "--separation",
        "--sequence-length",
        "--model",
        "--seed",
        "--json",
    },
    "budget": {"store", "--limit", "--delta", "--new", "--json"},
    "calibrate": {
        "--epsilon",
        "--delta",
        "--rate",
        "--steps",
        "--unit",
        "--group-size",
        "--adjacency",
        "--cap",
        "--users",
        "--accountant",
        "--noise",
        "--sampler",
        "--participations",
        "--parts",
        "--bands",
        "--json",
    },
    "duplicates": {
        "store",
        "--against",
        "--across-users",
        "--text",
        "--threshold",
        "--out",
        "--engine",
        "--json",
    },
    "evaluate": {
        "model",
        "store",
        "--sequence-length",
        "--task",
        "--device",
        "--allow-overlap",
        "--unfinished",
        "--json",
    },
    "import": {
        "sources",
        "--out",
        "--format",
        "--user",
        "--text",
        "--time",
        "--completion",
        "--label",
        "--owners",
        "--threads",
        "--drop-user",
        "--drop-matching",
        "--keep-lists",
        "--keep-forwarded",
        "--keep-repetitive",
        "--keep-short",
        "--ids",
        "--key",
        "--append",
        "--engine",
        "--json",
    },
    "personalize": {
        "run",
        "store",
        "--learning-rate",
        "--epochs",
        "--batch-rows",
        "--users-at-once",
        "--lora-rank",
        "--sequence-length",
        "--device",
        "--unfinished",
        "--json",
    },
    "plan": {
        "--epsilon",
        "--delta",
        "--steps",
        "--compute",
        "store",
        "--users",
        "--records-per-user",
        "--gradient-norms",
        "--assume",
        "--noise-memory",
        "--times-users",
        "--model",
        "--sample-users",
        "--sequence-length",
        "--task",
        "--adjacency",
        "--gpus",
        "--size",
        "--lora-rank",
        "--machine",
        "--plot",
        "--json",
    },
    "dictionary": {
        "store",
        "--out",
        "--epsilon",
        "--delta",
        "--words-per-user",
        "--size",
        "--adjacency",
        "--json",
    },
    "quantile": {
        "store",
        "--of",
        "--quantile",
        "--epsilon",
        "--delta",
        "--largest",
        "--adjacency",
        "--out",
        "--json",
    },
    "quickstart": {
        "--out",
        "--seed",
        "--model",
        "--device",
        "--json",
    },
    "report": {
        "run",
        "--unfinished",
        "--json",
    },
    "split": {
        "store",
        "--train",
        "--held-out",
        "--by",
        "--share",
        "--at-most",
        "--before",
        "--seed",
        "--allow-shared-users",
        "--json",
    },
    "stats": {
        "store",
        "--tokenizer",
        "--verify",
        "--json",
    },
    "verify": {"config", "--json"},
    "export": {
        "run",
        "--out",
        "--base",
        "--merged",
        "--license",
        "--json",
    },
    "finalize": {
        "run",
        "--unfinished",
        "--json",
    },
    "ledger verify": {"runs", "--json"},
    "train": {
        "config",
        "--out",
        "--resume",
        "--fork",
        "--from-step",
        "--steps",
        "--dry-run",
        "--json",
    },
}


def test_every_option_of_every_command_is_listed() -> None:
    found = {
        name: {
            max(parameter.opts, key=len) for parameter in command.params if parameter.name != "help"
        }
        for name, command in _commands(typer.main.get_command(cli.app))
    }
    assert found == OPTIONS


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those inside groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_explains_itself(command: str) -> None:
    result = userdp(*command.split(), "--help")
    assert result.code == 0
    assert "Usage:" in result.out
    assert command in result.out
    assert "--json" in result.out


@pytest.mark.parametrize("command", OPTIONS)
def test_no_help_loses_words_as_markup(command: str) -> None:
    """Typer reads [word] in a help text as a style, and shows nothing of it."""
    found = dict(_commands(typer.main.get_command(cli.app)))[command]
    for help_text in (found.help, *(getattr(one, "help", None) for one in found.params)):
        written = (help_text or "").replace("\\[", "[")
        assert Text.from_markup(help_text or "").plain == written


def test_account_of_users_is_1_035() -> None:
    data = userdp(*ACCOUNT, "--json").json
    assert data["epsilon"] == pytest.approx(1.035, rel=1e-3)
    assert {"epsilon", "delta", "adjacency", "unit", "accountant", "certified_by"} <= set(data)
    assert (data["delta"], data["adjacency"], data["unit"]) == (1e-6, "add-remove", "user")


def test_account_of_records_is_25_60() -> None:
    data = userdp(*ACCOUNT, "--unit", "record", "--group-size", "16", "--json").json
    assert data["epsilon"] == pytest.approx(25.60, rel=1e-3)
    assert data["unit"] == "record"


def test_account_says_it_in_words_rounded_up() -> None:
    result = userdp(*ACCOUNT)
    assert result.code == 0
    assert "(epsilon=1.04, delta=1e-06), user-level, add-remove" in result.out
    assert "2,000 steps" in result.out
    assert "certified by dp_accounting" in result.out


def test_calibrate_meets_its_target() -> None:
    data = userdp(*CALIBRATE, "--json").json
    # Charles et al. 2024, Sec. 4: N = 256, T = 256, cohort 16.
    assert data["noise_multiplier"] == pytest.approx(4.39464, rel=1e-3)
    assert 0.999 < data["epsilon"] <= 1.0
    assert {"noise_multiplier", "epsilon", "delta", "certified_by", "seconds"} <= set(data)
    assert "noise_multiplier=4.39" in userdp(*CALIBRATE).out


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": (("account",), "--rate"),
    "rate missing": (("account", "--steps", "3", "--noise-multiplier", "1"), "--rate"),
    "rate above one": ((*ACCOUNT, "--rate", "1.5"), "user_sampling_prob=1.5"),
    "rate zero": ((*ACCOUNT, "--rate", "0"), "user_sampling_prob=0.0"),
    "rate nan": ((*ACCOUNT, "--rate", "nan"), "user_sampling_prob=nan"),
    "rate in words": ((*ACCOUNT, "--rate", "often"), "--rate"),
    "delta zero": ((*ACCOUNT, "--delta", "0"), "delta=0.0"),
    "delta one": ((*ACCOUNT, "--delta", "1"), "delta=1.0"),
    "delta for so few users": (
        (*ACCOUNT, "--delta", "0.1", "--sampler", "without-replacement", "--users", "100"),
        "above 1/num_users=0.01",
    ),
    "delta nan": ((*ACCOUNT, "--delta", "nan"), "delta=nan"),
    "delta too small to compute with": ((*ACCOUNT, "--delta", "1e-300"), "delta=1e-300"),
    "noise zero": ((*ACCOUNT, "--noise-multiplier", "0"), "protects nobody"),
    "noise negative": ((*ACCOUNT, "--noise-multiplier", "-1"), "--noise-multiplier -1.0"),
    "noise infinite": ((*ACCOUNT, "--noise-multiplier", "inf"), "--noise-multiplier inf"),
    "no steps": ((*ACCOUNT, "--steps", "0"), "--steps 0"),
    "group of nobody": ((*ACCOUNT, "--group-size", "0"), "group_size=0"),
    "unit unknown": ((*ACCOUNT, "--unit", "planet"), "--unit"),
    "node privacy": ((*ACCOUNT, "--adjacency", "node"), "adjacency"),
    "epsilon out of reach": ((*CALIBRATE, "--epsilon", "1e-9"), "epsilon=1e-09"),
    "option unknown": ((*ACCOUNT, "--epsilonn", "3"), "--epsilonn"),
    "run and numbers": (("account", "somewhere", "--rate", "0.1"), "not both"),
    "run that is none": (("account", "nowhere"), "is this the directory of a run"),
    "epsilon zero": ((*CALIBRATE, "--epsilon", "0"), "epsilon=0.0"),
    "epsilon negative": ((*CALIBRATE, "--epsilon", "-2"), "epsilon=-2.0"),
    "epsilon nan": ((*CALIBRATE, "--epsilon", "nan"), "epsilon=nan"),
    "epsilon inf": ((*CALIBRATE, "--epsilon", "inf"), "epsilon=inf"),
    "calibrate no steps": ((*CALIBRATE, "--steps", "-1"), "--steps -1"),
    "calibrate delta": ((*CALIBRATE, "--delta", "7"), "delta=7.0"),
    "stats of nothing": (("stats", "nowhere"), "not a user store"),
    "report of nothing": (("report", "nowhere"), "is this the directory of a run"),
    "train without file": (("train", "nowhere.toml", "--out", "run"), "nowhere.toml"),
    "finalize nothing": (("finalize", "nowhere"), "is this the directory of a run"),
    "export nothing": (("export", "nowhere", "--out", "x"), "is this the directory of a run"),
    "export to nowhere": (("export", "nowhere"), "--out"),
    "no run to verify": (("ledger", "verify"), "runs"),
    "ledger command unknown": (("ledger", "trane"), "trane"),
    "personalize on nothing": (("personalize", "model", "nowhere"), "not a user store"),
    "evaluate on nothing": (("evaluate", "model", "nowhere"), "not a user store"),
    "command unknown": (("trane",), "trane"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_ends_with_2_and_a_named_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = WRONG[what]
    result = userdp(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert expected in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad"), 2),
        (LedgerError("bad"), 2),
        (UnaccountedPlanError("bad"), 2),
        (BudgetExhaustedError("spent"), 3),
    ],
)
def test_our_errors_are_one_line_and_their_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert userdp() == Result(code=code, out="", err=f"error: {error}\n")


def test_budget_exhausted_maps_to_3_from_a_real_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spent(path: Path) -> None:
        raise BudgetExhaustedError("all 4 planned steps are taken")

    monkeypatch.setattr("userdp.ledger.book.Ledger.read", spent)
    result = userdp("account", tmp_path)
    assert result.code == 3
    assert "planned steps" in result.err


def test_failure_of_ours_is_exit_code_1_as_a_shell_sees_it() -> None:
    code = "import userdp.cli as c\ndef fail(): raise RuntimeError('ours')\nc.app = fail\nc.main()"
    assert python(code).returncode == 1


def test_account_as_a_shell_sees_it_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from userdp.cli import main\n"
        "sys.argv = ['userdp', *sys.argv[1:]]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = [n for n in ('torch', 'transformers', 'peft') if n in sys.modules]\n"
        "    print('heavy', heavy, file=sys.stderr)\n"
    )
    for arguments in (ACCOUNT, CALIBRATE):
        result = python(code, *arguments, "--json")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("{")
        assert result.stdout.count("\n") == 1
        assert result.stderr == "heavy []\n"


def test_the_version_and_the_module_as_a_program() -> None:
    import userdp as library

    assert userdp("--version").out == f"userdp {library.__version__}\n"
    said = python(
        "import runpy, sys; sys.argv = ['x', '--version']; "
        "runpy.run_module('userdp', run_name='__main__')"
    )
    assert (said.returncode, said.stdout) == (0, f"userdp {library.__version__}\n")
