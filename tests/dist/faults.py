"""Training ranks to which something happens at a given step, for tests that start the real command.

They are told through the environment: `TGNN_TEST_FAULT=raise|kill|signal:RANK:EPOCH:STEP`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from tgnn.errors import run_command
from tgnn.training.trainer import Trainer

VARIABLE = "TGNN_TEST_FAULT"


def faulty_step(self: Trainer, batch: Any) -> tuple[float, bool]:
    """A step in which, on one rank, the fault of the environment happens."""
    kind, rank, epoch, step = os.environ[VARIABLE].split(":")
    if (self.comm.rank, self.state.epoch, self.state.step) == (int(rank), int(epoch), int(step)):
        if kind == "raise":
            raise ZeroDivisionError("this is the cause")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "signal":
            os.kill(os.getppid(), signal.SIGTERM)
            while self.stop_signal is None:
                time.sleep(0.01)
    return real_step(self, batch)


real_step = Trainer._step
# The ranks import this script, too, before they run anything.
if VARIABLE in os.environ:
    Trainer._step = faulty_step


if __name__ == "__main__":
    from tgnn.train import main

    sys.exit(run_command(main))
