"""Device, threads and kernel. Tests that need a GPU are skipped without one."""

import csv
import json

import pytest
from test_bad_input import assert_refused
from tool import PORTABLE, kl_json, make_tensors, run, save, succeed, why_no_gpu


def test_kernel_by_option_and_by_environment(pair):
    assert kl_json(pair, "--kernel", PORTABLE)["kernel"] == PORTABLE
    assert kl_json(pair, env={"STREAMKL_KERNEL": PORTABLE})["kernel"] == PORTABLE
    assert kl_json(pair, env={"STREAMKL_THREADS": "1"})["threads"] == 1
    assert kl_json(pair, "--threads", 5)["threads"] == 5


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
@pytest.mark.parametrize("device, named", [("cuda", "--device=cuda:0: "), ("cuda:3", "--device=cuda:3: ")])
@pytest.mark.parametrize("command", ["kl", "map", "check", "demo"])
def test_missing_gpu(command, device, named, pair, tmp_path):
    """One line with the option and the library's reason; no file is written."""
    outputs = [pair, "--out", tmp_path / "out"] if command in ("kl", "map") else []
    assert_refused(run(command, *outputs, "--device", device), named, why_no_gpu(), code=4)
    assert list(tmp_path.iterdir()) == [pair]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["1,0,54", "0,60,20", "0,20,54", "0,-5,53"])
def test_lengths_are_checked_before_the_copy_to_the_gpu(lengths, tmp_path):
    tensors = {name: array[0] for name, array in make_tensors(batch=1, len_q=53, len_k=53).items()}
    path = save(tmp_path / "in.safetensors", tensors)
    assert_refused(run("kl", path, "--device", "cuda", "--cu-seqlens-q", lengths), "cu_seqlens_q[")


@pytest.mark.gpu
def test_gpu_and_cpu_agree_and_name_their_kernels(pair):
    text = run("kl", pair, "--device", "cuda:0").stdout
    assert "cuda_" in text and "thread" not in text
    on_gpu = json.loads(run("kl", pair, "--device", "cuda", "--json").stdout)
    on_cpu = json.loads(run("kl", pair, "--json").stdout)
    assert on_gpu["kl"] == pytest.approx(on_cpu["kl"], rel=2e-6)
    assert (on_gpu["device"], on_gpu["threads"], on_gpu["peak_growth_bytes"]) == ("cuda", 0, None)
    assert 0 < on_gpu["seconds"] < 1
    assert on_gpu["extra_bytes"] > 0


@pytest.mark.gpu
def test_gpu_index_out_of_range(pair):
    assert_refused(run("kl", pair, "--device", "cuda:99"), "--device=cuda:99: device_index=99: must be 0..", code=4)


@pytest.mark.gpu
def test_check_passes_on_every_kernel_of_the_gpu():
    done = run("check", "--device", "cuda", "--json", timeout=300)
    verdict = json.loads(done.stdout)
    assert done.returncode == 0 and verdict["pass"], done.stdout
    kernels = [kernel for kernel in json.loads(run("info", "--json").stdout)["kernels"] if kernel["usable"]]
    expected = [kernel["name"] for kernel in kernels if kernel["device"] == "cuda"]
    assert [kernel["name"] for kernel in verdict["kernels"]] == expected
    assert all(kernel["cases"] >= 4 for kernel in verdict["kernels"])
    cases = {kernel["name"]: kernel["cases"] for kernel in verdict["kernels"]}
    (on_cpu,) = json.loads(run("check", "--kernel", "cpu_portable", "--json").stdout)["kernels"]
    assert cases["cuda_general"] == on_cpu["cases"] < verdict["cases"]


def test_bench_writes_its_rows(tmp_path):
    path = tmp_path / "bench.csv"
    succeed("bench", "--lengths", "128", "--dims", "32", "--heads", "2", "--repeat", "1", "--causal", "--csv", path)
    rows = [row for row in csv.DictReader(path.open()) if row["method"] == "streaming"]
    assert [row["pass"] for row in rows] == ["forward", "backward", "one pass"]
    for row, products in zip(rows, (2, 4, 4)):
        flop = float(row["useful_gflops"]) * 1e9 * float(row["median_s"])
        assert abs(flop - products * 2 * 32 * 2 * 128 * 129 / 2) <= 1e-4 * flop


@pytest.mark.gpu
def test_demo_on_the_gpu():
    text = run("demo", "--context", "2048", "--device", "cuda").stdout
    assert "kernel cuda_" in text and "differs by at most" in text
