"""bench/step.py as far as it runs without a GPU and without torch: arguments, the list of setups, the CSV."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import step_report as report  # noqa: E402
from gpu.step_cases import COMPUTED, GIVEN, HUGGING_FACE, LAYERS, NO_LOSS, QUICK, SETUPS, STUDENTS, Setup  # noqa: E402


def run_step(*arguments):
    return subprocess.run([sys.executable, BENCH / "step.py", *map(str, arguments)], capture_output=True, text=True)


def timed(ms, peak=0):
    """What the report reads of gpu.alternate.Timing."""
    return SimpleNamespace(median=ms, fastest=ms, peak_bytes=peak)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kind", "jax"], "--kind: invalid choice: 'jax'"),
        (["--lengths", 5], "--lengths: no setup has 5 tokens; there are hugging face 16384; "),
        (["--quick", "--lengths", 65536], "--lengths: no setup has 65536 tokens"),
        (["--rounds", 0], "--rounds=0: must be at least 1"),
        (["--csv", "/nowhere/step.csv"], "--csv=/nowhere/step.csv: there is no folder /nowhere"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    ran = run_step(*arguments)
    assert ran.returncode == 2 and message in ran.stderr


def test_a_dry_run_lists_the_setups():
    assert len(run_step("--dry-run").stdout.splitlines()) == len(SETUPS) == 12
    assert len(run_step("--dry-run", "--quick").stdout.splitlines()) == len(QUICK) == 4
    some = run_step("--dry-run", "--kind", "layers", "--lengths", "8192,16384").stdout
    assert some.count("layers: student") == some.count("\n") == 3 and "LSEs computed" in some


def test_percent_and_memory_are_those_over_the_step_without_the_loss():
    setup = Setup(LAYERS, STUDENTS[0], 8192)
    timings = {NO_LOSS: timed(20.0, 1000), GIVEN: timed(25.0, 1500), COMPUTED: timed(None)}
    rows = {row["variant"]: row for row in report.csv_rows(setup, timings, ["why"], "cudnn")}
    assert rows.keys() == {NO_LOSS, GIVEN}
    assert (rows[GIVEN]["percent"], rows[GIVEN]["more_bytes"], rows[GIVEN]["attention"]) == ("25.0", 500, "cudnn")
    assert (rows[NO_LOSS]["percent"], rows[NO_LOSS]["more_bytes"]) == ("", "")
    assert all(row.keys() <= set(report.COLUMNS) and row["note"] == "why" for row in rows.values())


def test_a_setup_that_failed_has_a_row_with_the_reason():
    setup = Setup(HUGGING_FACE, STUDENTS[0], 8192)
    (row,) = report.csv_rows(setup, {}, ["failed: out of memory"], "cudnn")
    assert row["note"] == "failed: out of memory" and row["attention"] == "sdpa" and "ms" not in row
