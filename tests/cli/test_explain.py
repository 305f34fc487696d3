"""--explain: the kernels that run and the reasons, the same text from info, kl and bench."""

import json
import re

import numpy as np
import pytest
from test_bad_input import assert_refused
from tool import PORTABLE, kl_json, make_tensors, run, save, succeed

LINE = re.compile(r"^[^:]+: \w+, .*\(.+\)$")  # STEP: KERNEL, VARIANT ... (REASON)


def info_json(*options):
    return json.loads(succeed("info", "--explain", "--json", *options))


def test_info_explains_three_operations():
    answer = info_json("--kernel", PORTABLE, "--threads", "1")
    assert answer["kernel"] == PORTABLE
    assert list(answer["explain"]) == ["forward", "backward", "one pass"]
    for lines in answer["explain"].values():
        assert lines and all(LINE.match(line) and PORTABLE in line for line in lines)
    text = run("info", "--explain", "--kernel", PORTABLE, "--threads", "1").stdout
    assert "1 x 4096 queries x 4096 keys, 1 head of size 64, f32" in text
    for operation, lines in answer["explain"].items():
        assert f"\n  {operation}\n" in text
        assert all(f"\n    {line}\n" in text for line in lines)


def test_info_explains_the_shape_that_was_given():
    """16-bit key gradients cannot be summed in place: they need f32 sums in the workspace."""
    shape = ("--dtype", "bf16", "--context", "16384")
    in_16_bits = info_json(*shape)["explain"]["backward"]
    in_f32 = info_json(*shape, "--grad-f32")["explain"]["backward"]
    assert any("key gradients are summed in f32" in line for line in in_16_bits)
    assert any("f32 key gradients are summed in place" in line for line in in_f32)
    teacher = info_json("--grad-teacher")["explain"]["backward"]
    assert any("dq_t" in line for line in teacher)
    text = run("info", "--explain", "--heads", "8", "--index-heads", "4", "--top-k", "16", "--causal").stdout
    assert "8 heads of size 64, f32, indexer with 4 heads, top-k 16, causal" in text
    assert "dw_s" in text


BUILD = json.loads(run("info", "--json").stdout)["build"]
HAS_GPU_KERNELS = "CUDA" in BUILD


@pytest.mark.skipif(not HAS_GPU_KERNELS, reason="a build without GPU kernels")
def test_info_explains_gpus_that_are_not_here():
    problem = ("--dtype", "bf16", "--dim", "128", "--heads", "16", "--causal")
    kernels = {gpu: info_json(*problem, "--gpu", gpu)["kernel"] for gpu in ("h100", "h200", "a100", "b200")}
    assert kernels["h100"] == kernels["h200"] == "cuda_sm90_bf16_128"
    assert kernels["a100"] == kernels["b200"] == "cuda_sm80_bf16_128"
    for gpu in ("l40s", "rtx5090"):
        answer = info_json(*problem, "--gpu", gpu)
        assert list(answer["explain"]) == ["forward", "backward", "one pass"]
        for lines in answer["explain"].values():
            assert lines and all(LINE.match(line) and "cuda_" in line for line in lines)
    assert "16 heads of size 128, bf16, causal, GPU h100\n" in run("info", "--explain", *problem, "--gpu", "h100").stdout


@pytest.mark.skipif(not HAS_GPU_KERNELS, reason="a build without GPU kernels")
def test_info_refuses_an_unknown_gpu():
    done = run("info", "--explain", "--gpu", "h1000")
    assert_refused(done, "options.gpu=h1000: must be a100, b200, h100, h200, l40s or rtx5090")


@pytest.mark.skipif(HAS_GPU_KERNELS, reason="a build with GPU kernels")
def test_info_refuses_gpus_without_their_kernels():
    assert_refused(run("info", "--explain", "--gpu", "h100"), f"--gpu=h100: this build has no GPU kernels; it has {BUILD}", code=4)


def test_kl_explains_what_it_runs(pair, tmp_path):
    assert "explain" not in kl_json(pair)
    forward_only = kl_json(pair, "--explain")
    assert list(forward_only["explain"]) == ["forward"]
    both = kl_json(pair, "--explain", "--grad", tmp_path / "grad")
    assert list(both["explain"]) == ["forward", "backward"]
    for lines in both["explain"].values():
        assert lines and all(LINE.match(line) for line in lines)
        assert both["kernel"] in lines[0]
    text = run("kl", pair, "--explain", "--grad", tmp_path / "grad").stdout
    assert all(f"    {line}\n" in text for lines in both["explain"].values() for line in lines)


@pytest.mark.gpu
def test_kl_explains_strides_on_the_gpu(tmp_path):
    """Rows of 65 bf16 elements are not aligned to 16 bytes, so no kernel runs that loads bf16 by TMA or cp.async."""
    tensors = {name: np.asarray(array) for name, array in make_tensors(dim_t=65, dim_s=65).items()}
    path = save(tmp_path / "in.safetensors", tensors, "bf16")
    done = run("kl", path, "--device", "cuda", "--explain", "--json")
    forward = json.loads(done.stdout)["explain"]["forward"][0]
    assert "cuda_" in forward and "bf16" not in forward
