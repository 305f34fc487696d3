"""bench/peers.py as far as it runs without a GPU and without torch: arguments, the work it counts, the CSV, the figures."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import report  # noqa: E402
from gpu.cases import BACKWARD, FORWARD, ONE_PASS, STEP, Case  # noqa: E402


def run_peers(*arguments):
    command = [sys.executable, BENCH / "peers.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


class Timed:
    """What the report reads of a method."""

    def __init__(self, name, case, refusal="", extra_memory=0, **times):
        self.name, self.case, self.refusal, self.extra_memory = name, case, refusal, extra_memory
        self.kernel, self.errors = "", {"kl": 1e-6}
        self.matmuls = {FORWARD: 2, BACKWARD: 4, ONE_PASS: 4}
        self.times = self.passes = {operation.replace("_", " "): [ms, 2 * ms, ms] for operation, ms in times.items()}


def figures(path, lengths=(1024, 2048, 4096)):
    """StreamKL, a peer, and a peer that runs out of memory after the first length."""
    for length in lengths:
        case = Case(16, length, 128, True)
        methods = [
            Timed("streamkl", case, forward=1.0, backward=2.0, extra_memory=2**20),
            Timed("streamkl", case, one_pass=2.5, extra_memory=2**20),
            Timed("flex", case, forward=4.0, backward=8.0, extra_memory=2**22),
            Timed("eager", case, forward=30.0, backward=40.0, extra_memory=2**30)
            if length == lengths[0]
            else Timed("eager", case, refusal="CUDA out of memory"),
        ]
        report.append_csv(path, report.csv_rows(methods), {"gpu": "G", "torch": "T", "commit": "C"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--peers", "fa3"], "no fa3; must be of cudnn, fa2, triton, flex, compile, eager"),
        (["--heads", 32, "--key-heads", 12], "--key-heads=12: must divide --heads=32"),
        (["--packed", "128,0"], "--packed"),
        (["--plot", "x"], "needs --csv=FILE"),
        (["--linearard", "/nowhere"], "--linearard=/nowhere: must be a checkout of LinearARD, with kernels/attention_KL/integration.py"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    ran = run_peers(*arguments)
    assert ran.returncode == 2 and message in ran.stderr


def test_linearard_is_compared_on_dense_problems_only(tmp_path):
    (tmp_path / "kernels/attention_KL").mkdir(parents=True)
    (tmp_path / "kernels/attention_KL/integration.py").touch()
    ran = run_peers("--linearard", tmp_path, "--packed", "64,32")
    assert ran.returncode == 2 and "--linearard: must be without --packed and --key-heads" in ran.stderr


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("date,value\n")
    ran = run_peers("--csv", path)
    assert ran.returncode == 2 and "its columns are not those" in ran.stderr
    assert path.read_text() == "date,value\n"


def test_visible_pairs_are_counted():
    assert Case(2, 5, 64, causal=False).pairs == 2 * 25
    assert Case(2, 5, 64, causal=True).pairs == 2 * 15
    packed = Case(2, 5, 64, causal=True, packed=(5, 1, 3))
    assert packed.pairs == 2 * (15 + 1 + 6)
    assert packed.sequences == [(0, 0, 5), (0, 5, 6), (0, 6, 9)]


def test_dense_work_is_that_of_the_packed_batch():
    packed = Case(32, 8192, 128, causal=True, key_heads=8, packed=(8192, 4096, 2048, 1024, 512))
    dense = packed.dense()
    assert (dense.batch, dense.keys, dense.packed) == (5, 32, ())
    assert dense.pairs == pytest.approx(packed.pairs, rel=0.05)


def test_the_csv_has_medians_ratios_and_refusals(tmp_path):
    figures(tmp_path / "peers.csv", lengths=(1024, 2048))
    rows = report.read_csv(tmp_path / "peers.csv")
    found = {(row["method"], row["length"], row["pass"]): row for row in rows}
    flex = found["flex", "2048", BACKWARD]
    assert (flex["ms"], flex["ours_ratio"], flex["one_pass_ratio"]) == ("8.0000", "0.25", "0.312")
    assert found["flex", "2048", STEP]["one_pass_ratio"] == "0.208"
    assert found["eager", "2048", ""]["note"] == "not measured: CUDA out of memory"
    assert flex["tflops"] == f"{4 * 2 * Case(16, 2048, 128, True).pairs * 128 / 8.0e9:.1f}"


def test_figures_are_drawn_from_the_csv_alone(tmp_path):
    pytest.importorskip("matplotlib")
    figures(tmp_path / "peers.csv")
    ran = run_peers("--csv", tmp_path / "peers.csv", "--plot", tmp_path / "gpu")
    assert ran.returncode == 0, ran.stderr
    speed, memory = (tmp_path / f"gpu-{what}.svg" for what in ("speed", "memory"))
    assert ran.stdout.split() == [str(speed), str(memory)]
    for text in (speed.read_text(), memory.read_text()):
        for name in ("StreamKL", "FlexAttention", "eager", "out of memory at the next length"):
            assert name in text


def test_what_the_csv_lacks_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    figures(tmp_path / "peers.csv")
    ran = run_peers("--csv", tmp_path / "peers.csv", "--plot", tmp_path / "gpu", "--dims", 64)
    assert ran.returncode == 1 and "no result fits --dims; it has 128" in ran.stderr
