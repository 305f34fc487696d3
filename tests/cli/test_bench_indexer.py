"""bench/indexer.py as far as it runs without a GPU and without torch: arguments, the work it counts, the CSV."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import indexer_report as report  # noqa: E402
from gpu.cases import FORWARD, STEP, IndexerCase  # noqa: E402


class Timed:
    """What the report reads of a method."""

    def __init__(self, name, flops=None, refusal="", **times):
        self.name, self.flops, self.refusal, self.kernel = name, flops or {FORWARD: 2e12, STEP: 6e12}, refusal, ""
        self.extra_memory, self.errors, self.times = 2**20, {"kl": 1e-6}, {}
        for operation, ms in times.items():
            self.times[{"forward": FORWARD, "step": STEP}.get(operation, f"forward, {operation}")] = [ms, 2 * ms, ms]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--length", 0], "--length=0: must be at least 1"),
        (["--top-k", -1], "--top-k=-1: must be at least 0"),
        (["--heads", 64, "--key-heads", 5], "--key-heads=5: must divide --heads=64"),
        (["--causal", "--full"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    ran = subprocess.run([sys.executable, BENCH / "indexer.py", *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 2 and message in ran.stderr


def test_the_work_is_that_of_visible_pairs():
    case = IndexerCase(5, heads=4, key_heads=2, dim=8, index_heads=3, index_dim=2, top_k=0, causal=True)
    seen = [1, 2, 3, 4, 5]
    assert case.pairs == sum(seen)
    assert case.flops(FORWARD) == 2 * sum(seen) * (4 * 8 + 3 * 2)
    assert case.flops(STEP) == 2 * sum(seen) * (4 * 8 + 3 * 3 * 2)
    assert IndexerCase(5, 4, 2, 8, 3, 2, top_k=2, causal=True).pairs == sum(min(2, n) for n in seen)
    assert IndexerCase(5, 4, 2, 8, 3, 2, top_k=9, causal=True).pairs == sum(seen)
    assert IndexerCase(5, 4, 2, 8, 3, 2, top_k=2, causal=False).pairs == 5 * 2


def test_ratios_and_refusals():
    case = IndexerCase(8192, 64, 64, 128, 32, 128, 0, True)
    cudnn = Timed("cudnn", {"forward, causal": 1e12, "forward, full": 1e12}, causal=2.0, full=1.0)
    methods = [Timed("streamkl", forward=4.0, step=10.0), Timed("naive", forward=60.0, step=150.0), cudnn]
    rows = list(report.csv_rows(methods, case))
    ours = next(row for row in rows if row["method"] == "streamkl" and row["pass"] == STEP)
    assert (ours["ms"], ours["tflops"], ours["naive_ratio"]) == ("10.0000", "600.0", "15")
    assert (ours["of_cudnn_causal"], ours["of_cudnn_full"]) == ("1.200", "0.600")
    assert ours.keys() <= set(report.COLUMNS) and ours["extra_bytes"] == 2**20
    refused = list(report.csv_rows([Timed("streamkl", step=10.0), Timed("naive", refusal="out of memory")], case))
    assert refused[0]["naive_ratio"] == refused[0]["of_cudnn_full"] == ""
    assert refused[1]["note"] == "not measured: out of memory"
