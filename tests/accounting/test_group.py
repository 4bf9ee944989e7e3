"""Black-box group privacy against typed numbers."""

from __future__ import annotations

import json

import pytest
from dp_accounting import dp_event
from oracles import binomial

from shared import SHARED, needs_shared
from userdp.accounting import events, group
from userdp.errors import InputError
from userdp.units import Adjacency


@needs_shared
def test_group_privacy_matches_golden():
    data = json.loads((SHARED / "golden" / "accounting.json").read_text())["a"]
    rows = [row for row in data["rows"] if row["eps_group_blackbox"] and row["G"] > 1]
    for row in rows:
        found = group.group_epsilon(
            [binomial(row["sigma"], 1, row["p"], row["T"])],
            group_size=row["G"],
            delta=row["delta"],
        )
        assert found == pytest.approx(row["eps_group_blackbox"], rel=data["rtol_group"])
        assert found >= row["eps_mog"] * 0.999


def test_group_privacy_that_diverges_says_so():
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(0.5))
    with pytest.raises(InputError, match="no finite epsilon"):
        group.evaluation(
            events.repeated(step, 2000), group_size=32, delta=1e-6, adjacency=Adjacency.ADD_REMOVE
        )
