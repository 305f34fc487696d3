"""streamkl-distill on two processes: the weights of one process with the whole batch, also from each other's checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import LONG
from distill_cases import arguments, make_teacher, run, weights

OPTIONS = dict(steps=4, needles=0, eval_sequences=1, checkpoint_every=0)


def run_two(folder, out, *more, program=("-m", "streamkl.distill"), **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = arguments(folder, out, *more, **{**OPTIONS, **options})
    answer = subprocess.run([*command, *given], capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("report.html") == 1


@pytest.mark.skipif(not LONG, reason="starts processes that import torch and transformers")
@pytest.mark.parametrize("more", [[], ["--shard", "--gradient-checkpointing"]], ids=["ddp", "fsdp2"])
def test_two_processes(tmp_path, more):
    make_teacher(tmp_path)
    assert run(tmp_path, "one", **OPTIONS) == 0
    run_two(tmp_path, "two", "--batch", "1", *more)
    run_two(tmp_path, "two", "--batch", "1", "--resume", *more)  # reads the checkpoint of the last step
    assert_same(tmp_path)


@pytest.mark.skipif(not LONG, reason="starts processes that import torch and transformers")
def test_a_sharded_control(tmp_path):
    make_teacher(tmp_path)
    assert run(tmp_path, "one", "--control", **OPTIONS) == 0
    run_two(tmp_path, "two", "--control", "--batch", "1", "--shard")
    assert_same(tmp_path)
    assert_same(tmp_path, "control")


@pytest.mark.skipif(not LONG, reason="starts processes that import torch and transformers")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="without --cpu, a run uses the GPU")
def test_two_processes_without_a_gpu(tmp_path):
    """Without --cpu, both processes once trained alone, and wrote the same files."""
    make_teacher(tmp_path)
    assert run(tmp_path, "one", **OPTIONS) == 0
    run_two(tmp_path, "two", "--batch", "1", "--no-cpu")
    assert_same(tmp_path)


@pytest.mark.skipif(not LONG, reason="starts processes that import torch and transformers")
def test_context_parallel(tmp_path):
    """Two processes with half of every sequence."""
    make_teacher(tmp_path)
    more = ["--language-weight", "0.5", "--hidden-weight", "0.5"]
    assert run(tmp_path, "one", *more, **OPTIONS) == 0
    script = Path(__file__).parent / "distill_context.py"
    run_two(tmp_path, "two", "--context-parallel", "2", *more, program=[script])
    assert_same(tmp_path)


def assert_same(folder, inside=""):
    a, b = weights(folder / "one" / inside), weights(folder / "two" / inside)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-5)
