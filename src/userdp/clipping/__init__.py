"""One update per group, each clipped once, and their sum.

`rules` (no torch) says what is clipped and how far one user can move the sum; `plain` is the loop
that does it one group at a time and stays the oracle for every faster path.
"""
