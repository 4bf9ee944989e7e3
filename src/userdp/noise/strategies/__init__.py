"""Strategies of correlated noise: the matrix C, its error, its sensitivity. Needs no torch."""
