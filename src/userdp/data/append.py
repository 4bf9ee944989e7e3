"""A new store with another store's records and new ones behind them.

Old and new records of one person are one user's, because ids are hidden under the same key by the
same rule. The other store stays as it is. Both share one population: what is spent on either counts
for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from userdp.data.belonging import link_to
from userdp.data.engine import EngineName
from userdp.data.identity import DropRule, IdRule, Pseudonyms
from userdp.data.record import ImportBatch
from userdp.data.split import record_batches
from userdp.data.store import ImportResult, UserStore
from userdp.data.write import write_batches
from userdp.errors import InputError


def check_key(parent: UserStore, pseudonyms: Pseudonyms, id_rule: IdRule) -> None:
    """Raise if this key and rule would give the parent's users other pseudonyms."""
    if pseudonyms.key_name(id_rule) != parent.manifest["key_name"]:
        raise InputError(
            f"{parent.path}: its ids are hidden under another key, or compared by another rule "
            f"than --ids {id_rule.value}. Somebody in both parts would count as two users. Give "
            "the --key and the --ids that it was imported with."
        )


def append_batches(
    parent: UserStore,
    batches: Iterable[ImportBatch],
    out: Path,
    *,
    scratch: Path,
    pseudonyms: Pseudonyms,
    id_rule: IdRule = IdRule.REFUSE,
    first_owner_only: bool = False,
    drop: DropRule | None = None,
    engine: EngineName = EngineName.DUCKDB,
) -> ImportResult:
    """Write the parent's records and then those of the batches as a store.

    The options are those of `write_batches`, for the new records. `scratch` is an empty directory
    on a disk with room for them. On any error, nothing is left behind.
    """
    check_key(parent, pseudonyms, id_rule)
    # The parent's ids are known by their pseudonyms only, so the new ones are hidden first.
    new = write_batches(
        batches,
        scratch / "new",
        pseudonyms=pseudonyms,
        id_rule=id_rule,
        first_owner_only=first_owner_only,
        drop=drop,
        engine=engine,
    )
    added = UserStore.open(scratch / "new")
    whole = write_batches(
        chain.from_iterable(
            record_batches(store, np.arange(store.num_records)) for store in (parent, added)
        ),
        out,
        pseudonyms=Pseudonyms.kept(parent.manifest["key_name"], parent.fingerprint_key),
        id_rule=IdRule.EXACT,
        engine=engine,
        cautions=parent.cautions,
        user_splits=parent.user_splits,
        population=link_to(parent, out),
    )
    return dataclasses.replace(whole, skipped=new.skipped)
