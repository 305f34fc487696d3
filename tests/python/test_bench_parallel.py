"""bench/run.py zigzag on the CPU, and the plan of bench/scaling.py."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import LONG

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import scaling  # noqa: E402
from harness.run import Run  # noqa: E402
from questions import zigzag  # noqa: E402


def small(name, layout="zigzag"):
    return zigzag.Case(name, layout, ranks=4, length=64, heads=4, key_heads=2, dim=16)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", [zigzag.STEP, zigzag.ONE_PASS])
def test_the_shares_of_all_ranks_sum_to_the_unsplit_call(name, layout):
    run = Run(zigzag, SimpleNamespace(device="cpu", commit="C", seed=0, csv=None, rounds=1, sample_ms=1))
    result = zigzag.measure(small(name, layout), run)
    assert not result.wrong and "slowest / mean" in result.lines[1]
    assert [row["method"] for row in result.rows] == ["unsplit", "rank 0", "rank 1", "rank 2", "rank 3", "ordering"]
    assert all(float(row["ms"]) > 0 and row["pass"] == name for row in result.rows)


def test_a_wrong_share_is_reported():
    split = zigzag.Split(small(zigzag.ONE_PASS), torch.device("cpu"))
    steps = split.steps(zigzag.ONE_PASS)
    own = steps["rank 1"]
    steps["rank 1"] = lambda: [2 * result for result in own()]
    assert all(split.errors(steps)[name] > limit for name, limit in zigzag.LIMITS.items())


def plan(length, ranks, two_passes=False, **links):
    cluster = scaling.Cluster(**{**dict(node_size=8, node_link=50, nvlink=450, efficiency=1.0), **links})
    rates = {"forward": 500, "backward": 400, "one pass": 450}
    return scaling.Plan(scaling.Model(32, 8, 128, 32), cluster, rates, length, ranks, two_passes)


def test_a_plan_counts_pairs_bytes_and_slices():
    one = plan(1024, 8)
    assert one.compute == pytest.approx(32 * 1024 * 1025 / 2 / 8 * 2 * 128 * 4 / 450e12)
    assert one.gathered == 2 * 1024 * 8 * 128 * 2 and one.scattered == 1024 * 8 * 128 * 4
    assert one.communication == pytest.approx((one.gathered + one.scattered) * 7 / 8 / 450e9)  # one node: NVLink
    assert one.memory["gathered"] == 2 / 4 * (one.gathered + one.scattered)
    assert plan(1024, 8, two_passes=True).gathered == 2 * one.gathered
    wide = plan(1024, 64)
    assert wide.compute == pytest.approx(one.compute / 8)
    assert plan(1024, 64, node_link=5).communication == pytest.approx((one.gathered + one.scattered) * 56 / 64 / 40e9)
    assert wide.exposed >= wide.communication / 4


def test_the_plan_of_the_guide_is_that_of_the_script(capsys, monkeypatch):
    """The table of docs/guide/many-gpus.md has rounded numbers of the default run."""
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    scaling.main()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    guide = (BENCH.parent / "docs/guide/many-gpus.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in guide.splitlines() if line.startswith(("| 1", "| 2", "| 5"))]
    found = {(int(row[0].replace(",", "")), int(row[1])): list(map(float, row[2:])) for row in rows}
    assert len(found) == 5
    for length, ranks, *figures in printed:
        if (int(length), int(ranks)) in found:
            compute, communication, exposed, step, _, gathered, _ = map(float, figures)
            expected = (compute, communication, exposed, step, gathered)
            assert found[int(length), int(ranks)] == pytest.approx(expected, rel=5e-3, abs=6e-3), (length, ranks)


@pytest.mark.skipif(not LONG, reason="starts processes that import torch")
@pytest.mark.parametrize("more", [[], ["--two-passes"]])
def test_a_layer_is_measured_next_to_its_plan(more):
    script = [BENCH / "scaling.py", "--measure", "256", "--heads", "2", "--key-heads", "1", *more]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "256 tokens, 2 ranks, one layer: measured 0." in done.stdout, done.stderr[-3000:]
    script[2] = "255"
    done = subprocess.run(command[: -len(script)] + script, capture_output=True, text=True)
    assert "--measure=255: must be a multiple of 4 for 2 ranks" in done.stderr
