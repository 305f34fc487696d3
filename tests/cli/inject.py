"""Runs of the tool in which one call fails, or a kill comes before it: see inject.c."""

import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tool

FOLDER = TemporaryDirectory(prefix="streamkl-inject-")  # removed when the tests end
LONG = os.environ.get("STREAMKL_TEST_LONG") == "1"


@cache
def library():
    path = Path(FOLDER.name) / "inject.so"
    source = Path(__file__).with_name("inject.c")
    subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


def run(call, number, action, *arguments, mark, **options):
    """The finished tool, and whether the call came."""
    mark.unlink(missing_ok=True)
    env = {"LD_PRELOAD": str(library()), "STREAMKL_INJECT": f"{call} {number} {action}", "STREAMKL_INJECT_MARK": str(mark)}
    done = tool.run(*arguments, env=env, **options)
    return done, mark.exists()


def runs(call, action, arguments, prepare, mark, step=1):
    """One run per call, until the calls end: (number, finished tool). `prepare()` comes before each."""
    number = 1
    while True:
        prepare()
        done, came = run(call, number, action, *arguments, mark=mark)
        if not came:
            assert done.returncode == 0, done.stderr
            assert number > 1, f"the tool never calls {call}"
            return
        yield number, done
        number += step
