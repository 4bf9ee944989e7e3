"""How the program ends: one line on stderr and an exit code, whatever went wrong.

| what | exit code |
|---|---|
| wrong input, a wrong option, a path that cannot be used | 2 |
| the privacy budget is exhausted | 3 |
| the machine failed, such as a full disk | 1 |
| Ctrl-C | 130 |

A fault of our own keeps its traceback, which names lines of code and no record.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from userdp.errors import BudgetExhaustedError, InputError, StoppedRunError
from userdp.ranks_launched import is_told, launched_rank

FAILED = 1
INTERRUPTED = 130

# Errors of the system that the caller can mend by naming another path.
_WRONG_PATH = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)

# Whatever typer itself is built on, this is the base of its errors about the command line.
_UsageError: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """The commands. A wrong option is an `InputError`, so it ends like any other wrong input."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command; with `standalone_mode`, leave the program with its exit code."""
        try:
            extra = {"prog_name": "userdp"} | extra
            result = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(InputError.exit_code)
            raise InputError(_usage(error)) from None
        if standalone_mode:
            sys.exit(result if type(result) is int else 0)
        return result

    def invoke(self, ctx: Any) -> Any:
        """Run the command of this context."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _print("interrupted: nothing more was done.")
            raise typer.Exit(INTERRUPTED) from None


def end(program: Callable[[], object]) -> None:
    """Run the program. Errors that a user can meet become one line and their exit code."""
    try:
        program()
    except (InputError, BudgetExhaustedError, StoppedRunError) as error:
        if not is_told(error):
            _print(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _print("interrupted: nothing more was done.")
        sys.exit(INTERRUPTED)
    except OSError as error:
        _print(_of_the_system(error))
        sys.exit(InputError.exit_code if error.errno in _WRONG_PATH else FAILED)


def _usage(error: Any) -> str:
    """A wrong option in one line, and where the right ones are listed."""
    command = error.ctx.command_path if error.ctx is not None else "userdp"
    message = error.format_message().rstrip()
    stop = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{stop} See `{command} --help`."


def _of_the_system(error: OSError) -> str:
    """Which path, and what the system says about it. A library's own words may quote the data."""
    place = error.filename2 or error.filename
    what = os.strerror(error.errno) if error.errno else "reading or writing failed"
    return f"{os.fsdecode(place)}: {what}." if isinstance(place, str | bytes) else f"{what}."


def _print(message: str) -> None:
    # Of several ranks the first needs no name.
    who = f"rank {rank}: " if (rank := launched_rank()) else ""
    # A path may hold a line break; the message is one line all the same.
    print(f"error: {who}{' '.join(message.split())}", file=sys.stderr)
