"""Runs streamkl-distill, kills it at random moments with kill -9 and resumes it until it ends: distill_kill.py SEED ARGUMENT...

The children are forks of a process that has imported everything, so that most kills hit the run itself. Prints the number of
kills; the exit status is that of the last child.
"""

import os
import random
import signal
import sys
import time

import torch

import streamkl.distill._loop  # noqa: F401
from streamkl.distill.cli import main

LONGEST = 4.0  # seconds before a kill


def run_until(child, end):
    """The exit status of the child; None if it still runs at the end."""
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


torch.set_num_threads(1)
draw, kills, status = random.Random(int(sys.argv[1])), 0, None
while status is None:
    child = os.fork()
    if child == 0:
        os._exit(main(sys.argv[2:]))
    status = run_until(child, time.monotonic() + draw.uniform(0, LONGEST))
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
print(f"{kills} kills")
sys.exit(status)
