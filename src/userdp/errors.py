"""The errors a user can meet, and the exit code each one gives the command line.

A message names the value, the rule, the reason and the way out. It never contains a record's text
or a user's id.
"""

from __future__ import annotations

# How one asks for these, in a command or a configuration and from Python.
FORK = "--fork (userdp.train: fork=True)"
RESUME = "--resume (userdp.train: resume=True; UserDPTrainer: resume_from_checkpoint=True)"
PLAIN = 'path="plain" ([training] path; Python: settings=StepSettings(path="plain"))'


class InputError(ValueError):
    """Something the caller gave is wrong: exit code 2."""

    exit_code = 2


class UnaccountedPlanError(InputError):
    """The chosen parts have no rule that says what they cost, so the plan cannot be built."""


class MixedExamplesError(InputError):
    """The model lets one user's records change another user's gradient."""


class UntriedModelError(MixedExamplesError):
    """The model fails on rows made up like an example: nothing is known of it."""


class NothingSeenError(UntriedModelError):
    """Made-up rows have no gradient: a probe of them would show nothing."""


class LedgerError(InputError):
    """A ledger is missing, was edited, or belongs to something else."""


class BudgetExhaustedError(RuntimeError):
    """Every planned step was taken: one more would exceed the stated epsilon. Exit code 3."""

    exit_code = 3


class StoppedRunError(RuntimeError):
    """The machine, not the input, stopped a run: a full disk, a lost mount. Exit code 1."""

    exit_code = 1
