"""Failing calls: disk full, I/O errors, short writes, no memory, inputs that change. One line says why, the exit status is not 0,
and the outputs are those of before: all of them."""

import errno
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import inject
import pytest
from tool import make_tensors, run, save, succeed

SMALL = ["--context", "64", "--needles", "2", "--held-out", "1"]  # distill
FILES = {"kl": ["rows", "grad"], "map": ["maps", "x-p.png", "x-s.png", "x-kl.png"], "stats": ["stats"], "distill": ["student.safetensors", "report.html"]}

READERS = pytest.mark.parametrize("command", ["kl", "map", "stats"], indirect=True)  # of files


def without_times(file, content):
    """A report contains the time of the run: only its end is compared."""
    return content.rstrip()[-len(b"</html>") :] if file == "report.html" else content


@pytest.fixture(params=FILES)
def command(request, tmp_path):
    """A command with its own folder, its outputs before and after a run, and how to put the old ones back."""
    name, inputs, out = request.param, tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    out.mkdir()
    pair = save(inputs / "pair.safetensors", make_tensors(batch=1, heads_t=1, heads_s=1, len_q=70, len_k=70))  # several pages
    arguments = {
        "kl": ["kl", pair, "--out", out / "rows", "--grad", out / "grad"],
        "map": ["map", pair, "--buckets", "2", "--out", out / "maps", "--png", out / "x"],
        "stats": ["stats", pair, "--out", out / "stats"],
        "distill": ["distill", *SMALL, "--out", out, "--steps", "2"],
    }[name]

    def outputs():
        return {path.name: without_times(path.name, path.read_bytes()) for path in out.iterdir()}

    def restore():
        for path in out.iterdir():
            path.unlink()
        for file in FILES[name]:
            (out / file).write_bytes(b"old " + file.encode())

    restore()
    old = outputs()
    succeed(*arguments)
    new = outputs()
    assert set(new) == set(old) and not any(new[file] == old[file] for file in new)
    return SimpleNamespace(name=name, arguments=arguments, inputs=inputs, out=out, outputs=outputs, restore=restore, old=old, new=new, mark=tmp_path / "mark")


def assert_failed(command, number, done, *words):
    where = f"{command.name}, call {number}: exit status {done.returncode}, {done.stderr!r}"
    assert 2 <= done.returncode <= 5, where
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("streamkl"), where
    for word in words:
        assert word in done.stderr, where
    assert command.outputs() == command.old, where


WRITING = [("create", errno.ENOSPC), ("create", errno.EMFILE), ("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.EIO), ("rename", errno.EIO)]


@pytest.mark.parametrize("call, number", WRITING)
def test_failing_calls(command, call, number):
    for at, done in inject.runs(call, number, command.arguments, command.restore, command.mark):
        assert_failed(command, at, done, os.strerror(number))


def test_restore_fails(command):
    """No later rename works either: every old file still exists, and the message names those that have another name."""
    for at, done in inject.runs("rename", f"{errno.EIO}+", command.arguments, command.restore, command.mark):
        assert done.returncode == 5 and len(done.stderr.splitlines()) == 1, (at, done.returncode, done.stderr)
        now = command.outputs()
        backups = [name for name in now if name not in command.old]
        assert all(name in done.stderr for name in backups), (at, backups, done.stderr)
        assert len(backups) == at - 1, at
        assert sorted(set(now.values()) & set(command.old.values())) == sorted(set(command.old.values())), at


def failures_of(command, call, number):
    """How often the command fails when one call does; it succeeds where the call only describes the machine."""
    failed = 0
    for at, done in inject.runs(call, number, command.arguments, command.restore, command.mark):
        if done.returncode != 0:
            assert_failed(command, at, done, os.strerror(number))
            failed += 1
    return failed


def test_close_fails(command):
    """Network file systems report a full disk here. An input may fail to close."""
    assert failures_of(command, "close", errno.EDQUOT) >= len(command.new)


@READERS
def test_inputs_cannot_be_opened(command):
    assert failures_of(command, "open", errno.EMFILE) == 1


def test_no_links(command):
    """File systems without hard links: only the old files of a commit that fails are at risk."""
    if len(FILES[command.name]) == 1:
        pytest.skip("one file needs no link: its name changes in one step")
    for at, done in inject.runs("link", errno.EPERM, command.arguments, command.restore, command.mark):
        assert done.returncode == 0 and command.outputs() == command.new, (at, done.stderr)


@pytest.mark.parametrize("call, action", [("write", "short"), ("write", errno.EINTR), ("create", errno.EEXIST)])
def test_short_and_interrupted_writes_and_names_that_are_taken(command, call, action):
    done, came = inject.run(call, 1, action, *command.arguments, mark=command.mark)
    assert came and done.returncode == 0, done.stderr
    assert command.outputs() == command.new


def test_no_memory(command):
    """Every allocation of the tool and its libraries fails once; in the short tier a sample. What the result does not need may be
    left out, and what is printed after the files exist may fail."""
    step = 1 if inject.LONG else {"kl": 3, "map": 3, "stats": 3, "distill": 11}[command.name]
    for at, done in inject.runs("allocate", errno.ENOMEM, command.arguments, command.restore, command.mark, step):
        if done.returncode != 0 and command.outputs() != command.new:
            assert_failed(command, at, done)
            assert re.search("memory|could not be allocated", done.stderr), (at, done.stderr)
            continue
        assert command.outputs() == command.new and done.returncode in (0, 3), (at, done.returncode, done.stderr)


def skeleton(value):
    """Keys and lengths, without numbers and words: times differ."""
    if isinstance(value, dict):
        return {key: skeleton(member) for key, member in value.items()}
    return [skeleton(member) for member in value] if isinstance(value, list) else None


@pytest.mark.parametrize("more", [["kl", "--reduction", "none"], ["map", "--buckets", "2", "--head", "all"], ["stats"], ["distill"]], ids=lambda more: more[0])
def test_no_memory_for_json(tmp_path, more):
    """An object is printed whole, or the exit status says that it is not."""
    pair = save(tmp_path / "pair.safetensors", make_tensors(batch=1, len_q=3, len_k=3, dim_t=4, dim_s=4))
    inputs = {"distill": [*SMALL, "--out", tmp_path / "out", "--steps", "1"]}
    arguments = [more[0], *inputs.get(more[0], [pair]), *more[1:], "--json"]
    whole = skeleton(json.loads(run(*arguments).stdout))
    step = 1 if inject.LONG else 11 if more[0] == "distill" else 5
    for at, done in inject.runs("allocate", errno.ENOMEM, arguments, lambda: None, tmp_path / "mark", step):
        if done.returncode == 0:
            assert skeleton(json.loads(done.stdout)) == whole, at
        elif "lex_scan_string" not in done.stderr:  # Jansson asserts that there is memory for a string with escapes
            assert 2 <= done.returncode <= 5 and len(done.stderr.splitlines()) == 1, (at, done.returncode, done.stderr)


# ---- Inputs ----------------------------------------------------------------------------------------------------------


@READERS
def test_inputs_cannot_be_mapped(command):
    for at, done in inject.runs("mmap", errno.ENODEV, command.arguments, command.restore, command.mark):
        assert_failed(command, at, done, os.strerror(errno.ENODEV), "cannot map")


CHANGES = {
    "truncate": "must not change while it is read",
    "rewrite": "was written while it was read",
    "rewrite_hidden": "its content or attributes changed while it was read",
}


@READERS
@pytest.mark.parametrize("action", CHANGES)
def test_inputs_that_change(command, action):
    """After it is mapped, a file is cut in half, or its last byte changes, also with the old modification time."""
    before = {path: path.read_bytes() for path in command.inputs.iterdir()}

    def prepare():
        command.restore()
        for path, content in before.items():
            path.write_bytes(content)
            os.utime(path, (0, 0))
        time.sleep(0.02)  # so that the next change gets another time

    numbers = 0
    for at, done in inject.runs("mmap", action, command.arguments, prepare, command.mark):
        assert_failed(command, at, done, CHANGES[action], ".safetensors")
        numbers += 1
    assert numbers == 1


# ---- Signals ---------------------------------------------------------------------------------------------------------


@READERS
def test_interrupted_at_every_call(command):
    """The files come first, all of them, whichever thread gets the signal."""
    for at, done in inject.runs("any", "interrupt", [*command.arguments, "--threads", "2"], command.restore, command.mark):
        assert done.returncode == -signal.SIGTERM, (at, done.stderr)
        assert command.outputs() == command.new, at


def test_killed_before_every_call(command):
    """Of those that change a file. Each file is the old or the new one: only a kill while the files get their names leaves some
    of both. Nothing that is left is in the way."""
    for at, done in inject.runs("any", "kill", command.arguments, command.restore, command.mark):
        assert done.returncode == -signal.SIGKILL, (at, done.stderr)
        left = [path.name for path in command.out.glob(".streamkl-*") if path.suffix in (".tmp", ".old")]
        now = {name: content for name, content in command.outputs().items() if name not in left}
        assert set(now) == set(command.old)
        assert all(content in (command.old[name], command.new[name]) for name, content in now.items()), at
        succeed(*command.arguments)
        assert {name: content for name, content in command.outputs().items() if name not in left} == command.new, at
