"""Which rows a ledger has, and in which order."""

from __future__ import annotations

from pathlib import Path

from userdp.chain import Row
from userdp.errors import LedgerError

FORMAT = 3


def check_content(rows: list[Row], path: Path) -> None:
    """Refuse rows that make no sense, even if they are chained correctly."""
    if not rows or rows[0].get("kind") != "run":
        raise LedgerError(f"{path}: the first row must describe the run.")
    if rows[0].get("format") != FORMAT:
        raise LedgerError(f"{path}: written in a format this version does not read.")
    kinds = [row.get("kind") for row in rows[1:] if row.get("kind") != "doubt"]
    if any(not isinstance(row.get("reason"), str) for row in rows if row.get("kind") == "doubt"):
        raise LedgerError(f"{path}: a row of doubt gives no reason.")
    is_closed = kinds[-1:] == ["end"]
    if is_closed:
        kinds.pop()
    num_before = sum(kind in ("paid", "earlier") for kind in kinds)
    if any(kind not in ("paid", "earlier") for kind in kinds[:num_before]) or any(
        kind != "step" for kind in kinds[num_before:]
    ):
        raise LedgerError(
            f"{path}: after the run come the earlier runs and the paid rows, then the steps, then "
            "at most one closing row, and nothing else."
        )
    steps = [row.get("step") for row in rows if row.get("kind") == "step"]
    if steps != list(range(len(steps))):
        raise LedgerError(f"{path}: the steps are not consecutive.")
    if is_closed and rows[-1].get("steps") != len(steps):
        raise LedgerError(f"{path}: the closing row counts other steps than there are.")
    first = rows[0]
    if type(first.get("fixed_seed")) is not bool or not isinstance(first.get("bound_to"), dict):
        raise LedgerError(f"{path}: the first row lacks what the run was bound to.")
    if not isinstance(first.get("model_check"), str):
        raise LedgerError(f"{path}: the first row does not say how the model was checked.")
