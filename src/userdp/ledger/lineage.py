"""How a run takes over what was spent before on the weights that it starts from.

Every run on a model goes through here: the loop over a store, and a private step in the caller's
own loop.
"""

from __future__ import annotations

import dataclasses

from userdp.errors import InputError
from userdp.history import ATTRIBUTE, History, Module, carry, history_of, home_of
from userdp.ledger.book import Ledger
from userdp.prices.earlier import Earlier, inherited
from userdp.runs.files import check_homes


def earlier_runs(model: Module, *, other_people: bool = False, data: str = "") -> list[Earlier]:
    """The runs behind the model's weights, as a new run on `data` sees them.

    `other_people` declares that no person of the new run was in an earlier one. If an earlier run
    used the same data, the declaration is wrong and is refused. A model is also refused if the
    ledger of its own run contradicts it.
    """
    history = history_of(model)
    before = [Earlier.from_json(entry) for entry in history.entries]
    check_homes(history.homes, history.loaded)
    if other_people and any(data and item.data == data for item in before):
        raise InputError(
            "other_people is declared, and an earlier run behind these weights was on this very "
            "data. Leave the declaration out: both runs are then composed."
        )
    return list(inherited(before, other_people=other_people))


UNCOMPARED_PAST = (
    "what was spent before is as the model's own file says; its run's ledger is not here to compare"
)


def past_cautions(model: Module) -> tuple[str, ...]:
    """What to say of a model that was loaded from a directory outside its run."""
    loaded = history_of(model).loaded
    compared = {place.resolve() for place in loaded if home_of(place) is not None}
    return () if all(place.resolve() in compared for place in loaded) else (UNCOMPARED_PAST,)


def begin_run(model: Module, ledger: Ledger) -> None:
    """Compose what was spent on the model's weights into `ledger`. The model then carries both.

    Runs that the ledger has inherited already are not counted again. Neither is the run itself, if
    the ledger continues it.
    """
    ledger.check_open()
    history = history_of(model)
    known = {item.run: item.steps for item in ledger.earlier}
    if ledger.steps:
        known[ledger.run_digest] = ledger.priced_steps
    if any(known.get(entry["run"], -1) < entry["steps"] for entry in history.entries):
        # Something is new. Only then must the model's files be checked (again).
        before = earlier_runs(model)
        ledger.inherit([item for item in before if known.get(item.run, -1) < item.steps])
    entries = tuple(item.to_json() for item in ledger.earlier)
    carry(model, dataclasses.replace(history, entries=entries, record=ledger))


def check_current(model: Module, ledger: Ledger) -> None:
    """Refuse a step of a run if another run has begun on the same model since."""
    own = vars(model).get(ATTRIBUTE)
    # A run on a part of the model is also one on the model, so every part is checked.
    carried = (vars(module).get(ATTRIBUTE) for module in model.modules())
    others = any(isinstance(item, History) and item.record is not ledger for item in carried)
    if not isinstance(own, History) or others:
        raise InputError(
            "another private run was begun on this model or a part of it, and would not count the "
            "steps of this one. Finish one run before the next, or train a copy of the model."
        )
