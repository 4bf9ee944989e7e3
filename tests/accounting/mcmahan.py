"""McMahan et al. 2018, Tables 1 and 2: as printed, and with today's epsilon beside each entry.

Run as a program it writes both tables into docs/accounting.md, between their two marks:

    PYTHONPATH=src python tests/accounting/mcmahan.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from userdp.accounting import accountant, events
from userdp.statement import round_up
from userdp.units import Adjacency

DOCS = Path(__file__).resolve().parents[2] / "docs" / "accounting.md"
BEGIN, END = "<!-- McMahan's tables: begin -->\n", "<!-- McMahan's tables: end -->\n"

# Table 1: users, sampled users, noise; epsilon at delta = users^-1.1 after 1, 10, ... 10^6 rounds.
TABLE_1 = [
    ("1e5", "1e2", 1.0, "0.97 0.98 1.00 1.07 1.18 2.21 7.50"),
    ("1e6", "1e1", 1.0, "0.68 0.69 0.69 0.69 0.69 0.72 0.73"),
    ("1e6", "1e3", 1.0, "1.17 1.17 1.20 1.28 1.39 2.44 8.13"),
    ("1e6", "1e4", 1.0, "1.73 1.92 2.08 3.06 8.49 32.38 187.01"),
    ("1e6", "1e3", 3.0, "0.47 0.47 0.48 0.48 0.49 0.67 1.95"),
    ("1e9", "1e3", 1.0, "0.84 0.84 0.84 0.85 0.88 0.88 0.88"),
]
# Table 2: users, sampled users; epsilon at delta = 1e-9 after 5,000 rounds with noise 1.
TABLE_2 = [
    ("763430", "5000", "4.634"), ("763430", "1667", "2.314"), ("763430", "1250", "2.038"),
    ("1e8", "5000", "1.152"), ("1e8", "1667", "0.991"), ("1e8", "1250", "0.987"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One number of the paper, digits as printed, and the run it is the epsilon of."""

    rate: float
    noise: float
    steps: int
    delta: float
    printed: str

    @property
    def event(self) -> events.DpEvent:
        step = events.poisson_users_gaussian(
            user_sampling_prob=self.rate, noise_multiplier=self.noise
        )
        return events.repeated(step, self.steps)

    @property
    def options(self) -> str:
        """The same run for `userdp account`."""
        return (
            f"--rate {self.rate!r} --steps {self.steps} --noise-multiplier {self.noise} "
            f"--delta {self.delta!r}"
        )

    def as_printed(self, epsilon: float) -> str:
        """Epsilon with as many decimals as the paper prints here."""
        return f"{epsilon:.{len(self.printed.partition('.')[2])}f}"

    def pld(self) -> str:
        """Today's epsilon, certified, rounded up to three digits."""
        found = accountant.epsilon(self.event, delta=self.delta, adjacency=Adjacency.ADD_REMOVE)
        return f"{round_up(found):g}"


def table_1() -> list[list[Entry]]:
    """The entries of each row: 1, 10, ... 10^6 rounds."""
    return [
        [
            Entry(
                rate=float(sampled) / float(users),
                noise=noise,
                steps=10**power,
                delta=float(users) ** -1.1,
                printed=printed,
            )
            for power, printed in enumerate(row.split())
        ]
        for users, sampled, noise, row in TABLE_1
    ]


def table_2() -> list[Entry]:
    """The entries, from above."""
    return [
        Entry(
            rate=float(sampled) / float(users), noise=1.0, steps=5000, delta=1e-9, printed=printed
        )
        for users, sampled, printed in TABLE_2
    ]


def markdown() -> Iterator[str]:
    """Both tables, line by line, with today's value below or beside each entry."""
    yield "| users | sampled | noise | rounds: | 1 | 10 | 1e2 | 1e3 | 1e4 | 1e5 | 1e6 |\n"
    yield "|---" * 11 + "|\n"
    for (users, sampled, noise, _), row in zip(TABLE_1, table_1(), strict=True):
        printed = " | ".join(entry.printed for entry in row)
        yield f"| {users} | {sampled} | {noise:g} | 2018 | {printed} |\n"
        yield f"| | | | PLD | {' | '.join(entry.pld() for entry in row)} |\n"
    yield "\n"
    yield "| users | sampled | 2018 | PLD |\n"
    yield "|---" * 4 + "|\n"
    for (users, sampled, _), entry in zip(TABLE_2, table_2(), strict=True):
        yield f"| {users} | {sampled} | {entry.printed} | {entry.pld()} |\n"


def documented() -> str:
    """What stands between the two marks in the docs."""
    return DOCS.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    text = DOCS.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, "the docs have lost the marks"
    assert end, "the docs have lost the marks"
    DOCS.write_text(before + BEGIN + "".join(markdown()) + END + after)


if __name__ == "__main__":
    main()
