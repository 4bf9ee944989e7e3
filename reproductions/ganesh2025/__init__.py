"""Ganesh et al. 2025: graphs (App. C.1), a partition (App. A) and a program (App. C.4)."""
