"""Exact draws of the discrete Gaussian: integers n with probability proportional to exp(-n^2 / 2v).

The draws are exact: their distribution is that of the formula, to the last digit. Canonne, Kamath
and Steinke 2020 (Alg. 1 to 3) propose a discrete Laplace number and accept it with the right
probability. Here both decisions are made together. Let t be a power of two near sqrt(v).

  * Propose x = u + t k with u uniform in {0, ..., t - 1}, P(k >= j) = exp(-j), and a random sign.
    Negative zero is refused, or zero would come twice.
  * Accept with probability exp(-g), g = u / t + (x - v / t)^2 / 2v. Then x is kept with probability
    proportional to exp(-k - u / t - (x - v / t)^2 / 2v), and k + u / t = x / t. The exponent is
    -x^2 / 2v up to a constant.

An event of probability p happens if a uniform real number is below p. The number's first 64 bits
almost always decide that: p as a double is right to 2^-38 (below), and closer calls than 2^-32 are
left to exact arithmetic, with as many more bits as it takes. So doubles save time and decide
nothing that is in doubt.

Error of the double: x < 2^52 is exact, v / t and the difference are right to 2^-52 (relative), and
(x - v / t) / sqrt(v) is at most 100, so the exponent's error is below 100 * 100 * 2^-51 < 2^-37.7.
`exp` adds a few units of the last digit, 2^-50.

Secret: every number drawn. How long a draw takes depends on the random bits alone.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from userdp.compiled import compiled
from userdp.errors import InputError

Integers: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

# Closer calls (relative) are decided exactly. It is far above the error of doubles.
DOUBT = 2.0**-32
# With more variance, proposals would not be exact as doubles.
LARGEST_VARIANCE = 4**45
_WORD = 2**64
# A proposal takes a word for u and the sign, one for k and one to accept it.
_PROPOSAL = 3
# What stopped the loop.
_DONE, _NO_WORDS, _IN_DOUBT = 0, 1, 2


def discrete_gaussian(
    count: int, *, variance: int, rng: np.random.Generator, doubt: float = DOUBT
) -> Integers:
    """`count` independent draws n with probability proportional to exp(-n^2 / (2 `variance`)).

    A larger `doubt` leaves more to exact arithmetic and changes no draw.
    Reference: Canonne, Kamath and Steinke 2020, Def. 1.

    >>> rng = np.random.Generator(np.random.Philox(key=2))
    >>> draws = discrete_gaussian(1000, variance=10**6, rng=rng)
    >>> round(float(draws.std()), -2)
    1000.0
    """
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise InputError(
            f"variance={variance}: a discrete Gaussian takes a whole number from 1 to 2^90."
        )
    # t = 2^digits is within a factor of sqrt(2) of sqrt(variance): 41 to 48% are accepted.
    digits = variance.bit_length() // 2
    out = np.empty(count, dtype=np.int64)
    place, done, used = 0, _NO_WORDS, 0
    words: Words = np.empty(0, dtype=np.uint64)
    while done != _DONE:
        if done == _NO_WORDS:
            words = _words(rng, _PROPOSAL * (int(2.4 * (count - place)) + 64))
            used = 0
        place, used, done = _fill(
            out,
            place,
            words,
            used,
            digits,
            variance / 2**digits,
            2.0 * variance,
            _THRESHOLDS,
            doubt,
        )
        if done == _IN_DOUBT:
            proposal = [int(word) for word in words[used : used + _PROPOSAL]]
            drawn = _exactly(proposal, digits, variance, lambda: int(_words(rng, 1)[0]))
            used += _PROPOSAL
            if drawn is not None:
                out[place] = drawn
                place += 1
    return out


def _words(rng: np.random.Generator, count: int) -> Words:
    return rng.integers(0, _WORD - 1, size=count, dtype=np.uint64, endpoint=True)


def _loop(
    out: Integers,
    place: int,
    words: Words,
    used: int,
    digits: int,
    centre: float,
    twice_variance: float,
    thresholds: Words,
    doubt: float,
) -> tuple[int, int, int]:
    """Draw from `place` on until all is drawn, the words are used up, or doubles cannot decide."""
    mask = np.uint64((1 << digits) - 1)
    scale = 1.0 / (1 << digits)
    while place < len(out):
        if used + 3 > len(words):
            return place, used, 1
        is_negative = words[used] >> np.uint64(63) != 0
        u = np.int64(words[used] & mask)
        k = 0
        while k < len(thresholds) and words[used + 1] < thresholds[k]:
            k += 1
        if k == len(thresholds) or words[used + 1] == thresholds[k]:
            return place, used, 2
        x = u + (np.int64(k) << digits)
        if x != 0 or not is_negative:
            far = x - centre
            bound = math.exp(-(u * scale + far * far / twice_variance)) * 18446744073709551616.0
            above = bound - np.float64(words[used + 2])
            if abs(above) <= bound * doubt + 2.0:
                return place, used, 2
            if above > 0:
                out[place] = -x if is_negative else x
                place += 1
        used += 3
    return place, used, 0


_fill = compiled(_loop)


def _exactly(
    proposal: list[int], digits: int, variance: int, more: Callable[[], int]
) -> int | None:
    """The proposal's number, or None if it is refused, by exact arithmetic."""
    first, second, third = proposal
    is_negative, u = bool(first >> 63), first & (2**digits - 1)
    k, bits, known = 0, 64, second
    while True:
        below, bits, known = _is_below_exp(known, bits, Fraction(k + 1), more)
        if not below:
            break
        k += 1
    x = u + (k << digits)
    if x == 0 and is_negative:
        return None
    t = 2**digits
    exponent = Fraction(u, t) + Fraction((x * t - variance) ** 2, 2 * variance * t * t)
    accepted, _, _ = _is_below_exp(third, 64, exponent, more)
    return (-x if is_negative else x) if accepted else None


def _is_below_exp(
    known: int, bits: int, exponent: Fraction, more: Callable[[], int]
) -> tuple[bool, int, int]:
    """Whether a uniform number is below exp(-exponent), and the bits of it that are known by now.

    The number's first `bits` bits are `known`. `more` gives the next 64.
    """
    while True:
        low, high = exp_bounds(exponent, bits)
        if known + 1 <= low:
            return True, bits, known
        if known >= high:
            return False, bits, known
        known, bits = known * _WORD + more(), bits + 64


def exp_bounds(exponent: Fraction, bits: int) -> tuple[int, int]:
    """Whole numbers with low <= exp(-exponent) 2^bits <= high, at most 3 apart.

    >>> exp_bounds(Fraction(1), 8)
    (94, 95)
    """
    # `decimal` rounds division and exp correctly. An error of the exponent is one of the result.
    with decimal.localcontext() as context:
        context.prec = bits // 3 + 40
        context.Emin, context.Emax = decimal.MIN_EMIN, decimal.MAX_EMAX
        quotient = decimal.Decimal(exponent.numerator) / decimal.Decimal(exponent.denominator)
        value = (-quotient).exp() * 2**bits
        slack = value * (quotient + 4) * decimal.Decimal(10) ** (2 - context.prec)
        return math.floor(value - slack), math.ceil(value + slack)


# P(k >= j) = exp(-j) in units of 2^-64, rounded down, until it is below one unit.
_THRESHOLDS: Words = np.array(
    [exp_bounds(Fraction(j), 64 + 60)[0] >> 60 for j in range(1, 46)], dtype=np.uint64
)
