"""CUDA kernels for the embedding tables of stacked LSTMs: `stacked.words` is the reference.

The comparison of outputs with all words is attention: the outputs o_t ask, the words w_v are keys
and values. So one pass over a user's table gives every softmax and the outputs' gradient, and the
logits are never written down. A second pass computes them again, moves the table and adds up the
squared way from the beginning, in float64. Both passes read theta^0 + factor (theta - theta^0): the
clipping of the local step before costs no pass of its own.

A program works for one user alone and writes to that user's places only. Nothing is added in an
order that could change, so sums are the same every time.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_positive(number):
    """Whether a number is above zero, as one of a mask's truth values."""
    return tl.where(number > 0, 1, 0) > 0


@triton.jit
def settled(theta, start, factor, offsets, inside):
    """theta^0 + factor (theta - theta^0). A copy whose factor is one is itself, to the bit."""
    # A factor of zero may stand for numbers that are not finite: those are not read.
    now = tl.load(theta + offsets, inside & is_positive(factor), 0.0)
    before = tl.load(
        start + offsets, inside & is_positive(tl.abs(1 - factor)), 0.0, eviction_policy="evict_last"
    )
    return before + factor * (now - before)


@triton.jit
def attention_kernel(
    theta,
    start,
    factors,
    outputs,
    labels,
    weights,
    gradients,
    log_sums,
    num_words,
    num_positions,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    POSITIONS: tl.constexpr,
    WORDS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of the outputs of some positions of a user, and the sums of their softmax."""
    user = tl.program_id(1).to(tl.int64)
    factor = tl.load(factors + user)
    theta += user * num_words * WIDTH
    positions = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    has_position = positions < num_positions
    rows = (user * num_positions + positions[:, None]) * WIDTH
    left = tl.arange(0, LEFT)
    has_left = left < WIDTH
    in_left = has_position[:, None] & has_left[None, :]
    out_left = tl.load(outputs + rows + left[None, :], in_left, 0.0)
    mean_left = tl.zeros((POSITIONS, LEFT), tl.float32)
    if RIGHT:
        right = LEFT + tl.arange(0, RIGHT)
        has_right = right < WIDTH
        in_right = has_position[:, None] & has_right[None, :]
        out_right = tl.load(outputs + rows + right[None, :], in_right, 0.0)
        mean_right = tl.zeros((POSITIONS, RIGHT), tl.float32)
    largest = tl.full((POSITIONS,), float("-inf"), tl.float32)
    total = tl.zeros((POSITIONS,), tl.float32)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        exists = words < num_words
        places = words[:, None] * WIDTH
        table_left = settled(
            theta, start, factor, places + left[None, :], exists[:, None] & has_left[None, :]
        )
        squares = tl.sum(table_left * table_left, 1)
        if RIGHT:
            table_right = settled(
                theta, start, factor, places + right[None, :], exists[:, None] & has_right[None, :]
            )
            squares += tl.sum(table_right * table_right, 1)
        inverse = 1.0 / tl.maximum(tl.sqrt(squares), SMALLEST)
        # Minus infinity for a word that does not exist.
        missing = tl.where(exists, 0.0, float("-inf"))
        logits = tl.dot(out_left, tl.trans(table_left), input_precision=PRECISION)
        if RIGHT:
            logits = tl.dot(out_right, tl.trans(table_right), logits, input_precision=PRECISION)
        logits = logits * inverse[None, :] + missing[None, :]
        larger = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - larger)
        shares = tl.exp(logits - larger[:, None])
        total = total * shrink + tl.sum(shares, 1)
        shares *= inverse[None, :]
        mean_left = tl.dot(
            shares, table_left, mean_left * shrink[:, None], input_precision=PRECISION
        )
        if RIGHT:
            mean_right = tl.dot(
                shares, table_right, mean_right * shrink[:, None], input_precision=PRECISION
            )
        largest = larger
    # The outputs' gradient: the mean word less the word that came, times the position's weight.
    numbers = user * num_positions + positions
    weight = tl.load(weights + numbers, has_position, 0.0)
    came = tl.load(labels + numbers, has_position, 0)[:, None] * WIDTH
    word_left = settled(theta, start, factor, came + left[None, :], in_left)
    squares = tl.sum(word_left * word_left, 1)
    if RIGHT:
        word_right = settled(theta, start, factor, came + right[None, :], in_right)
        squares += tl.sum(word_right * word_right, 1)
    inverse = 1.0 / tl.maximum(tl.sqrt(squares), SMALLEST)
    of_left = (mean_left / total[:, None] - word_left * inverse[:, None]) * weight[:, None]
    tl.store(gradients + rows + left[None, :], of_left, in_left)
    if RIGHT:
        of_right = (mean_right / total[:, None] - word_right * inverse[:, None]) * weight[:, None]
        tl.store(gradients + rows + right[None, :], of_right, in_right)
    # The position's share of a word in the gradient is exp(logit - this). Without weight it is 0.
    log_sum = largest + tl.log(total) - tl.log(weight)
    tl.store(log_sums + numbers, log_sum, has_position)


@triton.jit
def _outputs_at(outputs, log_sums, positions, num_positions, columns, WIDTH: tl.constexpr):
    inside = (positions < num_positions)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(outputs + positions[:, None] * WIDTH + columns[None, :], inside, 0.0)


@triton.jit
def _pulled(
    word_left,
    word_right,
    out_left,
    out_right,
    log_sum,
    inverse,
    along,
    of_left,
    of_right,
    RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of these words by the softmax of some positions is added."""
    logits = tl.dot(word_left, tl.trans(out_left), input_precision=PRECISION)
    if RIGHT:
        logits = tl.dot(word_right, tl.trans(out_right), logits, input_precision=PRECISION)
    logits *= inverse[:, None]
    shares = tl.exp(logits - log_sum[None, :])
    along += tl.sum(shares * logits, 1)
    of_left = tl.dot(shares, out_left, of_left, input_precision=PRECISION)
    if RIGHT:
        of_right = tl.dot(shares, out_right, of_right, input_precision=PRECISION)
    return along, of_left, of_right


@triton.jit
def _moved(
    theta, start, factor, offsets, inside, gradient, pulls, pulled, along, inverse, eta, penalty
):
    """These rows take their step; returns the squared way of each from the beginning."""
    gradient += tl.load(pulls, pulled, 0.0)
    now = tl.load(theta + offsets, inside & is_positive(factor), 0.0, eviction_policy="evict_first")
    before = tl.load(start + offsets, inside, 0.0, eviction_policy="evict_last")
    now = tl.where(factor == 1, now, before + tl.where(factor > 0, factor * (now - before), 0.0))
    gradient = (gradient - now * along[:, None]) * inverse[:, None]
    now -= eta * (gradient + penalty * (now - before))
    tl.store(theta + offsets, now, inside)
    way = tl.where(inside, now - before, 0.0)
    return tl.sum(way * way, 1).to(tl.float64)


@triton.jit
def step_kernel(
    theta,
    start,
    factors,
    outputs,
    log_sums,
    slots,
    pulls,
    alongs,
    squared,
    eta,
    penalty,
    num_words,
    num_positions,
    num_pulls,
    words_a_program,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    MORE: tl.constexpr,
    WORDS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some words of a user take their local step; the squared way of these words."""
    user = tl.program_id(1).to(tl.int64)
    factor = tl.load(factors + user)
    theta += user * num_words * WIDTH
    slots += user * num_words
    outputs += user * num_positions * WIDTH
    log_sums += user * num_positions
    pulls += user * num_pulls * WIDTH
    alongs += user * num_pulls
    left = tl.arange(0, LEFT)
    has_left = left < WIDTH
    right = LEFT + tl.arange(0, RIGHT if RIGHT else 1)
    has_right = right < WIDTH
    # The first positions are read once for all words: FIRST and SECOND of them.
    early = tl.arange(0, FIRST)
    early_left = _outputs_at(outputs, log_sums, early, num_positions, left, WIDTH)
    early_sum = tl.load(log_sums + early, early < num_positions, float("inf"))
    early_right = early_left
    if RIGHT:
        early_right = _outputs_at(outputs, log_sums, early, num_positions, right, WIDTH)
    if SECOND:
        later = FIRST + tl.arange(0, SECOND)
        later_left = _outputs_at(outputs, log_sums, later, num_positions, left, WIDTH)
        later_sum = tl.load(log_sums + later, later < num_positions, float("inf"))
        later_right = later_left
        if RIGHT:
            later_right = _outputs_at(outputs, log_sums, later, num_positions, right, WIDTH)
    way = tl.zeros((WORDS,), tl.float64)
    begin = tl.program_id(0) * words_a_program
    for first in range(begin, tl.minimum(begin + words_a_program, num_words), WORDS):
        words = first + tl.arange(0, WORDS)
        exists = words < num_words
        places = words[:, None] * WIDTH
        in_left = exists[:, None] & has_left[None, :]
        in_right = exists[:, None] & has_right[None, :]
        word_left = settled(theta, start, factor, places + left[None, :], in_left)
        squares = tl.sum(word_left * word_left, 1)
        word_right = word_left
        if RIGHT:
            word_right = settled(theta, start, factor, places + right[None, :], in_right)
            squares += tl.sum(word_right * word_right, 1)
        length = tl.sqrt(squares)
        inverse = 1.0 / tl.maximum(length, SMALLEST)
        along = tl.zeros((WORDS,), tl.float32)
        of_left = tl.zeros((WORDS, LEFT), tl.float32)
        of_right = of_left
        if RIGHT:
            of_right = tl.zeros((WORDS, RIGHT), tl.float32)
        along, of_left, of_right = _pulled(
            word_left,
            word_right,
            early_left,
            early_right,
            early_sum,
            inverse,
            along,
            of_left,
            of_right,
            RIGHT,
            PRECISION,
        )
        if SECOND:
            along, of_left, of_right = _pulled(
                word_left,
                word_right,
                later_left,
                later_right,
                later_sum,
                inverse,
                along,
                of_left,
                of_right,
                RIGHT,
                PRECISION,
            )
        if MORE:
            for block in range(FIRST + SECOND, num_positions, FIRST):
                rest = block + tl.arange(0, FIRST)
                rest_left = _outputs_at(outputs, log_sums, rest, num_positions, left, WIDTH)
                rest_right = rest_left
                if RIGHT:
                    rest_right = _outputs_at(outputs, log_sums, rest, num_positions, right, WIDTH)
                rest_sum = tl.load(log_sums + rest, rest < num_positions, float("inf"))
                along, of_left, of_right = _pulled(
                    word_left,
                    word_right,
                    rest_left,
                    rest_right,
                    rest_sum,
                    inverse,
                    along,
                    of_left,
                    of_right,
                    RIGHT,
                    PRECISION,
                )
        # What labels and inputs add is there already, for the few words that have any.
        slot = tl.load(slots + words, exists, 0)
        has_pull = slot > 0
        along += tl.load(alongs + slot - 1, has_pull, 0.0)
        pull = pulls + (slot - 1)[:, None] * WIDTH
        # The gradient along a word turns nothing. A length below the smallest is a constant.
        along = tl.where(length >= SMALLEST, along * inverse, 0.0)
        # The rows are read again: kept until here, they would crowd out everything else.
        way += _moved(
            theta,
            start,
            factor,
            places + left[None, :],
            in_left,
            of_left,
            pull + left[None, :],
            has_pull[:, None] & has_left[None, :],
            along,
            inverse,
            eta,
            penalty,
        )
        if RIGHT:
            way += _moved(
                theta,
                start,
                factor,
                places + right[None, :],
                in_right,
                of_right,
                pull + right[None, :],
                has_pull[:, None] & has_right[None, :],
                along,
                inverse,
                eta,
                penalty,
            )
    tl.store(squared + user * tl.num_programs(0) + tl.program_id(0), tl.sum(way))
