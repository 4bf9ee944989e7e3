"""The options that describe a mechanism in numbers, shared by `account` and `calibrate`.

Together they give the event of a run as a function of its noise multiplier, and an accountant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import Annotated, Any

import typer

from userdp.accounting import accountant, events, group, renyi, steps
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.cli import common
from userdp.errors import InputError, UnaccountedPlanError
from userdp.noise import Gaussian
from userdp.prices import event_of
from userdp.statement import round_up
from userdp.units import Adjacency, SamplingUnit


class AccountantName(StrEnum):
    """How epsilon is bounded; `pld` is exact, the others are for comparison."""

    PLD = "pld"
    RDP = "rdp"
    MOMENTS = "moments"
    GROUP_PRIVACY = "group-privacy"


class NoiseKind(StrEnum):
    """Independent noise at every step, or noise correlated by a banded matrix."""

    GAUSSIAN = "gaussian"
    BANDED = "banded"


OptionalRate = Annotated[float | None, typer.Option("--rate", help="Sampling probability q or p.")]
OptionalSteps = Annotated[int | None, typer.Option("--steps", help="Number of training steps.")]
Accountant = Annotated[
    AccountantName,
    typer.Option(
        help="pld: exact and certified. rdp, moments (McMahan et al. 2018), group-privacy "
        "(black box): looser, for comparison."
    ),
]
Cap = Annotated[
    int | None, typer.Option(help="Cut cohorts to this many users; needs --users.", min=1)
]
Users = Annotated[int | None, typer.Option(help="Number of users N, for --cap.", min=1)]
Noise = Annotated[NoiseKind, typer.Option(help="Independent or matrix-factorisation noise.")]
Participations = Annotated[
    int | None,
    typer.Option(
        help="With --noise banded: the most steps one user takes part in, each as far from the "
        "next as the matrix has bands.",
        min=1,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A run described by public numbers, all but its noise."""

    unit: SamplingUnit
    rate: float | None
    steps: int | None
    group_size: int
    adjacency: Adjacency
    accountant: AccountantName
    cap: int | None
    num_users: int | None
    noise: NoiseKind
    participations: int | None

    def __post_init__(self) -> None:
        if self.noise is NoiseKind.BANDED:
            self._check_banded()
            return
        if self.participations is not None:
            raise InputError("--participations belongs to --noise banded.")
        if self.rate is None or self.steps is None:
            raise InputError(
                "give --rate and --steps: the sampling probability and the run's length."
            )
        common.check_steps(self.steps)
        common.sampler_of(self.unit, self.rate, self.group_size)  # refuses what is no probability
        if (self.cap is None) != (self.num_users is None):
            raise InputError("--cap and --users come together: give both or neither.")
        if self.cap is not None and self.unit is SamplingUnit.RECORD:
            raise InputError("--cap limits how many users a step has: use it with --unit user.")
        if self.cap is not None and self.adjacency.fixed_graph:
            raise InputError(
                f"--cap {self.cap} with --adjacency {self.adjacency.value}: a cap cuts cohorts of "
                "users, and a fixed graph is about sampled records, so no rule prices both. Leave "
                "--cap and --users out, or use another adjacency."
            )
        if self.accountant is AccountantName.GROUP_PRIVACY and self.unit is SamplingUnit.USER:
            raise InputError("--accountant group-privacy is about records: use --unit record.")

    def _check_banded(self) -> None:
        if self.participations is None:
            raise InputError(
                "--noise banded needs --participations K, how often a user takes part."
            )
        if self.cap is not None or self.accountant is AccountantName.GROUP_PRIVACY:
            raise InputError("--cap and --accountant group-privacy are about Poisson sampling.")
        if self.unit is SamplingUnit.RECORD:
            raise InputError(
                f"--unit record (--group-size {self.group_size}) with --noise banded: the price "
                "counts the steps a user takes part in, and would ignore that several records of "
                "a user may share a step. Use --unit user."
            )
        if self.rate is not None and self.rate != 1:
            raise InputError(
                f"--rate {self.rate:g} with --noise banded: batches in a fixed order are not "
                "sampled, so nothing is amplified. Leave --rate out."
            )

    def event(self, noise_multiplier: float) -> DpEvent:
        """What the run costs with this noise."""
        return self._event(noise_multiplier, self.group_size)

    def _event(self, noise_multiplier: float, group_size: int) -> DpEvent:
        if self.noise is NoiseKind.BANDED:
            assert self.participations is not None
            return events.min_separated_gaussian(
                participations=self.participations, noise_multiplier=noise_multiplier
            )
        assert self.rate is not None
        assert self.steps is not None
        if self.cap is not None:
            assert self.num_users is not None
            step = events.capped_poisson_users_gaussian(
                user_sampling_prob=self.rate,
                cap=self.cap,
                num_users=self.num_users,
                noise_multiplier=noise_multiplier,
            )
            return events.repeated(step, self.steps)
        sampler = common.sampler_of(self.unit, self.rate, group_size)
        noise = Gaussian(noise_multiplier=noise_multiplier)
        return event_of(sampler, noise, self.adjacency, steps=self.steps)

    def evaluate(self, noise_multiplier: float, delta: float) -> Evaluation:
        """Epsilon by the chosen accountant."""
        accountant.check_delta(delta)
        if self.accountant is AccountantName.PLD:
            event = self.event(noise_multiplier)
            return accountant.evaluate(event, delta=delta, adjacency=self.adjacency)
        try:
            return self._looser(noise_multiplier, delta)
        except ArithmeticError:
            raise InputError(
                f"--accountant {self.accountant.value} cannot compute with noise_multiplier="
                f"{noise_multiplier:g}: its numbers overflow. Use --accountant pld."
            ) from None

    def _looser(self, noise_multiplier: float, delta: float) -> Evaluation:
        event = self.event(noise_multiplier)
        if steps.has_no_privacy(event):
            return Evaluation(epsilon=math.inf, certified_by="nobody", error_bound=0.0)
        match self.accountant:
            case AccountantName.RDP:
                return renyi.evaluation(event, delta=delta, adjacency=self.adjacency)
            case AccountantName.MOMENTS:
                return renyi.moments_evaluation(event, delta=delta, adjacency=self.adjacency)
            case AccountantName.GROUP_PRIVACY:
                return group.evaluation(
                    self._event(noise_multiplier, 1),
                    group_size=self.group_size,
                    delta=delta,
                    adjacency=self.adjacency,
                )
            case AccountantName.PLD:
                raise AssertionError("priced above")

    def exact(self, noise_multiplier: float, delta: float) -> Evaluation | None:
        """Epsilon by PLD, to show beside a looser one. None if PLD has no rule for the run."""
        try:
            found = replace(self, accountant=AccountantName.PLD).evaluate(noise_multiplier, delta)
        except UnaccountedPlanError:
            return None
        return found if math.isfinite(found.epsilon) else None

    def calibrate(self, epsilon: float, delta: float) -> float:
        """The least noise multiplier whose epsilon by this accountant is at most `epsilon`."""
        if self.accountant is AccountantName.PLD:
            return accountant.calibrate(
                self.event, target=epsilon, delta=delta, adjacency=self.adjacency
            )
        accountant.check_epsilon(epsilon)

        def epsilon_of(noise_multiplier: float) -> float:
            try:
                return self.evaluate(noise_multiplier, delta).epsilon
            except InputError:  # no finite epsilon at so little noise
                return math.inf

        found = accountant.noise_by_evaluation(epsilon_of, epsilon)
        if found is None:
            most = accountant.LARGEST_NOISE_MULTIPLIER
            raise InputError(
                f"epsilon={epsilon} is out of reach for this accountant: noise_multiplier="
                f"{most:.0e} gives {round_up(epsilon_of(most)):g}. Use --accountant pld, or a "
                "larger epsilon."
            )
        return found

    def in_words(self) -> str:
        """The run in one line."""
        if self.noise is NoiseKind.BANDED:
            return f"banded noise, at most {self.participations} well-separated steps a user"
        words = (
            f"{self.steps:,} steps, Poisson sampling of {self.unit.value}s at rate {self.rate:g}"
        )
        if self.cap is not None:
            words += f", at most {self.cap:,} of {self.num_users:,} users a step"
        if self.unit is SamplingUnit.RECORD:
            words += f", at most {self.group_size} records a user"
        return words


def of_options(
    unit: SamplingUnit,
    rate: float | None,
    steps: int | None,
    group_size: int,
    adjacency: Adjacency,
    accountant: AccountantName,
    cap: int | None,
    users: int | None,
    noise: NoiseKind,
    participations: int | None,
) -> Mechanism:
    """The mechanism that the options of `account` and `calibrate` describe."""
    return Mechanism(
        unit=unit,
        rate=rate,
        steps=steps,
        group_size=group_size,
        adjacency=adjacency,
        accountant=accountant,
        cap=cap,
        num_users=users,
        noise=noise,
        participations=participations,
    )


def told(
    described: Mechanism, *, noise_multiplier: float, delta: float, words: str
) -> tuple[dict[str, Any], str]:
    """What both commands report about a run with this noise: keys for JSON, lines for a person.

    If the chosen accountant is a looser one, the epsilon of PLD is reported as well.
    """
    found = described.evaluate(noise_multiplier, delta)
    if not math.isfinite(found.epsilon):
        raise InputError(
            f"no finite epsilon holds at delta={delta:g} here. Use more noise, or a larger delta."
        )
    is_pld = described.accountant is AccountantName.PLD
    exact = found if is_pld else described.exact(noise_multiplier, delta)
    payload: dict[str, Any] = {
        "epsilon": found.epsilon,
        "epsilon_pld": None if exact is None else exact.epsilon,
        "delta": delta,
        "adjacency": described.adjacency.value,
        "unit": described.unit.value,
        "protects": "user",
        "accountant": described.accountant.value,
        "certified_by": found.certified_by,
        "error_bound": found.error_bound if math.isfinite(found.error_bound) else None,
    }
    lines = [
        f"(epsilon={round_up(found.epsilon):g}, delta={delta:g}), user-level, "
        f"{described.adjacency.value}",
        words,
        f"certified by {found.certified_by}",
    ]
    if exact is not None and not is_pld:
        lines.append(
            f"by PLD epsilon={round_up(exact.epsilon):g}, certified by {exact.certified_by}"
        )
    return payload, "\n".join(lines)


def noise_up(noise_multiplier: float) -> str:
    """A noise multiplier in six digits, rounded up, so that it can be typed in again.

    >>> noise_up(1.0000001), noise_up(4.774074)
    ('1.00001', '4.77408')
    """
    step = Decimal(1).scaleb(math.floor(math.log10(noise_multiplier)) - 5)
    return f"{Decimal(repr(noise_multiplier)).quantize(step, rounding=ROUND_CEILING):f}"
