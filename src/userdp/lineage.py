"""How a run takes over what was spent before on the weights that it starts from.

Every run on a model goes through here: the loop over a store, and also a private step in the
caller's own loop.
"""

from __future__ import annotations

from userdp.earlier import Earlier, inherited
from userdp.errors import InputError
from userdp.history import ATTRIBUTE, History, Module, carry, history_of
from userdp.ledger import Ledger
from userdp.run_files import check_homes


def earlier_runs(model: Module, *, other_people: bool = False, data: str = "") -> list[Earlier]:
    """The runs behind the model's weights, as a new run on `data` sees them.

    `other_people` declares that nobody in the new run was in one of them. Such a declaration is
    refused if one of them was on the same data. A model is refused if its own run's ledger
    contradicts it.
    """
    history = history_of(model)
    before = [Earlier.from_json(entry) for entry in history.entries]
    check_homes(history.homes)
    if other_people and any(data and item.data == data for item in before):
        raise InputError(
            "other_people is declared, and an earlier run behind these weights was on this very "
            "data. Leave the declaration out: both runs are then composed."
        )
    return list(inherited(before, other_people=other_people))


def begin_run(model: Module, ledger: Ledger) -> None:
    """Add what was spent on the model's weights to `ledger`, and let the model carry both.

    Runs that the ledger has inherited already are not counted again, nor is the run that it
    continues.
    """
    ledger.check_open()
    history = history_of(model)
    known = {item.run: item.steps for item in ledger.earlier}
    if ledger.steps:
        known[ledger.run_digest] = ledger.steps
    if any(known.get(entry["run"], -1) < entry["steps"] for entry in history.entries):
        # Only if the model carries something new, its files have to be checked.
        before = earlier_runs(model)
        ledger.inherit([item for item in before if known.get(item.run, -1) < item.steps])
    entries = tuple(item.to_json() for item in ledger.earlier)
    carry(model, History(entries=entries, record=ledger, homes=history.homes))


def check_current(model: Module, ledger: Ledger) -> None:
    """Refuse a step of a run if another run was begun on the same model since."""
    own = vars(model).get(ATTRIBUTE)
    # A run on a part of the model counts as a run on the model, so every part is checked.
    carried = (vars(module).get(ATTRIBUTE) for module in model.modules())
    others = any(isinstance(item, History) and item.record is not ledger for item in carried)
    if not isinstance(own, History) or others:
        raise InputError(
            "another private run was begun on this model or a part of it, and would not count the "
            "steps of this one. Finish one run before the next, or train a copy of the model."
        )
