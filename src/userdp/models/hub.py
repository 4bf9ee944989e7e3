"""Whether the hub of models can be reached, before its client tries again and again.

A model's name may mean a place on the hub. Without a network its client repeats every question for
half a minute, and asks several. Here it is asked once. If nothing answers, it looks only among the
models that it keeps on this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import get_session

# Seconds until the hub must have answered.
PATIENCE = 4.0


@contextmanager
def asked_once(source: str) -> Iterator[None]:
    """Inside, a name is looked for on the hub only if the hub answers."""
    before = constants.HF_HUB_OFFLINE
    if not (before or not source or Path(source).exists() or _answers()):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    """Whether the hub answers at all, whatever it says, through the proxy if there is one."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(get_session().head(constants.ENDPOINT, timeout=PATIENCE))
        except Exception:
            # Whatever went wrong, nothing answered.
            return

    # By a thread: finding the address of a name has no limit of time.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(found)
