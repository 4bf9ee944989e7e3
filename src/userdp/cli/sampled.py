"""The options of `account` and `calibrate` that say who takes part in a step, and what they make.

A sampler is a line of `SAMPLERS`: the options that it takes, and how they make its part. The part
and the noise then have the price that a run with them has (`prices`), so nothing is priced here. To
offer another sampler, add a name and a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from userdp.accounting import events
from userdp.accounting.events import DpEvent
from userdp.cli import common
from userdp.errors import InputError
from userdp.noise import Banded, Discrete, Gaussian, Noise
from userdp.prices.table import event_of
from userdp.sampling import (
    Allocation,
    BalancedIteration,
    BallsInBins,
    CappedPoissonUsers,
    CyclicPoissonRecords,
    CyclicPoissonUsers,
    PoissonRecords,
    PoissonUsers,
    Sampler,
    WithoutReplacement,
)
from userdp.sampling.contract import check_probability
from userdp.units import Adjacency, SamplingUnit


class SamplerName(StrEnum):
    """Who takes part in a step; the words of configurations."""

    POISSON = "poisson"
    CAPPED_POISSON = "capped-poisson"
    CYCLIC_POISSON = "cyclic-poisson"
    BALLS_IN_BINS = "balls-in-bins"
    BALANCED_ITERATION = "balanced-iteration"
    ALLOCATION = "allocation"
    WITHOUT_REPLACEMENT = "without-replacement"


class NoiseKind(StrEnum):
    """Independent noise at every step, noise correlated by a banded matrix, or whole numbers."""

    GAUSSIAN = "gaussian"
    BANDED = "banded"
    DISCRETE = "discrete"


SamplerOption = Annotated[
    SamplerName | None,
    typer.Option("--sampler", help="Who takes part in a step. By default poisson."),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        help="Sampling probability q or p; with --sampler cyclic-poisson that within a part.",
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", help="Number of training steps.")]
Cap = Annotated[
    int | None, typer.Option(help="Cut cohorts to this many users; needs --users.", min=1)
]
Users = Annotated[
    int | None,
    typer.Option(help="Number of users N, for --cap and --sampler without-replacement.", min=1),
]
NoiseOption = Annotated[
    NoiseKind,
    typer.Option(help="Independent, matrix-factorisation, or discrete noise on a grid."),
]
Participations = Annotated[
    int | None,
    typer.Option(
        help="With --sampler allocation: in how many steps each user takes part. With --noise "
        "banded: the most steps one user takes part in, each as far from the next as the matrix "
        "has bands.",
        min=1,
    ),
]
Parts = Annotated[
    int | None,
    typer.Option(
        help="Parts of --sampler cyclic-poisson, bins of balls-in-bins, steps of one round of "
        "balanced-iteration.",
        min=1,
    ),
]
Bands = Annotated[
    int | None, typer.Option(help="With --noise banded: how many steps share noise.", min=1)
]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Who takes part in the steps of a run, and which kind of noise is added, all but its size."""

    sampler: SamplerName | None
    unit: SamplingUnit
    rate: float | None
    steps: int | None
    group_size: int
    cap: int | None
    num_users: int | None
    noise: NoiseKind
    participations: int | None
    parts: int | None
    bands: int | None

    def __post_init__(self) -> None:
        if self.steps is not None:
            common.check_steps(self.steps)
        if self.bands is not None and self.noise is not NoiseKind.BANDED:
            raise InputError("--bands belongs to --noise banded.")
        if self.is_in_fixed_order:
            self._check_fixed_order()
            return
        if self.noise is NoiseKind.BANDED and self.bands is None:
            raise InputError(
                f"--noise banded with --sampler {self.name.value} needs --bands B, how many steps "
                "share noise."
            )
        self._check_options()
        self._sampler()  # refuses what is no probability

    @property
    def name(self) -> SamplerName:
        """The sampler by its name; a cap says enough by itself."""
        if self.sampler is not None:
            return self.sampler
        return SamplerName.POISSON if self.cap is None else SamplerName.CAPPED_POISSON

    @property
    def is_in_fixed_order(self) -> bool:
        """Whether nothing is drawn: correlated noise, and a user's steps far from each other."""
        return self.noise is NoiseKind.BANDED and self.sampler is None

    @property
    def most_participations(self) -> int:
        """In a fixed order: as given, or as often as steps that are `bands` apart fit in."""
        if self.participations is not None:
            return self.participations
        assert self.steps is not None
        assert self.bands is not None
        return -(-self.steps // self.bands)

    def _check_fixed_order(self) -> None:
        if self.participations is None and (self.bands is None or self.steps is None):
            raise InputError(
                "--noise banded needs --participations K, how often a user takes part, or --bands "
                "and --steps; or --sampler cyclic-poisson, which samples."
            )
        for option, value in (("--cap", self.cap), ("--parts", self.parts)):
            if value is not None:
                raise InputError(f"{option} is about sampling: give --sampler as well.")
        if self.unit is SamplingUnit.RECORD:
            raise InputError(
                f"--unit record (--group-size {self.group_size}) with --noise banded: the price "
                "counts the steps a user takes part in, and would ignore that several records of "
                "a user may share a step. Use --unit user, or --sampler cyclic-poisson."
            )
        if self.rate is not None and self.rate != 1:
            raise InputError(
                f"--rate {self.rate:g} with --noise banded: batches in a fixed order are not "
                "sampled, so nothing is amplified. Leave --rate out, or give --sampler "
                "cyclic-poisson."
            )

    def _check_options(self) -> None:
        """Refuse options that the sampler would ignore, and ask for those that it lacks."""
        line = SAMPLERS[self.name]
        given = {
            "--rate": self.rate,
            "--steps": self.steps,
            "--cap": self.cap,
            "--users": self.num_users,
            "--participations": self.participations,
            "--parts": self.parts,
        }
        known = {*line.needs, *line.either, "--steps"}
        for option, value in given.items():
            if value is not None and option not in known:
                users = [name.value for name, one in SAMPLERS.items() if option in one.options]
                raise InputError(
                    f"{option} has no meaning with --sampler {self.name.value}: it belongs to "
                    f"--sampler {', '.join(users)}."
                )
        missing = [option for option in (*line.needs, "--steps") if given[option] is None]
        if missing or (line.either and all(given[option] is None for option in line.either)):
            wanted = [*line.needs, *([" or ".join(line.either)] if line.either else []), "--steps"]
            raise InputError(
                f"--sampler {self.name.value} needs {', '.join(wanted)}; {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing."
                if missing
                else f"--sampler {self.name.value} needs {', '.join(wanted)}."
            )
        if self.unit not in line.units:
            raise InputError(f"--sampler {self.name.value} draws users: use it with --unit user.")

    def _sampler(self) -> Sampler:
        return SAMPLERS[self.name].make(self)

    def event(self, noise_multiplier: float, adjacency: Adjacency) -> DpEvent:
        """What the run costs with this noise, by the table of prices."""
        if self.is_in_fixed_order:
            return events.min_separated_gaussian(
                participations=self.most_participations, noise_multiplier=noise_multiplier
            )
        assert self.steps is not None
        noise = self._noise(noise_multiplier)
        return event_of(self._sampler(), noise, adjacency, steps=self.steps)

    def _noise(self, noise_multiplier: float) -> Noise:
        if self.noise is NoiseKind.GAUSSIAN:
            return Gaussian(noise_multiplier=noise_multiplier)
        if self.noise is NoiseKind.DISCRETE:
            return Discrete(noise_multiplier=noise_multiplier)
        assert self.bands is not None
        assert self.steps is not None
        return Banded(noise_multiplier=noise_multiplier, bands=self.bands, steps=self.steps)

    def in_words(self) -> str:
        """The run in one line."""
        if self.is_in_fixed_order:
            often = self.most_participations
            return (
                f"banded noise, at most {often} well-separated steps a user, which do not depend "
                "on who else is there"
            )
        words = f"{self.steps:,} steps, {SAMPLERS[self.name].words(self)}"
        if self.unit is SamplingUnit.RECORD:
            words += f", at most {self.group_size} records a user"
        return words if self.bands is None else f"{words}, noise of {self.bands} bands"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One sampler: all options that it `needs`, `either` of some others, its part and its words."""

    needs: tuple[str, ...]
    make: Callable[[Drawing], Sampler]
    words: Callable[[Drawing], str]
    either: tuple[str, ...] = ()
    units: tuple[SamplingUnit, ...] = (SamplingUnit.USER,)

    @property
    def options(self) -> tuple[str, ...]:
        """All of its options."""
        return (*self.needs, *self.either)


def _parts(drawing: Drawing) -> int:
    """How many steps it takes for everybody to take part once."""
    if drawing.parts is not None:
        return drawing.parts
    assert drawing.rate is not None
    check_probability("--rate", drawing.rate)
    # A configuration computes it in the same way, from its expected cohort size.
    return round(1 / drawing.rate)


def _poisson(drawing: Drawing) -> Sampler:
    assert drawing.rate is not None
    if drawing.unit is SamplingUnit.USER:
        return PoissonUsers(user_sampling_prob=drawing.rate, group_size=drawing.group_size)
    return PoissonRecords(record_sampling_prob=drawing.rate, group_size=drawing.group_size)


def _capped(drawing: Drawing) -> Sampler:
    assert drawing.rate is not None
    assert drawing.cap is not None
    assert drawing.num_users is not None
    return CappedPoissonUsers(
        user_sampling_prob=drawing.rate,
        cap=drawing.cap,
        num_users=drawing.num_users,
        group_size=drawing.group_size,
    )


def _cyclic(drawing: Drawing) -> Sampler:
    assert drawing.rate is not None
    assert drawing.parts is not None
    if drawing.unit is SamplingUnit.USER:
        return CyclicPoissonUsers(
            user_sampling_prob=drawing.rate, parts=drawing.parts, group_size=drawing.group_size
        )
    # All records of a user are in the user's part, each with its own coin.
    return CyclicPoissonRecords(
        record_sampling_prob=drawing.rate, parts=drawing.parts, group_size=drawing.group_size
    )


def _allocation(drawing: Drawing) -> Sampler:
    assert drawing.steps is not None
    assert drawing.participations is not None
    return Allocation(
        steps=drawing.steps, participations=drawing.participations, group_size=drawing.group_size
    )


def _without_replacement(drawing: Drawing) -> Sampler:
    assert drawing.num_users is not None
    return WithoutReplacement(
        cohort_size=_cohort_size(drawing),
        num_users=drawing.num_users,
        group_size=drawing.group_size,
    )


def _cohort_size(drawing: Drawing) -> int:
    """The rate as a whole number of users."""
    assert drawing.rate is not None
    assert drawing.num_users is not None
    check_probability("--rate", drawing.rate)
    return max(1, round(drawing.rate * drawing.num_users))


_BOTH = (SamplingUnit.USER, SamplingUnit.RECORD)
SAMPLERS: dict[SamplerName, Line] = {
    SamplerName.POISSON: Line(
        needs=("--rate",),
        make=_poisson,
        words=lambda one: f"Poisson sampling of {one.unit.value}s at rate {one.rate:g}",
        units=_BOTH,
    ),
    SamplerName.CAPPED_POISSON: Line(
        needs=("--rate", "--cap", "--users"),
        make=_capped,
        words=lambda one: (
            f"Poisson sampling of users at rate {one.rate:g}, at most {one.cap:,} of "
            f"{one.num_users:,} users a step"
        ),
    ),
    SamplerName.CYCLIC_POISSON: Line(
        needs=("--rate", "--parts"),
        make=_cyclic,
        words=lambda one: (
            f"Poisson sampling of {one.unit.value}s at rate {one.rate:g} from one of "
            f"{one.parts} parts in turn"
        ),
        units=_BOTH,
    ),
    SamplerName.BALLS_IN_BINS: Line(
        needs=(),
        either=("--parts", "--rate"),
        make=lambda one: BallsInBins(bins=_parts(one), group_size=one.group_size),
        words=lambda one: f"users dealt into {_parts(one)} bins once, one bin a step in turn",
    ),
    SamplerName.BALANCED_ITERATION: Line(
        needs=(),
        either=("--parts", "--rate"),
        make=lambda one: BalancedIteration(round_length=_parts(one), group_size=one.group_size),
        words=lambda one: f"each user once in every {_parts(one)} steps, drawn afresh each round",
    ),
    SamplerName.ALLOCATION: Line(
        needs=("--participations",),
        make=_allocation,
        words=lambda one: f"each user in exactly {one.participations} of them, drawn at random",
    ),
    SamplerName.WITHOUT_REPLACEMENT: Line(
        needs=("--rate", "--users"),
        make=_without_replacement,
        words=lambda one: f"exactly {_cohort_size(one):,} of {one.num_users:,} users a step",
    ),
}
