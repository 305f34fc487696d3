"""Host time of a call of streamkl.attention_kl, and the time of the import.

    bench/run.py overhead
    bench/run.py overhead --device cpu    # on tensors of size 1

On a GPU, calls are submitted without waiting for their kernels, on small tensors.
"""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

import streamkl
from harness.attention import Shape, prepared_calls
from harness.library import FORWARD, RUN, lib
from harness.report import rounded
from harness.run import Result

COLUMNS = "date gpu torch commit case call us note".split()
SHOWN = "call us".split()
IMPORT = "import torch, time; begin = time.perf_counter(); import streamkl; print(time.perf_counter() - begin)"


@dataclass(frozen=True)
class Case:
    name: str

    def __str__(self):
        return self.name


def add_options(parser):
    pass


def cases(given):
    return [Case("host time")]


def columns_of(case):
    return {"case": case.name}


# ---- Host time -----------------------------------------------------------------------------------------------------


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


def shape_of(size, dtype):
    """Of tensors [1, heads, length, dim]."""
    _, heads, length, dim = size
    return Shape("", heads, heads, dim, heads, heads, dim, length=length, dtype_t=dtype, dtype_s=dtype)


def c_call(calls):
    """The forward in C, with structs and memory that are ready."""
    ((operation, *structs),) = calls.calls[FORWARD]
    workspace = calls.workspace
    stream = torch.cuda.current_stream().cuda_stream if calls.device.type == "cuda" else None
    run = getattr(calls.library, RUN[operation])
    arguments = (calls.plan.handle, *structs, workspace.data_ptr(), workspace.numel(), stream)
    return lambda keep=calls: lib.check(run(*arguments))


def host_calls(device, size, dtype):
    """{name: call} on tensors [1, heads, length, dim]."""
    calls = prepared_calls(shape_of(size, dtype), device)
    plain = list(calls.tensors.values())
    student = [*plain[:2], *(tensor.clone().requires_grad_() for tensor in plain[2:])]
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
    asked = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return float(asked.stdout)


# ---- Measuring -----------------------------------------------------------------------------------------------------


def measure(case, run):
    on_gpu = run.device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    calls = host_calls(run.device, *(((1, 16, 256, 64), "bf16") if on_gpu else ((1, 1, 1, 1), "f32")))
    us = {name: rounded(host_microseconds(call, run.device), ".1f") for name, call in calls.items()}
    us["import streamkl, after import torch"] = rounded(import_seconds() * 1e6, ".0f")
    return Result([columns_of(case) | {"call": name, "us": figure} for name, figure in us.items()])
