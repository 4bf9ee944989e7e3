"""Digests of all that changes what a run releases, so that it goes on only as it began."""
