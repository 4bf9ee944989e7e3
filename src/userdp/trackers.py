"""Sends a run's public numbers to TensorBoard, trackio or Weights & Biases.

A tracker gets what the run's statement and files release anyway: the step, the epsilon spent, the
learning rate, the clip norm (an adaptive one follows a noised count), and a validation curve that
may be released. It never gets a loss on training users, a norm, or how many users took part.

Everything is written below the run's directory, and nothing is sent anywhere.
"""

from __future__ import annotations

import contextlib
import os
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
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Trackio:
    """A local trackio database in RUN/trackers/trackio."""

    def __init__(self, run: Path) -> None:
        # The package reads this when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run / DIRECTORY / "trackio").resolve()))
        self._module = _imported("trackio")
        self._module.init(project="userdp", name=run.name)

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
            settings=module.Settings(console="off", save_code=False, disable_git=True),
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
        # Some packages greet on stdout, which is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            for name in names:
                tracker = TRACKERS[name](run)
                stack.callback(tracker.close)
                opened.append(tracker)
        yield opened


def _imported(name: str) -> Any:
    try:
        return import_module(MODULES[name])
    except ImportError:
        raise InputError(
            f"tracker {name!r} is not installed here: pip install {name}, or leave it out."
        ) from None
