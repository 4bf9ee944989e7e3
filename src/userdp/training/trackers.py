"""Sends a run's public numbers to TensorBoard, trackio or Weights & Biases.

A tracker gets what the run's statement and files release anyway: the step, the epsilon spent, the
learning rate, the clip norm (an adaptive one follows a noised count), and a validation curve that
may be released. It never gets a loss on training users, a norm, or how many users took part.

How long a step took tells how many users took part. TensorBoard is told no time. The other two note
the time of each number by themselves, so what they keep is for the run's owner. Measurements of the
machine are turned off, and nothing is sent anywhere by this package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from userdp.errors import InputError

DIRECTORY = "trackers"


class Tracker(Protocol):
    """Takes numbers by name, step by step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Keep the numbers of one step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files, for `tensorboard --logdir RUN/trackers/tensorboard`."""

    def __init__(self, run: Path) -> None:
        module = _imported("tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(run / DIRECTORY / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add one scalar for each number."""
        for name, value in numbers.items():
            # The number of the step stands for its time.
            self._writer.add_scalar(name, value, step, walltime=float(step))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Trackio:
    """A project "userdp" in the database that trackio keeps for its owner."""

    def __init__(self, run: Path) -> None:
        self._module = _imported("trackio")
        self._module.init(project="userdp", name=run.name, auto_log_gpu=False, auto_log_cpu=False)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add the numbers to the database."""
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._module.finish()


class WeightsAndBiases:
    """An offline run in RUN/trackers; `wandb sync` sends it, if its owner wants that."""

    def __init__(self, run: Path) -> None:
        module = _imported("wandb")
        directory = run / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        self._run = module.init(
            project="userdp",
            name=run.name,
            dir=str(directory),
            mode="offline",
            # No copy of the code, of what is printed, or of the repository's state.
            settings=module.Settings(
                console="off", save_code=False, disable_git=True, x_disable_stats=True
            ),
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add the numbers to the offline run."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}
# The module that each needs, and by its own name the package to install.
MODULES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


def check_trackers(names: Sequence[str], run: Path | None) -> None:
    """Refuse, before anything is charged, trackers that are not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"tracker {name!r} is not known: choose from {', '.join(TRACKERS)}.")
        if run is None:
            raise InputError(f"tracker {name!r} writes into the run's directory: give `out`.")
    for name in names:
        _imported(name)


@contextlib.contextmanager
def open_trackers(names: Sequence[str], run: Path | None) -> Iterator[list[Tracker]]:
    """The named trackers of the run in `run`, closed at the end."""
    if run is None:
        yield []
        return
    with contextlib.ExitStack() as stack:
        opened: list[Tracker] = []
        for name in names:
            with _talk_on_stderr():
                opened.append(TRACKERS[name](run))
            stack.callback(_close, opened[-1])
        yield opened


def _close(tracker: Tracker) -> None:
    with _talk_on_stderr():
        tracker.close()


def _talk_on_stderr() -> contextlib.redirect_stdout[Any]:
    """Some packages greet on stdout, which is for the result."""
    return contextlib.redirect_stdout(sys.stderr)


def _imported(name: str) -> Any:
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise InputError(
            f"tracker {name!r} cannot be used here ({error}): pip install {name}, or leave it out."
        ) from None
