"""Help, version, color, man pages, and the commands other than kl."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from inject import LONG
from tool import PORTABLE, TOOL, kl_json, run

COMMANDS = ["kl", "demo", "info", "check", "bench"]


def run_on_terminal(*arguments, **env):
    """Runs the tool with a terminal as stdout and stderr, and returns its output."""
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **env}
    process = subprocess.Popen([TOOL, *map(str, arguments)], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            block = os.read(screen, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(screen)
    assert process.wait() == 0, shown
    return shown.decode()


# ---- Help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *[[command, "--help"] for command in COMMANDS]])
def test_help_at_every_level(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Usage: " + " ".join(["streamkl", *arguments[:-1]]) in done.stdout
    assert "Examples:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_command():
    assert run("help", "kl").stdout == run("kl", "--help").stdout


def test_top_level_help_lists_every_command_and_exit_status():
    text = run("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE)
    for status in range(6):
        assert re.search(rf"^  {status}  ", text, re.MULTILINE)


def test_version_equals_that_of_the_header():
    header = (Path(__file__).parents[2] / "include/streamkl.h").read_text()
    version = ".".join(re.search(rf"SKL_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    for arguments in (["--version"], ["kl", "--version"]):
        assert run(*arguments).stdout == f"streamkl {version}\n"


# ---- Tables --------------------------------------------------------------------------------------------------------


def test_table_of_kl(pair):
    text = run("kl", pair, "--causal").stdout
    number = kl_json(pair, "--causal")["kl"]
    shown = re.search(r"KL\(teacher \|\| student\)\s+(\S+)\s+mean of 148 rows", text)
    assert float(shown[1]) == pytest.approx(number, rel=1e-8)
    for word in ("forward", "memory", "kernel", "head", "GFLOP/s"):
        assert word in text
    assert "KL(student || teacher)" in run("kl", pair, "--direction", "reverse").stdout


def test_color_and_blocks_only_on_a_terminal(pair):
    """tests/test_term.c has every setting."""
    assert "█" in run_on_terminal("kl", pair) and "\x1b[" in run_on_terminal("kl", pair, LC_ALL="C")
    assert "▀" in run_on_terminal("map", pair, "--buckets", "7")
    for command in (["kl", pair], ["map", pair, "--buckets", "8"]):
        assert run(*command).stdout.isascii() and run_on_terminal(*command, LC_ALL="C", NO_COLOR="1").isascii()
        assert "\x1b" not in run(*command).stdout + run_on_terminal(*command, NO_COLOR="1")


def test_progress_only_on_a_terminal_and_cleared():
    arguments = ["demo", "--context", "8000", "--kernel", PORTABLE, "--threads", "1"]
    shown = run_on_terminal(*arguments)
    assert re.search(r"\r(forward|backward) +\[#*\.*\] +\d+ %", shown)
    assert "\r\x1b[K" in shown
    assert "\r" not in run(*arguments).stderr


# ---- info, check, demo -----------------------------------------------------------------------------------------------


def test_info():
    about = json.loads(run("info", "--json").stdout)
    names = [kernel["name"] for kernel in about["kernels"]]
    assert PORTABLE in names
    assert [kernel["chosen"] for kernel in about["kernels"] if kernel["device"] == "cpu"].count(True) == 1
    assert about["cores"] >= 1
    assert {device["device"] for device in about["devices"]} == {"cpu", "cuda"}
    text = run("info").stdout
    for name in names:
        assert name in text
    forced = json.loads(run("info", "--json", env={"STREAMKL_KERNEL": PORTABLE}).stdout)
    assert [kernel["name"] for kernel in forced["kernels"] if kernel["chosen"]] == [PORTABLE]


def check_verdict(*arguments):
    done = run("check", "--json", *arguments, timeout=300)  # ten seconds of one core, which other stages share
    verdict = json.loads(done.stdout)
    assert done.returncode == 0 and verdict["pass"], done.stdout
    assert all(0 < kernel["worst"] <= 1 for kernel in verdict["kernels"])
    return [kernel["name"] for kernel in verdict["kernels"]]


def usable_kernels():
    kernels = json.loads(run("info", "--json").stdout)["kernels"]
    return [kernel["name"] for kernel in kernels if kernel["usable"] and kernel["device"] == "cpu"]


@pytest.mark.skipif(not LONG, reason="the slowest kernels take most of the time")
def test_check_passes_on_every_usable_kernel():
    assert check_verdict() == usable_kernels()


def test_check_passes_on_the_best_kernel():
    best = usable_kernels()[0]
    assert check_verdict("--kernel", best) == [best]


def test_check_of_an_unknown_kernel():
    assert run("check", "--kernel", "no_such").returncode == 2


@pytest.mark.skipif(not LONG, reason="takes as long as the check of all kernels")
def test_check_of_one_kernel():
    text = run("check", "--kernel", PORTABLE, timeout=600).stdout
    assert re.search(rf"{PORTABLE} +pass", text)


def test_demo():
    text = run("demo", "--context", "2048", "--heads", "2", "--dim", "32").stdout
    assert "context of 2048" in text and "2 heads of size 32" in text
    for word in ("forward", "backward", "streamed", "materialized", "Try next"):
        assert word in text
    assert float(re.search(r"differs by at most (\S+)", text)[1]) < 4e-6
    assert run("demo", "--context", "1").returncode == 0
