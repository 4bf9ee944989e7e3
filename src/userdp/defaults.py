"""What is chosen for whoever chooses nothing: one function or number a choice, with its evidence.

Every default follows from public numbers alone: the declared number of users, and the shape of the
model. None is read from the data, so none costs privacy. The measurements are in docs/tuning.md,
with machine and date; `reproductions/finetuning/defaults.py` takes them again.

Needs no torch.
"""

from __future__ import annotations

import math
from typing import Literal

from userdp.errors import InputError

STEPS = 500
"""Steps of a run.

With the cohort below and 5,000 users, the noise on the mean of all steps' updates is then within 4%
of the least that any cohort and any number of steps could have at epsilon = 1, and within 50% of it
at epsilon = 8 (docs/tuning.md, tests/test_defaults.py).
"""

GROUP_SIZE = 4
"""Most records of a user in one step, where users are sampled.

It costs no privacy, only time. Held-out loss fell as much from 1 to 4 records as from 4 to 16.
"""

SCHEDULE: Literal["linear"] = "linear"
"""How the learning rate falls. It did a little better than a constant rate and than a cosine."""

SMALLEST_COHORT, LARGEST_COHORT = 32, 1024
COHORTS = 20


def expected_cohort_size(
    num_users: int, given: float | None = None, *, everybody: bool = False
) -> float:
    """How many users are expected in a step: a twentieth of them, from 32 to 1,024.

    With `everybody` it is all of them, for an update that has a price in no other way.

    A larger cohort needs more noise, but less on the mean. From about a twentieth of the users on,
    little is left to gain. Fewer than 32 users make a mean that varies too much; more than 1,024
    cost more time than they gain.

    >>> expected_cohort_size(5000), expected_cohort_size(200), expected_cohort_size(1_000_000)
    (250.0, 32.0, 1024.0)
    """
    if given is not None:
        return given
    if everybody:
        return float(num_users)
    return float(min(num_users, max(SMALLEST_COHORT, min(LARGEST_COHORT, num_users / COHORTS))))


def compute(num_users: int, records_per_user: int) -> int:
    """Gradients in a step of the default cohort and group size, rounded down to a power of two.

    >>> compute(5000, 32), compute(5, 3)
    (512, 8)
    """
    expected = expected_cohort_size(num_users) * min(GROUP_SIZE, records_per_user)
    return 1 << math.floor(math.log2(expected))


def delta(num_users: int) -> float:
    """N^-1.1, rounded down to one digit; N = `num_users`.

    It is below 1 / N, as it must be: with delta = 1 / N, publishing one user's data would pass for
    private. Reference: McMahan et al. 2018, Table 1, with N users. (Charles et al. 2024, Sec. 4,
    take the number of records for N, and so a smaller delta.)

    >>> delta(5000), delta(763_430)
    (8e-05, 3e-07)
    """
    if num_users < 2:
        raise InputError(f"num_users={num_users}: hiding one user takes at least one other.")
    exact = num_users**-1.1
    exponent = math.floor(math.log10(exact))
    return float(f"{math.floor(exact / 10**exponent)}e{exponent}")


def learning_rate(*, adapters: bool, width: int) -> float:
    """The full rate for AdamW and its kin, by the model's `width` (its hidden size).

    5e-3 for adapters (LoRA) up to width 576, and 1.5e-3 for all weights up to width 96; beyond that
    they fall as 1 / sqrt(width). Adaptive steps have the size of the rate whatever the clip norm
    is, so the rate is all that is left to choose.

    Evidence: for adapters the best rate was 1e-2 at width 96 (of four, at epsilon 1, 3 and 8) and
    at width 576 (SmolLM2-135M, of three, at 1 and 8). Three times as much is worse than no training
    or close to it, and a third keeps 37 to 83% of the gain, so the default is half of the best. For
    all weights it was 3e-3 at width 96 and at least 3e-4 at width 576. Beyond these widths nothing
    was measured.

    >>> learning_rate(adapters=True, width=96), learning_rate(adapters=False, width=96)
    (0.005, 0.0015)
    >>> learning_rate(adapters=True, width=768), learning_rate(adapters=False, width=768)
    (0.0043, 0.00053)
    """
    rate, measured = (5e-3, 576) if adapters else (1.5e-3, 96)
    rate *= math.sqrt(min(1.0, measured / width))
    return float(f"{rate:.2g}")
