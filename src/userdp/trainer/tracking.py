"""The trackers in `report_to`: they are told what callbacks are told, and no time of a step.

How long a step took tells how many users took part in it. The callbacks of `transformers` write the
time of every number, and send it away. So `userdp.training.trackers` keeps the numbers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from userdp.errors import InputError
from userdp.training.trackers import TRACKERS, Tracker, check_trackers, open_trackers


class Tracking(TrainerCallback):
    """Keeps what is logged during the training below `out`, under `trackers`."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        unknown = sorted(set(names) - TRACKERS.keys())
        if unknown:
            raise InputError(
                f"report_to={unknown!r}: nobody has looked at what it sends, and some such "
                "trackers upload the output folder with its secrets. Use "
                f"{', '.join(TRACKERS)} or 'none'."
            )
        check_trackers(names, out)
        self._names, self._out = names, out
        self._opened: list[Tracker] = []
        self._stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the trackers."""
        self._opened = self._stack.enter_context(open_trackers(self._names, self._out))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Tell them the numbers."""
        for tracker in self._opened:
            tracker.log(dict(logs or {}), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close them."""
        self._opened = []
        self._stack.close()
