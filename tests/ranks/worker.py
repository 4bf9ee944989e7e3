"""`userdp`, as a launcher starts it, with a fault: at one step a rank is killed or hangs.

USERDP_TEST_FAULT is "RANK STEP kill" or "RANK STEP hang". It happens once: not after a restart.
"""

from __future__ import annotations

import os
import signal
import time

from userdp import cli
from userdp.runs.record import RunRecord


def plant() -> None:
    rank, step, what = os.environ["USERDP_TEST_FAULT"].split()
    step_done = RunRecord.step_done

    def done(self: RunRecord) -> None:
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_start and os.environ["RANK"] == rank and self.steps == int(step):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        step_done(self)

    RunRecord.step_done = done


if __name__ == "__main__":
    if "USERDP_TEST_FAULT" in os.environ:
        plant()
    cli.main()
