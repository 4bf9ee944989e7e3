"""Words that many users write, for a price: a word is released if its noisy count is high enough.

Every user votes for at most m words, one vote each. Every word that somebody voted for gets
Gaussian noise of standard deviation s = z sqrt(m) on its count. It is released if the noisy count
is above a threshold T. A word that nobody voted for is never released, so the possible words need
not be known beforehand.

Price: a Gaussian event of noise multiplier z, and (0, delta_T), where delta_T bounds the chance
that some word of one user alone is released. Proof, for two datasets D and D' that differ in one
user:

  * Words with votes in both. Their counts differ by one vote for at most m words, so by sqrt(m) in
    L2, and the noise has z times that. If one user replaces another, they differ by at most
    sqrt(2 m), and the accountant's replace adjacency covers 2 sqrt(m).
  * Words with votes in D alone are at most m, each with the one vote of the user. In D' they are
    never released. In D each is released with probability p = P(1 + N(0, s^2) > T), on its own. T
    is chosen so that 1 - (1 - p)^m = delta_T. So what is released of these words differs with
    probability delta_T at most: such a part is (0, delta_T)-DP. The same holds for words with votes
    in D' alone, and for both kinds together: in the two datasets "nothing" is released with
    probability 1 - delta_T at least.

Both parts have noise of their own, so the whole is their composition. The order by noisy counts and
a cut to the first few words are post-processing.

Public: m, z, T, delta_T and the released words. Secret: all counts and all other words.
References: Korolova et al. 2009; Wilson et al. 2020, Sec. 3 (Laplace); Desfontaines et al. 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from dp_accounting import dp_event

from userdp.accounting import accountant, events
from userdp.accounting.special import normal_quantile
from userdp.errors import InputError
from userdp.units import Adjacency

# This part of delta is for the words of one user alone. A smaller part raises the threshold little,
# and leaves nearly all of delta to what else is released.
THRESHOLD_SHARE = 0.1
# The threshold is computed in double precision and rounded up by this (relative).
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Votes:
    """Who may vote for how many words, and how much noise their counts get."""

    words_per_user: int
    noise_multiplier: float
    threshold_delta: float

    def __post_init__(self) -> None:
        if self.words_per_user < 1:
            raise InputError(f"words_per_user={self.words_per_user}: a user votes for 1 or more.")
        if not 0 < self.noise_multiplier < math.inf:
            raise InputError(f"noise_multiplier={self.noise_multiplier} must be above 0.")
        if not 0 < self.threshold_delta < 1:
            raise InputError(f"threshold_delta={self.threshold_delta} is no probability.")

    @staticmethod
    def calibrated(
        *, words_per_user: int, epsilon: float, delta: float, adjacency: Adjacency
    ) -> Votes:
        """The least noise at which everything together is (epsilon, delta)-DP."""
        accountant.check_delta(delta)
        threshold_delta = THRESHOLD_SHARE * delta
        return Votes(
            words_per_user=words_per_user,
            noise_multiplier=accountant.calibrate(
                dp_event.GaussianDpEvent,
                target=epsilon,
                delta=delta - threshold_delta,
                adjacency=adjacency,
            ),
            threshold_delta=threshold_delta,
        )

    @property
    def noise_stddev(self) -> float:
        """s = z sqrt(m)."""
        return self.noise_multiplier * math.sqrt(self.words_per_user)

    @property
    def threshold(self) -> float:
        """The T at which words of one user alone are released with probability delta_T."""
        # 1 - (1 - p)^m = delta_T, without loss of digits.
        chance = -math.expm1(math.log1p(-self.threshold_delta) / self.words_per_user)
        deviations = -normal_quantile(chance)
        return 1 + self.noise_stddev * (deviations + _ROUNDING * abs(deviations))

    @property
    def event(self) -> events.DpEvent:
        """What the released words cost."""
        return events.combined(
            [
                dp_event.GaussianDpEvent(self.noise_multiplier),
                events.above_count(delta=self.threshold_delta),
            ]
        )


def released_words(votes: Mapping[str, int], rule: Votes, *, rng: np.random.Generator) -> list[str]:
    """The words above the threshold, the highest noisy count first.

    `votes` says how many users voted for each word. It is secret. Nobody may vote twice for a word,
    or for more than m words.

    >>> rule = Votes(words_per_user=1, noise_multiplier=2.0, threshold_delta=1e-6)
    >>> released_words({"the": 900, "cat": 50, "name": 1}, rule, rng=np.random.default_rng(0))
    ['the', 'cat']
    """
    # In an order that does not tell in which one users came.
    words = sorted(word for word, count in votes.items() if count > 0)
    counts = np.array([votes[word] for word in words], dtype=np.float64)
    noisy = counts + rng.normal(scale=rule.noise_stddev, size=len(words))
    above = np.flatnonzero(noisy > rule.threshold)
    return [words[place] for place in above[np.argsort(-noisy[above], kind="stable")]]
