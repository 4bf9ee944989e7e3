"""The program's entry, as `userdp` and as `python -m userdp`: it ends in one line from the start.

Importing the commands takes most of a second. Ctrl-C in that time is Ctrl-C like any other.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Import the commands and run the one that is asked for."""
    try:
        from userdp.cli import main as commands
    except KeyboardInterrupt:
        print("error: interrupted: nothing was done.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    commands()


if __name__ == "__main__":
    main()
