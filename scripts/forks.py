"""Runs tests in forks of a process that has imported the frameworks: their import takes 20 seconds of CPU time."""

import gc
import importlib
import os
import sys
import traceback
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv-python"
FRAMEWORKS = ["torch", "transformers.trainer", "trl", "pytest", "coverage"]


def import_frameworks():
    """Continues as a process of .venv-python that has them. Call this before anything else happens."""
    if Path(sys.prefix) != VENV:
        os.execv(VENV / "bin/python", [str(VENV / "bin/python"), *sys.argv])
    for name in FRAMEWORKS:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page


def start(run, cwd, environment, output):
    """Calls run() in a fork with its own session, which writes to the descriptor output. Returns the process id."""
    process = os.fork()
    if process != 0:
        return process
    status = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.environ.update(environment)
        status = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def pytest(arguments):
    """Runs pytest in this process. Returns its exit status."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(":")
    return int(sys.modules["pytest"].main(["-p", "no:cacheprovider", *arguments]))
