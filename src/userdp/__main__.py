"""`python -m userdp`: the program, where its folder is not on the path."""

from __future__ import annotations

from userdp.cli import main

if __name__ == "__main__":
    main()
