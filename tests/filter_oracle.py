"""The epsilon of a run with a filter, from its ledger alone, by formulas of its own.

    python tests/filter_oracle.py RUN/ledger.jsonl

Imports nothing of userdp. T steps of the Gaussian mechanism at noise multiplier sigma are one at
sigma / sqrt(T), whose delta has a closed form (Balle and Wang 2018, Thm. 8). The test adds its
epsilon, and its delta is taken from that of the steps.
"""

from __future__ import annotations

import json
import math
import sys

from scipy.optimize import brentq
from scipy.special import log_ndtr


def gaussian_delta(epsilon: float, sigma: float) -> float:
    first = log_ndtr(1 / (2 * sigma) - epsilon * sigma)
    second = epsilon + log_ndtr(-1 / (2 * sigma) - epsilon * sigma)
    return math.exp(first) - math.exp(second)


def epsilon_of(lines: list[str]) -> float:
    rows = [json.loads(line) for line in lines]
    plan = rows[0]["plan"]
    steps = sum(row["kind"] == "step" for row in rows)
    if any(row["kind"] == "halt" for row in rows):
        # When a run halts depends on the data, so all planned steps are priced.
        steps = plan["steps"]
    rule = plan["update"]
    left = plan["delta"] - rule["threshold_delta"]
    sigma = plan["noise"]["noise_multiplier"] / math.sqrt(steps)
    spent = brentq(lambda e: gaussian_delta(e, sigma) - left, 0.0, 1e6, xtol=1e-12)
    return spent + rule["threshold_epsilon"]


def noise_stddev_of(plan: dict[str, object]) -> float:
    """The noise on N times the mean, from the plan's own numbers."""
    users, steps = int(plan["num_users"]), int(plan["steps"])  # type: ignore[call-overload]
    rule: dict[str, float] = plan["update"]  # type: ignore[assignment]
    clip = plan["clip"]["clip_norm"]  # type: ignore[index]
    margin = 4 / rule["threshold_epsilon"] * math.log(1 / rule["threshold_delta"])
    margin += 8 / rule["threshold_epsilon"] * math.log(steps / rule["threshold_delta"])
    score = rule["threshold"] * users - margin
    changed = (users - score) / (2 * users / 3 - math.ceil(users / 2)) + 2
    moved = 4 * rule["concentration"] * clip * changed / score + clip / 2**22
    return plan["noise"]["noise_multiplier"] * users * moved  # type: ignore[index]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(repr(epsilon_of(file.readlines())))
