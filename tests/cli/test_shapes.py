"""bench/shapes.py as far as it runs without a GPU and without torch: arguments, the work it counts, the chart."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import report, shape_report  # noqa: E402
from gpu.cases import BACKWARD, FORWARD, ONE_PASS, STEP  # noqa: E402
from gpu.shape_cases import BASE, FORWARD_GIVEN, QUICK, SHAPES, Shape  # noqa: E402


def run_shapes(*arguments):
    return subprocess.run([sys.executable, BENCH / "shapes.py", *map(str, arguments)], capture_output=True, text=True)


class Timed:
    """What the report reads of gpu.alternate.Timing."""

    def __init__(self, ms):
        self.median, self.fastest = ms, ms


def timed(**times):
    return {operation.replace("_", " "): Timed(ms) for operation, ms in times.items()}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "d=7"], "--only='d=7': must be part of a name: base: 32/8 heads of 128; "),
        (["--rounds", -1], "--rounds=-1: must be at least 0"),
        (["--rounds", 0], "--rounds=0: must be at least 1 without --check"),
        (["--plot", "x.svg"], "needs --csv=FILE"),
        (["--csv", "/nowhere/shapes.csv"], "--csv=/nowhere/shapes.csv: there is no folder /nowhere"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    ran = run_shapes(*arguments)
    assert ran.returncode == 2 and message in ran.stderr


def test_a_dry_run_lists_the_shapes():
    names = [line.split("  ")[0] for line in run_shapes("--dry-run").stdout.splitlines()]
    assert names == [shape.name for shape in SHAPES]
    assert len(run_shapes("--dry-run", "--quick").stdout.splitlines()) == len(QUICK) == 10
    some = [shape.name for shape in SHAPES if "softcap" in shape.name or shape.name == "no mask"]
    lines = run_shapes("--dry-run", "--only", "softcap", "--only", "no mask").stdout.splitlines()
    assert len(lines) == len(some) > 2 and all(line.startswith(name) for line, name in zip(lines, some))


def test_visible_pairs_and_work_are_counted():
    assert Shape("", length=5).pairs == 15
    assert Shape("", length=5, causal=False).pairs == 25
    assert Shape("", length=5, window=1).pairs == 1 + 2 + 2 + 2 + 2
    assert Shape("", length=5, window=9).pairs == 15
    shape = Shape("", heads_t=4, dim_t=8, heads_s=2, dim_s=16, length=5, batch=3)
    assert shape.flops(FORWARD) == shape.flops(FORWARD_GIVEN) == 2 * 3 * 15 * (4 * 8 + 2 * 16)
    assert shape.flops(BACKWARD) == shape.flops(ONE_PASS) == 2 * 3 * 15 * (4 * 8 + 3 * 2 * 16)
    assert shape.flops(STEP) == shape.flops(FORWARD) + shape.flops(BACKWARD)
    both = Shape("", heads_t=2, heads_s=2, length=5, teacher_gradients=True)
    assert both.flops(BACKWARD) == 3 * both.flops(FORWARD)


def results():
    """The base shape, and one whose forward runs at half its rate."""
    base = shape_report.Measured(BASE, timed(forward=1.0, backward=2.0, one_pass=2.2), kernels={FORWARD: "fast"})
    base.base, base.cudnn = base.ours, timed(forward=0.8, backward=2.5)
    slow = shape_report.Measured(SHAPES[2], timed(forward=1.25, backward=9.0, one_pass=10.0), base.ours, base.cudnn)
    slow.ours[FORWARD_GIVEN] = Timed(0.5)
    slow.errors = {"kl": 1e-6, "dq_t": 1e-3, "dq_s": 2e-3, "dk_s": float("nan")}
    return base, slow


def test_ratios_are_those_of_the_same_run():
    base, slow = results()
    lines = {line["pass"]: line for line in slow.lines}
    assert (lines[BACKWARD]["base_ratio"], lines[BACKWARD]["cudnn_ratio"]) == (4.5, 3.6)
    assert lines[ONE_PASS]["cudnn_ratio"] == 4.0, "compared with the backward"
    assert lines[FORWARD_GIVEN]["base_ratio"] == 0.5
    assert lines[STEP]["ms"] == 10.25 and lines[STEP]["base_ratio"] == 10.25 / 3.0
    row = next(row for row in shape_report.csv_rows(slow) if row["pass"] == FORWARD)
    assert (row["dq_error"], row["dk_error"]) == ("2.00e-03", "nan"), "the larger one of teacher and student"
    assert row["tflops"] == f"{SHAPES[2].flops(FORWARD) / 1.25e9:.1f}"


def test_the_chart_shows_every_shape(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "shapes.csv"
    for measured in results():
        report.append_csv(path, shape_report.csv_rows(measured), {"gpu": "G", "torch": "T", "commit": "C"}, shape_report.COLUMNS)
    ran = run_shapes("--csv", path, "--plot", tmp_path / "shapes.svg")
    assert ran.returncode == 0, ran.stderr
    drawn = (tmp_path / "shapes.svg").read_text()
    assert all(name in drawn for name in (BASE.name, SHAPES[2].name, FORWARD, ONE_PASS))


def test_half_the_rate_is_drawn_as_half():
    pytest.importorskip("matplotlib")
    from gpu.shape_figure import rate_of_base

    row = next(row for row in shape_report.csv_rows(results()[1]) if row["pass"] == FORWARD)
    assert rate_of_base(row, BASE.flops(FORWARD)) == pytest.approx(0.5, rel=1e-3)


def test_a_file_without_times_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "shapes.csv"
    report.append_csv(path, [], {}, shape_report.COLUMNS)
    ran = run_shapes("--csv", path, "--plot", tmp_path / "shapes.svg")
    assert ran.returncode == 1 and "it has no times" in ran.stderr
