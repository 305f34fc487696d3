"""SIGKILL: before every call that changes a file, and at random times. No file is torn, and nothing that is left is in the way."""

import fnmatch
import random
import subprocess
import time

import inject
import pytest
from test_injected_faults import command  # noqa: F401
from tool import TOOL, make_tensors, run, save

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


# ---- At random times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kl", "map"])
def test_at_random_times(tmp_path, name):
    pair = save(tmp_path / "pair.safetensors", make_tensors(batch=1, heads_t=1, heads_s=1, len_q=300, len_k=300))
    out = tmp_path / "out"
    out.mkdir()
    arguments = {
        "kl": ["kl", pair, "--out", out / "rows", "--grad", out / "grad"],
        "map": ["map", pair, "--out", out / "maps", "--png", out / "x"],
    }[name]

    def outputs():
        return {path.name: path.read_bytes() for path in out.iterdir()}

    began = time.monotonic()
    assert run(*arguments).returncode == 0
    seconds, new = time.monotonic() - began, outputs()
    old = {name: b"old" for name in new}
    chance, killed = random.Random(), 0
    for _ in range(300 if inject.LONG else 15):
        for path in leftovers(out):
            path.unlink()
        for file, content in old.items():
            (out / file).write_bytes(content)
        child = subprocess.Popen([TOOL, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(chance.uniform(0, 1.2 * seconds))
        child.kill()
        assert child.communicate()[1] == b""
        assert child.returncode in (0, KILLED)
        killed += child.returncode == KILLED
        assert_whole(outputs(), old, new, [path.name for path in leftovers(out)])
    assert killed > 0
    assert run(*arguments).returncode == 0
