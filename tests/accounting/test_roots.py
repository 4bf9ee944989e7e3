"""Roots: close to the true one, and always on the side that meets the target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from userdp.accounting import roots

places = st.floats(-50, 50)


@given(place=places, steepness=st.floats(1e-3, 1e3), within=st.floats(1e-12, 1.0))
@settings(max_examples=200, deadline=None)
def test_root_meets_the_target_and_is_close_from_either_side(place, steepness, within):
    for sign in (1, -1):

        def excess(x: float, sign=sign) -> float:
            return math.sinh(min(max(sign * steepness * (place - x), -700), 700))

        missed, met = place - sign * 20, place + sign * 30
        found = roots.root(excess, missed, met, within=within)
        assert excess(found) <= 0
        assert abs(found - place) <= 2 * within + 1e-12


@given(place=places)
@settings(max_examples=100, deadline=None)
def test_root_of_a_step_with_infinite_values_meets_the_target(place):
    def excess(x: float) -> float:
        return math.inf if x < place else -math.inf

    found = roots.root(excess, place - 7, place + 9, within=1e-6)
    assert place <= found <= place + 2e-6


def test_root_is_relative_where_that_is_asked_for():
    found = roots.root(lambda x: 1e-30 - x, 0.0, 1.0, relative=1e-9)
    assert 1e-30 <= found <= 1e-30 * (1 + 1e-8)


def test_root_where_both_ends_meet_the_target_is_the_one_that_was_thought_to_miss_it():
    assert roots.root(lambda x: -1.0, 3.0, 5.0, within=0.1) == 3.0


def test_root_without_a_point_that_meets_the_target_is_our_own_mistake():
    with pytest.raises(AssertionError, match="no point is known"):
        roots.root(lambda x: 1.0, 3.0, 5.0, within=0.1)


@given(place=places, start=places, step=st.floats(0.1, 5), growth=st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None)
def test_bracket_misses_below_and_meets_above(place, start, step, growth):
    missed, met = roots.bracket(lambda x: place - x, start, step, growth=growth)
    assert missed < place <= met


def test_bracket_says_which_end_it_reached():
    assert roots.bracket(lambda x: 1.0, 0.0, 1.0, most=10.0) == (math.inf, math.inf)
    assert roots.bracket(lambda x: -1.0, 0.0, 1.0, least=-10.0) == (-10.0, -10.0)


@given(place=st.floats(-5, 5), guess=st.floats(-5, 5), slope=st.floats(-30, -0.1))
@settings(max_examples=200, deadline=None)
def test_near_meets_the_target_and_is_close_whatever_the_guess(place, guess, slope):
    def excess(x: float) -> float:
        return 3 * (place - x) + math.sin(place - x)

    found, steepness = roots.near(excess, guess, slope, within=1e-4, rise=0.3)
    assert excess(found) <= 0
    assert place <= found <= place + 3e-4
    assert steepness < 0
