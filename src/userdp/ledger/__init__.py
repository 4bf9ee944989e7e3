"""The record of a run's steps: its rows, what they must agree with, and what was spent before."""
