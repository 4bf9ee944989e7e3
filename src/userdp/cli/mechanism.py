"""What `account` and `calibrate` share: a run described by numbers, and what it costs.

The options about who takes part are in `sampled`. Together with an adjacency and an accountant they
give epsilon as a function of the noise multiplier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import Annotated, Any

import typer

from userdp.accounting import accountant, group, renyi, steps
from userdp.accounting.certificate import Evaluation
from userdp.accounting.events import DpEvent
from userdp.cli.sampled import Drawing
from userdp.errors import InputError, UnaccountedPlanError
from userdp.plans.words import of_the_price
from userdp.statement import round_up
from userdp.units import Adjacency, SamplingUnit


class AccountantName(StrEnum):
    """How epsilon is bounded; `pld` is exact, the others are for comparison."""

    PLD = "pld"
    RDP = "rdp"
    MOMENTS = "moments"
    GROUP_PRIVACY = "group-privacy"


Accountant = Annotated[
    AccountantName,
    typer.Option(
        help="pld: exact and certified. rdp, moments (McMahan et al. 2018), group-privacy "
        "(black box): looser, for comparison."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A run described by public numbers, all but its noise."""

    drawing: Drawing
    adjacency: Adjacency
    accountant: AccountantName

    def __post_init__(self) -> None:
        if self.accountant is not AccountantName.GROUP_PRIVACY:
            return
        if self.drawing.unit is SamplingUnit.USER:
            raise InputError("--accountant group-privacy is about records: use --unit record.")

    def event(self, noise_multiplier: float) -> DpEvent:
        """What the run costs with this noise."""
        return self.drawing.event(noise_multiplier, self.adjacency)

    def evaluate(self, noise_multiplier: float, delta: float) -> Evaluation:
        """Epsilon by the chosen accountant."""
        accountant.check_delta(delta, num_users=self.drawing.num_users)
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
                    replace(self.drawing, group_size=1).event(noise_multiplier, self.adjacency),
                    group_size=self.drawing.group_size,
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
        "unit": described.drawing.unit.value,
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
    payload["cautions"] = list(of_the_price(found.epsilon))
    lines += [f"caution: {caution}" for caution in payload["cautions"]]
    return payload, "\n".join(lines)


def noise_up(noise_multiplier: float) -> str:
    """A noise multiplier in six digits, rounded up, so that it can be typed in again.

    >>> noise_up(1.0000001), noise_up(4.774074)
    ('1.00001', '4.77408')
    """
    step = Decimal(1).scaleb(math.floor(math.log10(noise_multiplier)) - 5)
    return f"{Decimal(repr(noise_multiplier)).quantize(step, rounding=ROUND_CEILING):f}"
