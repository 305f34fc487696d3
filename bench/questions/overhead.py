"""Host time of a call of streamkl.attention_kl on small tensors, and the time of the import, in microseconds.

    bench/run.py overhead
    bench/run.py overhead --device cpu    # on tensors of size 1

On a GPU, calls are submitted without waiting for their kernels.
"""

import os
import statistics
import subprocess
import sys
import time

import torch

import streamkl
from harness.attention import Shape, prepared_calls
from harness.library import FORWARD, lib
from harness.run import Result
from peers.attention import leaves_of

COLUMNS = "date gpu torch commit case call us note".split()
IMPORT = "import torch, time; begin = time.perf_counter(); import streamkl; print(time.perf_counter() - begin)"


def cases(given):
    """Of tensors [1, heads, length, dim]."""
    (heads, length, dim), dtype = ((16, 256, 64), "bf16") if given.device == "cuda" else ((1, 1, 1), "f32")
    return [Shape("host time", *(heads, heads, dim) * 2, length=length, dtype_t=dtype, dtype_s=dtype)]


def host_microseconds(run, device, calls=20, samples=50):
    """Host time of a call. On a GPU the median of the samples, whose launches all fit into the queue of a stream.

    On the CPU the fastest sample, in CPU time of this thread, so that other processes do not count.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    times = []
    for _ in range(samples + 1):
        if on_gpu:
            torch.cuda.synchronize(device)
        begin = clock()
        for _ in range(calls):
            run()
        times.append((clock() - begin) / calls)
    return (statistics.median(times[1:]) if on_gpu else min(times[1:])) * 1e6


def c_call(calls):
    """The forward in C, with structs and memory that are ready."""
    ((run, arguments),) = calls.prepared(FORWARD)
    return lambda keep=calls: lib.check(run(*arguments))


def host_calls(shape, device):
    """{name: call}"""
    calls = prepared_calls(shape, device)
    plain = list(calls.tensors.values())
    student = [*plain[:2], *leaves_of(*plain[2:])]
    _, *lses = streamkl.attention_kl(*plain, causal=True, layout="bhnd", return_lse=True)
    lses, output = dict(zip(("lse_t", "lse_s"), lses)), torch.ones_like(plain[0])
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward(tensors, **lses):
        return streamkl.attention_kl(*tensors, causal=True, layout="bhnd", **lses)

    def with_backward(call, *upstream):
        student[2].grad = student[3].grad = None
        call().backward(*upstream)

    return {
        "C call, forward": c_call(calls),
        "forward": lambda: forward(plain),
        "forward that records a graph": lambda: forward(student),
        "forward and backward": lambda: with_backward(lambda: forward(student)),
        "one pass, without its backward": lambda: forward(student, **lses),
        "one pass and its backward": lambda: with_backward(lambda: forward(student, **lses)),
        "torch SDPA, forward": lambda: attend(*plain[:3], is_causal=True),
        "torch SDPA, forward and backward": lambda: with_backward(lambda: attend(*student[2:], plain[0], is_causal=True), output),
    }  # fmt: skip


def import_seconds():
    path = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }  # this repository's package, where none is installed
    asked = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, env=path)
    return float(asked.stdout)


def measure(shape, run):
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    us = {name: f"{host_microseconds(call, run.device):.1f}" for name, call in host_calls(shape, run.device).items()}
    us["import streamkl, after import torch"] = f"{import_seconds() * 1e6:.0f}"
    return Result([{"call": name, "us": figure} for name, figure in us.items()])
