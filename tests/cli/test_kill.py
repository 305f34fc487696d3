"""SIGKILL before every call that changes a file: no file is torn, and nothing that is left is in the way."""

import fnmatch

import inject
from test_injected_faults import command  # noqa: F401
from tool import run

KILLED = -9


def leftovers(folder):
    return [path for path in folder.iterdir() if fnmatch.fnmatch(path.name, ".streamkl-*.tmp") or fnmatch.fnmatch(path.name, ".streamkl-*.old")]


def assert_whole(now, old, new, left):
    """Each file is the old or the new one. Only a kill while the files get their names leaves some of both."""
    now = {name: content for name, content in now.items() if name not in left}
    assert set(now) == set(old)
    for name, content in now.items():
        assert content in (old[name], new[name]), name


def test_before_every_call(command):  # noqa: F811
    old, new = command.old, command.new
    for at, done in inject.runs("any", "kill", command.arguments, command.restore, command.mark):
        assert done.returncode == KILLED, (at, done.stderr)
        left = [path.name for path in leftovers(command.out)]
        assert_whole(command.outputs(), old, new, left)
        done = run(*command.arguments)
        assert done.returncode == 0, (at, done.stderr)
        assert {name: content for name, content in command.outputs().items() if name not in left} == new, at
