"""The test of a filter: are the users' gradients close together? If not, the run halts.

The numbers of one run, in equations, without torch. docs/accounting.md has the proof.

| symbol | name | meaning |
|---|---|---|
| N | `num_users` | public; no more users than this count in a step |
| T | `steps` | planned steps |
| tau / C | `concentration` | how close gradients must lie, in clip norms |
| epsilon_1 | `epsilon` | what AboveThreshold costs over the whole run |
| delta_2 | `delta` | the chance that it lets a step pass that it should not |

Reference: Chua et al. 2024, Alg. 3; Asi and Liu 2024; Dwork and Roth 2014, Alg. 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from userdp.errors import InputError

# One user changes the score, (1/N) sum over pairs, by less than this.
SCORE_SENSITIVITY = 2.0
# Gradients are rounded to multiples of C / GRID before they are compared. Then every product of two
# is a whole number below 2^53, and whether two users are close depends on these two alone.
GRID = 2**24
# What rounding the mean to float32 can add to a user's influence, in clip norms.
ROUNDING = 2.0**-22
BYTES_A_NUMBER = 4


@dataclass(frozen=True, kw_only=True)
class HaltingTest:
    """The public numbers of a test that every step of a run must pass."""

    num_users: int
    steps: int
    concentration: float
    threshold: float
    epsilon: float
    delta: float
    memory_gib: float

    def check(self) -> None:
        """Refuse numbers for which the test proves nothing."""
        least = 2 * self.num_users / 3 + 1
        if not self.lowest_score >= least:
            most = (self.threshold * self.num_users - least) or 1.0
            raise InputError(
                f"the filter's test errs by up to {self.margin:,.0f} users, and with "
                f"num_users={self.num_users:,} and threshold={self.threshold:g} it may err by "
                f"{max(most, 0):,.0f}: nothing could be proven. Use more users, a larger "
                "threshold_epsilon or a larger threshold (below 1)."
            )

    def check_memory(self, num_values: int) -> str:
        """What a step takes, in words; a model whose gradients do not fit is refused."""
        needed = self.num_users * num_values * BYTES_A_NUMBER / 2**30
        words = (
            f"the filter keeps every user's gradient: {self.num_users:,} users x {num_values:,} "
            f"weights x {BYTES_A_NUMBER} bytes = {needed:,.3g} GiB"
        )
        if needed > self.memory_gib:
            raise InputError(
                f"{words}, above memory_gib={self.memory_gib:g}. Train fewer weights (LoRA), or "
                "raise memory_gib."
            )
        return f"{words}, and compares them: {self.num_users**2 * num_values:.2g} products a step"

    @property
    def threshold_noise(self) -> float:
        """The scale of the Laplace noise on the threshold, drawn once a run."""
        return 2 * SCORE_SENSITIVITY / self.epsilon

    @property
    def score_noise(self) -> float:
        """The scale of the Laplace noise on each step's score."""
        return 4 * SCORE_SENSITIVITY / self.epsilon

    @property
    def margin(self) -> float:
        """alpha: with probability 1 - delta_2 no step passes whose score is lower by more."""
        return self.threshold_noise * math.log(1 / self.delta) + self.score_noise * math.log(
            self.steps / self.delta
        )

    @property
    def lowest_score(self) -> float:
        """The lowest score of a step that passes, but for delta_2."""
        return self.threshold * self.num_users - self.margin

    def passes(self, score: float, *, on_threshold: float, on_score: float) -> bool:
        """Whether the noised score reaches the noised threshold; noises come in unit scale."""
        reached = score + self.score_noise * on_score
        return reached >= self.threshold * self.num_users + self.threshold_noise * on_threshold

    # Weights are whole numbers out of `whole`, so that the weighted sum is exact.

    @property
    def whole(self) -> int:
        """The weight of a user with at least 2N/3 users within 2 tau."""
        return 4 * self.num_users - 6 * self._half

    @property
    def _half(self) -> int:
        return -(-self.num_users // 2)

    def weight(self, neighbours: int) -> int:
        """The weight of a user with so many users within 2 tau, itself included.

        Reference: Chua et al. 2024, Alg. 3, line 12, where it is the chance to be kept.
        """
        return min(max(6 * (neighbours - self._half), 0), self.whole)

    def sensitivity(self, bound: float) -> float:
        """How far one user moves N times the weighted mean, if the step's score is not too low.

        4 tau (2 + (N - s) / (2N/3 - N/2)) / s for the mean, with s the lowest score.
        """
        lowest, users = self.lowest_score, self.num_users
        moved = 2 + (users - lowest) * 6 / self.whole
        return users * bound * (4 * self.concentration * moved / lowest + ROUNDING)
